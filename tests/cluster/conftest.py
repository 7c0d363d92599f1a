"""The lab with the chart installed, and one namespace per test."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.cluster import Lab
from tests.lab.proc import LabError

ROOT = Path(__file__).parents[2]
OPERATOR_NAMESPACE = "trainingjob-system"
IMAGE = "trainingjob-trainer:0.1.0"

VALUES: dict[str, Any] = {
    "image": {"repository": "docker.io/library/trainingjob-operator", "tag": "0.1.0"},
    "nodePools": [
        {
            "name": "fake-gpus",
            "gpuType": "fake",
            "node": {"gpus": 2, "cpu": "1", "memory": "3Gi"},
            "nodeSelector": {"trainingjob.test/gpus": "true"},
        }
    ],
}


class Cluster:
    """The cluster under test, seen as its users see it: through kubectl."""

    def __init__(self, lab: Lab, namespace: str) -> None:
        self.lab, self.namespace = lab, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.lab.kubectl("-n", self.namespace, *arguments, **options)

    def get(self, *what: str) -> Any:
        return json.loads(self.kubectl("get", *what, "-o=json"))

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(manifests))

    def status(self, job: str = "job") -> dict[str, Any]:
        found: dict[str, Any] = self.get("tj", job).get("status", {})
        return found

    def condition(self, kind: str, job: str = "job") -> dict[str, Any]:
        conditions = self.status(job).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def until(
        self, what: str, check: Callable[[dict[str, Any]], Any], timeout: float, job: str = "job"
    ) -> dict[str, Any]:
        """Waits until `check` of the job's status is true; returns that status."""
        end = time.monotonic() + timeout
        while True:
            status = self.status(job)
            if check(status):
                return status
            over = status.get("phase") in ("Succeeded", "Failed")  # nothing follows
            if over or time.monotonic() > end:
                raise AssertionError(f"not {what} within {timeout} s: {self.picture(job)}")
            time.sleep(0.3)

    def until_phase(self, phase: str, timeout: float, job: str = "job") -> dict[str, Any]:
        return self.until(phase, lambda s: s.get("phase") == phase, timeout, job)

    def until_gone(self, timeout: float) -> None:
        """Waits until nothing of any job's cluster is left in the namespace."""
        end = time.monotonic() + timeout
        while True:
            left = self.kubectl("get", "raycluster,pod,secret,configmap", "-o=name").split()
            left = [name for name in left if "kube-root-ca.crt" not in name]
            if not left:
                return
            assert time.monotonic() < end, f"still there: {left}"
            time.sleep(0.5)

    def heads(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("pods", "-l", "ray.io/node-type=head")["items"]
        return found

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("pods", "-l", "ray.io/node-type=worker")["items"]
        return found

    def events(self) -> str:
        return self.kubectl("get", "events", "-o=custom-columns=R:.reason,M:.message")

    def picture(self, job: str = "job") -> str:
        """What there is to see when something went wrong."""
        parts = [self.kubectl("get", "tj", job, "-o=yaml"), self.kubectl("get", "pods", "-o=wide")]
        parts.append(self.events())
        parts.append(operator_log(self.lab))
        return "\n".join(parts)


def operator_log(lab: Lab, lines: int = 40) -> str:
    try:
        return lab.kubectl(
            "-n",
            OPERATOR_NAMESPACE,
            "logs",
            "-l",
            "app.kubernetes.io/name=trainingjob-operator",
            f"--tail={lines}",
        )
    except LabError as error:
        return str(error)


def install_chart(lab: Lab, values: dict[str, Any]) -> None:
    """`helm install`, and waits until a replica is ready."""
    path = lab.run_dir / "values.yaml" if not lab.external else Path("values.tmp.yaml")
    path.write_text(yaml.safe_dump(values))
    chart = ROOT / "charts" / "trainingjob-operator"
    code = lab.exec(
        "helm",
        "upgrade",
        "--install",
        "trainingjob-operator",
        str(chart),
        f"--namespace={OPERATOR_NAMESPACE}",
        "--create-namespace",
        f"--values={path}",
        "--wait",
        "--timeout=120s",
    )
    assert code == 0, f"helm install failed: {operator_log(lab)}"


def install(lab: Lab) -> None:
    """The images of this checkout on every node of the lab, and the chart."""
    values = dict(VALUES)
    if not lab.external:
        images = {target: lab.build_image(target) for target in ("operator", "trainer")}
        for target in images:
            lab.load_image(f"trainingjob-{target}")
        # The tag stays the same: without this a changed image would not replace running pods.
        values["podAnnotations"] = {"trainingjob.test/image": images["operator"].id}
    install_chart(lab, values)


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The lab with images and chart. It stays up: whoever started the tests ends it."""
    lab = Lab()
    if not lab.external:
        lab.up()
    install(lab)
    lab.enter()
    return lab


@pytest.fixture
def cluster(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    namespace = f"{name}-{os.getpid()}"
    lab.kubectl("create", "namespace", namespace)
    cluster = Cluster(lab, namespace)
    yield cluster
    if not os.environ.get("KEEP_NAMESPACES"):
        lab.kubectl("delete", "namespace", namespace, "--timeout=150s", timeout=160)
        if not lab.external:
            lab.reset_volumes()


def job(name: str = "job", **spec: Any) -> dict[str, Any]:
    """A TrainingJob as small as the lab likes it."""
    return {
        "apiVersion": "raytraining.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "image": IMAGE,
            "rayVersion": "2.60.0",
            "entrypoint": "echo hello",
            "workers": {"replicas": 1, "cpu": "500m", "memory": "2Gi"},
            "head": {"cpu": "900m", "memory": "3Gi"},
            **spec,
        },
    }


def claim(name: str = "storage") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
