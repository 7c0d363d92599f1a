"""The chart without a cluster: what it renders, and which values it refuses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.apiserver.chart.conftest import CHART, POOL, ROOT, Helm, one
from tests.lab import LabError
from trainingjob.engine.settings import load
from trainingjob.planning.catalogue import NodePool, NodeShape

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def config(manifests: list[dict[str, Any]]) -> str:
    return str(one(manifests, "ConfigMap")["data"]["config.yaml"])


def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(one(manifests, "Deployment")["spec"]["template"])


def test_lint(offline: Helm) -> None:
    assert "0 chart(s) failed" in offline("lint", "--strict", str(CHART))
    values = {"namespaces": ["team-a"], "nodePools": [POOL], "crds": {"install": False}}
    assert "0 chart(s) failed" in offline("lint", "--strict", str(CHART), values=values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"replica": 1}, "additional properties 'replica' not allowed"),
        ({"replicas": "2"}, "at '/replicas': got string, want integer"),
        ({"watchNodes": "no"}, "at '/watchNodes': got string, want boolean"),
        ({"workers": 0}, "at '/workers': minimum: got 0, want 1"),
        ({"logLevel": "info"}, "at '/logLevel': value must be one of 'DEBUG', 'INFO'"),
        ({"image": {"name": "x"}}, "at '/image': additional properties 'name' not allowed"),
        ({"image": {"digest": "1234"}}, "at '/image/digest': '1234' does not match pattern"),
        ({"auth": {"existingSecret": "A_b"}}, "at '/auth/existingSecret': 'A_b' does not match"),
        ({"namespaces": "team-a"}, "at '/namespaces': got string, want array"),
        ({"namespaces": ["a", "a"]}, "at '/namespaces': items at 0 and 1 are equal"),
        ({"nodePools": [{"name": "a"}]}, "at '/nodePools/0': missing property 'node'"),
        (
            {"nodePools": [{**POOL, "gputype": "h100"}]},
            "at '/nodePools/0': additional properties 'gputype' not allowed",
        ),
        (
            {"nodePools": [{**POOL, "node": {"cpu": 3.5, "memory": "1Gi"}}]},
            "at '/nodePools/0/node/cpu': got number, want",
        ),
        (
            {"nodePools": [{**POOL, "node": {"cpu": "4", "memory": "1GB"}}]},
            "at '/nodePools/0/node/memory': '1GB' does not match pattern",
        ),
        (
            {"nodePools": [{**POOL, "nodeSelector": {"gpu": True}}]},
            "at '/nodePools/0/nodeSelector/gpu': got boolean, want string",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_values_are_refused(offline: Helm, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(LabError, match=re.escape(problem)):
        offline.render(values)


def test_a_parent_chart_may_switch_and_share(offline: Helm) -> None:
    assert offline.render({"enabled": True, "global": {"imageRegistry": "x"}})


def test_every_value_is_described() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(values, SCHEMA)

    def check(schema: dict[str, Any], where: str) -> None:
        assert schema.get("description"), f"{where} has no description"
        for name, part in schema.get("properties", {}).items():
            check(part, f"{where}.{name}")
        if "properties" in schema:
            assert schema["additionalProperties"] is False, where
        if "properties" in schema.get("items", {}):
            check(schema["items"], f"{where}[]")

    check(SCHEMA, "values")
    assert list(values) == list(SCHEMA["properties"]), "values.yaml and the schema differ"
    for name, default in values.items():
        described = SCHEMA["properties"][name].get("properties", {})
        if isinstance(default, dict) and described:
            assert list(default) == list(described), name

    leaves = set(_leaves(SCHEMA, 0))
    above = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if (match := re.match(r"( *)(\w+):", line)) and (len(match[1]) // 2, match[2]) in leaves:
            assert above.lstrip().startswith("#"), f"no comment above {line.strip()}"
        above = line


def _leaves(schema: dict[str, Any], depth: int) -> Iterator[tuple[int, str]]:
    """Depth and name of the values that do not only group others."""
    for name, part in schema["properties"].items():
        if "properties" in part and name != "resources":
            yield from _leaves(part, depth + 1)
        else:
            yield depth, name


def test_the_schema_knows_what_the_operator_knows() -> None:
    pool = SCHEMA["properties"]["nodePools"]["items"]
    for model, schema in ((NodePool, pool), (NodeShape, pool["properties"]["node"])):
        fields = {f.alias or name: f for name, f in model.model_fields.items()}
        assert set(schema["properties"]) == set(fields)
        assert set(schema["required"]) == {n for n, f in fields.items() if f.is_required()}
        for name, field in fields.items():
            if "default" in schema["properties"][name]:
                assert schema["properties"][name]["default"] == field.default, name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"nodePools": [POOL, {"name": "cpu", "node": {"cpu": 8, "memory": "32Gi"}}]},
        {"namespaces": ["team-a", "team-b"], "watchNodes": False, "workers": 4},
        {"logLevel": "DEBUG", "fullnameOverride": "other"},
    ],
    ids=["defaults", "pools", "namespaces", "names"],
)
def test_the_operator_accepts_its_config(
    offline: Helm, values: dict[str, Any], tmp_path: Path
) -> None:
    manifests = offline.render(values)
    file = tmp_path / "config.yaml"
    file.write_text(config(manifests))
    settings = load(file)

    assert len(settings.node_pools) == len(values.get("nodePools", []))
    assert settings.namespaces == values.get("namespaces", [])
    assert settings.watch_nodes == values.get("watchNodes", True)
    assert settings.workers == values.get("workers", 16)
    assert settings.log_level == values.get("logLevel", "INFO")
    assert settings.leader_election.enabled
    assert settings.leader_election.namespace == "system"
    lease = one(manifests, "Role", f"{settings.leader_election.name}-leader-election")
    assert lease["rules"][0]["resourceNames"] == [settings.leader_election.name]

    (container,) = pod(manifests)["spec"]["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "config")
    assert container["args"][:2] == ["--config", f"{mount['mountPath']}/config.yaml"]
    assert settings.token_key_file == f"{mount['mountPath']}/key"
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]


def test_node_pools_reach_the_operator_unchanged(offline: Helm, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config(offline.render({"nodePools": [POOL]})))
    assert load(file).node_pools == [NodePool.model_validate(POOL)]


def test_a_change_of_the_config_restarts_the_operator(offline: Helm) -> None:
    def annotations(values: dict[str, Any]) -> dict[str, str]:
        return dict(pod(offline.render(values))["metadata"]["annotations"])

    before = annotations({})
    assert annotations({"replicas": 3}) == before
    assert annotations({"nodePools": [POOL]}) != before
    assert annotations({"podAnnotations": {"a": "b"}}) == {"a": "b", **before}


def test_crd_is_the_generated_one(offline: Helm) -> None:
    generated = (ROOT / "crds" / "trainingjobs.yaml").read_text()
    assert (CHART / "files" / "trainingjobs.yaml").read_text() == generated, "run `make generate`"

    rendered = one(offline.render(), "CustomResourceDefinition")
    metadata = rendered.pop("metadata")
    expected = yaml.safe_load(generated)
    assert metadata["name"] == expected.pop("metadata")["name"]
    assert rendered == expected
    assert metadata["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"

    let_go = one(offline.render({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "annotations" not in let_go["metadata"]
    kinds = [m["kind"] for m in offline.render({"crds": {"install": False}})]
    assert "CustomResourceDefinition" not in kinds


def test_key(offline: Helm) -> None:
    first, second = (one(offline.render(), "Secret") for _ in range(2))
    assert set(first["data"]) == {"key"}
    assert first["data"]["key"] != second["data"]["key"]
    assert first["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"

    own = offline.render({"auth": {"existingSecret": "mine"}})
    assert "Secret" not in [m["kind"] for m in own]
    for manifests, name in ((own, "mine"), (offline.render(), "tj-trainingjob-operator-key")):
        volume = pod(manifests)["spec"]["volumes"][0]
        assert volume["projected"]["sources"][1]["secret"]["name"] == name


def test_one_replica_has_no_disruption_budget(offline: Helm) -> None:
    assert one(offline.render(), "PodDisruptionBudget")
    kinds = [m["kind"] for m in offline.render({"replicas": 1})]
    assert "PodDisruptionBudget" not in kinds


def test_image(offline: Helm) -> None:
    def image(**values: str) -> str:
        return str(pod(offline.render({"image": values}))["spec"]["containers"][0]["image"])

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    digest = f"sha256:{'0a' * 32}"
    assert image(repository="example.org/o") == f"example.org/o:{version}"
    assert image(repository="example.org/o", tag="main") == "example.org/o:main"
    assert image(repository="example.org/o", tag="x", digest=digest) == f"example.org/o@{digest}"


def test_pod_settings(offline: Helm) -> None:
    values = {
        "imagePullSecrets": [{"name": "pull"}],
        "extraArgs": ["--verbose"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "podLabels": {"team": "ml", "app.kubernetes.io/name": "not this"},
        "nodeSelector": {"role": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "terminationGracePeriodSeconds": 10,
        "podSecurityContext": {"runAsUser": None},
    }
    manifests = offline.render(values)
    template = pod(manifests)
    spec = template["spec"]
    selector = one(manifests, "Deployment")["spec"]["selector"]["matchLabels"]
    assert template["metadata"]["labels"].items() >= {**selector, "team": "ml"}.items()
    assert spec["imagePullSecrets"] == values["imagePullSecrets"]
    assert spec["containers"][0]["args"][-1] == "--verbose"
    assert spec["containers"][0]["env"] == values["extraEnv"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert spec[name] == values[name]
    assert spec["terminationGracePeriodSeconds"] == 10
    assert "runAsUser" not in spec["securityContext"]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": selector}


def test_names_stay_within_their_limits(offline: Helm) -> None:
    for manifest in offline.render(name="a" * 53):
        assert len(manifest["metadata"]["name"].rpartition(":")[2]) <= 63
