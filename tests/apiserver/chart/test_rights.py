"""The operator's rights: all that it needs, and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.chart.conftest import CHART, ROOT, Helm, allowed, one
from tests.lab import ControlPlane, wait_for
from tests.lab.controlplane import free_ports

NAME = "tj-trainingjob-operator"
ACCOUNT = f"system:{NAME}"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

#: What the operator's code asks for where jobs are.
NEEDED = {
    ("raytraining.dev", "trainingjobs"): {"get", "list", "watch", "patch", "delete"},
    ("raytraining.dev", "trainingjobs/status"): {"update"},
    ("raytraining.dev", "trainingjobs/finalizers"): {"update"},
    ("ray.io", "rayclusters"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "pods"): {"list", "watch", "delete"},
    ("", "events"): {"get", "list", "create", "patch"},
    ("", "secrets"): {"create", "delete"},
    ("", "configmaps"): {"create", "patch", "delete"},
}
NODES = {"get", "list", "watch"}

#: What is tried besides: the rights by which others are got, and neighbours of those needed.
OTHERS = {
    ("", "nodes"): VERBS,
    ("", "namespaces"): VERBS,
    ("", "services"): VERBS,
    ("", "serviceaccounts"): (*VERBS, "impersonate"),
    ("", "serviceaccounts/token"): ("create",),
    ("", "pods/exec"): ("create", "get"),
    ("", "pods/log"): ("get",),
    ("", "pods/status"): ("patch", "update"),
    ("", "pods/ephemeralcontainers"): ("patch", "update"),
    ("", "persistentvolumeclaims"): VERBS,
    ("apps", "deployments"): VERBS,
    ("batch", "jobs"): VERBS,
    ("ray.io", "rayclusters/status"): VERBS,
    ("coordination.k8s.io", "leases"): VERBS,
    ("rbac.authorization.k8s.io", "roles"): (*VERBS, "bind", "escalate"),
    ("rbac.authorization.k8s.io", "clusterroles"): (*VERBS, "bind", "escalate"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"): VERBS,
    ("apiextensions.k8s.io", "customresourcedefinitions"): VERBS,
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations"): VERBS,
    ("*", "*"): ("*",),
}

Question = tuple[str, str, str, str]


def questions(namespace: str) -> Iterator[Question]:
    """Every right that is tried in a namespace, or with "" in all of them."""
    for group, resource in NEEDED:
        for verb in VERBS:
            yield namespace, group, resource, verb
    for (group, resource), verbs in OTHERS.items():
        for verb in verbs:
            yield namespace, group, resource, verb


def needed(namespace: str, *, jobs: bool, nodes: bool) -> set[Question]:
    """The rights that the operator should have there."""
    table = {**(NEEDED if jobs else {}), **({("", "nodes"): NODES} if nodes else {})}
    return {
        (namespace, group, resource, verb)
        for (group, resource), verbs in table.items()
        for verb in verbs
    }


MODES: dict[str, dict[str, Any]] = {
    "everywhere": {},
    "two namespaces": {"namespaces": ["team-a", "team-b"]},
    "two namespaces, no nodes": {"namespaces": ["team-a", "team-b"], "watchNodes": False},
}


@pytest.fixture(params=MODES)
def installed(request: pytest.FixtureRequest, helm: Helm) -> Iterator[dict[str, Any]]:
    values = MODES[request.param]
    helm("install", "tj", str(CHART), "--namespace=system", values=values)
    yield values
    helm("uninstall", "tj", "--namespace=system")


def test_rights_are_exactly_those_needed(installed: dict[str, Any], cluster: ControlPlane) -> None:
    watched = installed.get("namespaces", [])
    nodes = installed.get("watchNodes", True)
    for namespace in ("", "team-a", "team-b", "other", "kube-system"):
        have = allowed(cluster, ACCOUNT, questions(namespace))
        want = needed(namespace, jobs=not watched or namespace in watched, nodes=nodes)
        assert have - want == set(), f"too much in {namespace or 'all namespaces'}"
        assert want - have == set(), f"too little in {namespace or 'all namespaces'}"


def test_the_lease_is_the_only_one(installed: dict[str, Any], cluster: ControlPlane) -> None:
    lease = "coordination.k8s.io"
    asked = {
        (namespace, lease, f"leases{name}", verb)
        for namespace in ("system", "other")
        for name in (f":{NAME}", ":another")
        for verb in ("get", "update", "patch", "delete")
    } | {(namespace, lease, "leases", verb) for namespace in ("system", "other") for verb in VERBS}
    assert allowed(cluster, ACCOUNT, asked) == {
        ("system", lease, f"leases:{NAME}", "get"),
        ("system", lease, f"leases:{NAME}", "update"),
        ("system", lease, "leases", "create"),
    }


def test_rights_for_users_join_the_usual_roles(helm: Helm) -> None:
    # The roles are put together by a controller, which does not run here: its rule is tried.
    manifests = helm.render()
    view, edit = (one(manifests, "ClusterRole", f"trainingjob-{n}") for n in ("view", "edit"))
    prefix = "rbac.authorization.k8s.io/aggregate-to"
    for role, joined in ((view, {"view", "edit", "admin"}), (edit, {"edit", "admin"})):
        labels = role["metadata"]["labels"]
        found = {name for name in ("view", "edit", "admin") if f"{prefix}-{name}" in labels}
        assert found == joined
    verbs = {verb for rule in view["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch"}
    subjects = [m["roleRef"]["name"] for m in manifests if m["kind"].endswith("RoleBinding")]
    assert not any(name.startswith("trainingjob-") for name in subjects)


JOB = """
apiVersion: raytraining.dev/v1alpha1
kind: TrainingJob
metadata: {name: hello, namespace: team-a}
spec:
  image: example.org/trainer:1
  rayVersion: "2.60.0"
  entrypoint: "true"
  workers: {replicas: 1}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: head, namespace: team-a, labels: {ray.io/cluster: CLUSTER}}
spec:
  containers: [{name: ray, image: example.org/trainer:1}]
"""


def test_the_operator_is_never_forbidden_anything(
    installed: dict[str, Any], helm: Helm, cluster: ControlPlane, tmp_path: Path
) -> None:
    """A job from its creation to its deletion, by the operator with its own rights."""
    config = yaml.safe_load(one(helm.render(installed), "ConfigMap")["data"]["config.yaml"])
    config |= {"tokenKeyFile": str(tmp_path / "key"), "port": free_ports(1)[0]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "key").write_text("k" * 64)
    user = f"system:serviceaccount:{ACCOUNT}"
    before = len(cluster.audit_events())

    def team(*arguments: str, input: str | None = None) -> str:
        return cluster.kubectl("-n", "team-a", *arguments, input=input)

    def field(kind: str, path: str) -> str:
        return team("get", kind, "-o", f"jsonpath={{.items[0]{path}}}", "--ignore-not-found")

    with (tmp_path / "log").open("wb") as log:
        operator = subprocess.Popen(
            [sys.executable, "-m", "trainingjob.engine", "--config", tmp_path / "config.yaml"],
            env={
                **os.environ,
                "KUBECONFIG": str(cluster.kubeconfig_for(user, ["system:authenticated"])),
                "PYTHONPATH": str(ROOT / "operator"),
            },
            stdout=log,
            stderr=log,
        )
    try:
        team("create", "-f", "-", input=JOB)
        wait_for(
            lambda: team("get", "rayclusters", "-o", "name"),
            30,
            "no RayCluster",
            log=tmp_path / "log",
        )
        name = field("rayclusters", ".metadata.name")
        assert {"secret", "configmap"} <= {
            kind for kind in ("secret", "configmap") if team("get", kind, name)
        }
        wait_for(lambda: field("trainingjobs", ".status.phase"), 20, "no status")
        team("create", "-f", "-", input=POD.replace("CLUSTER", name))
        team("delete", "trainingjob", "hello", "--wait=false")
        wait_for(
            lambda: not team("get", "trainingjobs,rayclusters,pods", "-o", "name"),
            60,
            "something is left",
            log=tmp_path / "log",
        )
    finally:
        operator.terminate()
        code = operator.wait(20)
        cluster.kubectl("-n", "system", "delete", "lease", NAME, "--ignore-not-found")
    assert code == 0

    def mine() -> list[dict[str, Any]]:
        return [e for e in cluster.audit_events()[before:] if e["user"]["username"] == user]

    refused = [e for e in mine() if e.get("responseStatus", {}).get("code") == 403]
    assert refused == [], json.dumps(refused[:3], indent=1)
    used = {(e["verb"], e["objectRef"]["resource"]) for e in mine() if "objectRef" in e}
    assert used >= {
        ("update", "leases"),
        ("update", "trainingjobs"),
        ("create", "events"),
        ("create", "secrets"),
        ("patch", "configmaps"),
        ("patch", "rayclusters"),
        ("delete", "rayclusters"),
        ("delete", "pods"),
    }, "the job did not come as far as it should"
    assert (("watch", "nodes") in used) == installed.get("watchNodes", True)
