"""The chart on a real API server: accepted, installed, upgraded, removed."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.apiserver.chart.conftest import CHART, POOL, Helm, one
from tests.lab import ControlPlane, LabError, wait_for

CRD = "trainingjobs.raytraining.dev"
EVERYTHING: dict[str, Any] = {
    "nodePools": [POOL],
    "namespaces": ["team-a", "team-b"],
    "imagePullSecrets": [{"name": "pull"}],
    "extraEnv": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    "podLabels": {"team": "ml"},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"role": "system"},
    "tolerations": [{"operator": "Exists"}],
    "priorityClassName": "system-cluster-critical",
    "serviceAccount": {"annotations": {"a": "b"}},
    "metrics": {"service": {"labels": {"release": "prometheus"}}},
    "crds": {"keep": False},
}
SMALLEST = {
    "replicas": 1,
    "namespaces": ["team-a"],
    "watchNodes": False,
    "auth": {"existingSecret": "mine"},
    "crds": {"install": False},
    "rbac": {"userRoles": False},
    "serviceAccount": {"create": False, "name": "mine"},
    "metrics": {"service": {"create": False}},
    "topologySpreadConstraints": [],
}


@pytest.fixture
def removed(helm: Helm, cluster: ControlPlane) -> Iterator[None]:
    """Nothing is left of the release after the test."""
    yield
    helm("uninstall", "tj", "--namespace=system", "--ignore-not-found")
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")
    cluster.kubectl("-n", "system", "delete", "secret", "--all")


def install(helm: Helm, command: str = "install", **values: Any) -> str:
    return helm(command, "tj", str(CHART), "--namespace=system", values=values)


def key(cluster: ControlPlane) -> bytes:
    found = cluster.kubectl(
        "-n", "system", "get", "secret", "tj-trainingjob-operator-key", "-o", "jsonpath={.data.key}"
    )
    return base64.b64decode(found)


def names(cluster: ControlPlane, kinds: str) -> set[str]:
    found = cluster.kubectl("get", kinds, "-A", "-o", "name", "-l", "app.kubernetes.io/instance=tj")
    return set(found.split())


@pytest.mark.parametrize("values", [{}, EVERYTHING, SMALLEST], ids=["defaults", "all", "smallest"])
def test_the_api_server_accepts_every_manifest(
    helm: Helm, cluster: ControlPlane, values: dict[str, Any]
) -> None:
    manifests = helm.render(values)
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    # Strict: a field that the server does not know is an error.
    said = cluster.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=listed
    )
    assert len(said.splitlines()) == len(manifests)


def test_pods_satisfy_the_restricted_standard(helm: Helm, cluster: ControlPlane) -> None:
    cluster.kubectl("create", "namespace", "strict")
    cluster.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    template = one(helm.render(EVERYTHING), "Deployment")["spec"]["template"]
    template["metadata"]["name"] = "operator"

    def create() -> str:
        pod = json.dumps({"apiVersion": "v1", "kind": "Pod", **template})
        return cluster.kubectl("-n", "strict", "create", "--dry-run=server", "-f", "-", input=pod)

    assert "created" in create()
    template["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(LabError, match='violates PodSecurity "restricted'):
        create()


@pytest.mark.usefixtures("removed")
def test_install_upgrade_uninstall(helm: Helm, cluster: ControlPlane) -> None:
    said = install(helm)
    assert "rollout status deployment/tj-trainingjob-operator" in said
    assert "kind: TrainingJob" in said
    assert "KubeRay is missing" not in said
    assert cluster.kubectl("get", "trainingjobs", "-A") == ""
    first = key(cluster)
    assert len(first) >= 48

    install(helm, "upgrade", nodePools=[POOL], replicas=3)
    assert key(cluster) == first, "running jobs would be cut off"

    with pytest.raises(LabError, match="got string, want integer"):
        install(helm, "upgrade", replicas="3")

    helm("uninstall", "tj", "--namespace=system")
    assert cluster.kubectl("get", "crd", CRD, "-o", "name")
    assert names(cluster, "deploy,sa,cm,svc,pdb,role,rolebinding") == set()
    assert names(cluster, "clusterrole,clusterrolebinding") == set()

    install(helm)
    assert key(cluster) == first, "a release of the same name takes over what was kept"


@pytest.mark.usefixtures("removed")
def test_the_note_with_the_first_job_is_right(helm: Helm, cluster: ControlPlane) -> None:
    said = install(helm, namespaces=["team-a"])
    job = said.partition("<<EOF\n")[2].partition("  EOF\n")[0]
    wait_for(lambda: "trainingjobs" in cluster.kubectl("api-resources"), 10, "CRD is not served")
    created = cluster.kubectl(
        "-n", "team-a", "create", "--dry-run=server", "--validate=strict", "-f", "-", input=job
    )
    assert "trainingjob.raytraining.dev/hello created" in created


@pytest.mark.usefixtures("removed")
def test_uninstall_takes_the_crd_along_where_asked(helm: Helm, cluster: ControlPlane) -> None:
    install(helm, crds={"keep": False})
    helm("uninstall", "tj", "--namespace=system")

    def gone() -> bool:
        return not cluster.kubectl("get", "crd", CRD, "--ignore-not-found")

    wait_for(gone, 20, "the CRD is still there")


@pytest.mark.usefixtures("removed")
def test_two_teams_have_an_operator_each(helm: Helm, cluster: ControlPlane) -> None:
    install(helm, namespaces=["team-a"])
    second = {
        "namespaces": ["team-b"],
        "crds": {"install": False},
        "rbac": {"userRoles": False},
    }
    helm("install", "tj", str(CHART), "--namespace=team-b", values=second)
    try:
        assert len(names(cluster, "clusterrolebinding")) == 2
    finally:
        helm("uninstall", "tj", "--namespace=team-b")
        cluster.kubectl("-n", "team-b", "delete", "secret", "--all")
