"""Helm and a small cluster for the tests of the chart."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable, Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import ControlPlane, LabError, build
from tests.lab.proc import run

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "trainingjob-operator"

#: A node pool with everything that can be said of one.
POOL = {
    "name": "h100-spot",
    "gpuType": "h100",
    "capacityType": "spot",
    "node": {"gpus": 8, "cpu": "180", "memory": "1800Gi"},
    "resource": "nvidia.com/gpu",
    "nodeSelector": {"pool": "h100-spot"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "hourlyPrice": 31,
}


class Helm:
    """The helm program, with a home of its own."""

    def __init__(self, home: Path, kubeconfig: Path | None = None):
        self._home, self._kubeconfig = home, kubeconfig or home / "none.kubeconfig"

    def __call__(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """Runs helm and returns its output; LabError has the reason of a failure."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HELM_")},
            "KUBECONFIG": str(self._kubeconfig),
            "HELM_CACHE_HOME": str(self._home / "cache"),
            "HELM_CONFIG_HOME": str(self._home / "config"),
            "HELM_DATA_HOME": str(self._home / "data"),
        }
        argv = [str(build.program("helm")), *arguments]
        if values is not None:
            argv += ["--values", "-"]
        return run(argv, input=json.dumps(values or {}), env=environment, timeout=120)

    def render(
        self, values: dict[str, Any] | None = None, *arguments: str, name: str = "tj"
    ) -> list[dict[str, Any]]:
        """The manifests of the chart, without a cluster."""
        text = self(
            "template",
            name,
            str(CHART),
            "--namespace=system",
            f"--kube-version={build.KUBERNETES}",
            *arguments,
            values=values or {},
        )
        return [m for m in yaml.load_all(text, Loader=build.LOADER) if m]


def ensure(*programs: str) -> None:
    """Skips the test where a program is missing and cannot be had."""
    try:
        build.ensure(programs)
    except LabError as error:
        pytest.skip(f"no {', '.join(programs)}: {error}")


def one(manifests: Iterable[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only manifest of a kind (and name)."""
    (found,) = (m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"]))
    return found


def allowed(
    cluster: ControlPlane, account: str, asked: Iterable[tuple[str, str, str, str]]
) -> set[tuple[str, str, str, str]]:
    """What a service account (`NAMESPACE:NAME`) may do, of (namespace, group, resource, verb).

    An empty namespace asks for all namespaces, a resource may have a subresource after a slash and
    a name after a colon.
    """
    namespace = account.partition(":")[0]
    connection = HTTPSConnection(
        "127.0.0.1", cluster.port, context=ssl.create_default_context(cafile=str(cluster.ca_file))
    )
    headers = {"Authorization": f"Bearer {cluster.token}", "Content-Type": "application/json"}
    found = set()
    for question in asked:
        where, group, resource, verb = question
        plural, _, name = resource.partition(":")
        plural, _, subresource = plural.partition("/")
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{account}",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{namespace}",
                    "system:authenticated",
                ],
                "resourceAttributes": {
                    "namespace": where,
                    "group": group,
                    "resource": plural,
                    "subresource": subresource,
                    "name": name,
                    "verb": verb,
                },
            },
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        connection.request("POST", path, json.dumps(review), headers)
        answer = json.loads(connection.getresponse().read())
        if answer["status"]["allowed"]:
            found.add(question)
    connection.close()
    return found


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    ensure("helm")
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with KubeRay's CRD and the namespaces system, team-a, team-b and other."""
    ensure(*build.CONTROL_PLANE, "helm")
    with ControlPlane(
        kuberay=True,
        audit_log=tmp_path_factory.mktemp("audit") / "audit.log",
        # As OpenShift has it: owner references that block a deletion need a right of their own.
        apiserver_args=["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"],
    ) as it:
        for namespace in ("system", "team-a", "team-b", "other"):
            it.kubectl("create", "namespace", namespace)
        yield it


@pytest.fixture(scope="module")
def helm(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm on the cluster."""
    return Helm(tmp_path_factory.mktemp("helm"), cluster.kubeconfig)
