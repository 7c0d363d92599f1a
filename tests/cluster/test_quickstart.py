"""The example that a new user applies first."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Cluster
from tests.lab.cluster import Lab

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def train(cluster: Cluster, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Applies the manifests and waits for success; returns the last status while it ran."""
    cluster.apply(*manifests)
    seen: dict[str, Any] = {}

    def ended(status: dict[str, Any]) -> bool:
        if status.get("phase") == "Running" and "loss" in status.get("training", {}):
            seen.update(status)
        return status.get("phase") in ("Succeeded", "Failed")

    status = cluster.until("ended", ended, 400, job="quickstart")
    assert status["phase"] == "Succeeded", cluster.picture("quickstart")
    return seen


def test_the_quickstart_trains_a_model_and_leaves_no_cluster(cluster: Cluster, lab: Lab) -> None:
    seen = train(cluster, list(yaml.safe_load_all(QUICKSTART.read_text())))
    assert 0 < seen["training"]["step"] <= seen["training"]["totalSteps"]
    assert seen["training"]["tokensPerSecond"] > 0
    assert seen["workers"] == {"desired": 2, "ready": 2, "gpus": 0}
    assert seen["progress"].endswith("%)")
    cluster.kubectl("wait", "--for=condition=Complete", "tj/quickstart", "--timeout=5s")
    cluster.until_gone(30)
    last = cluster.status("quickstart")
    assert last["training"]["step"] == last["training"]["totalSteps"]
    assert last["training"]["validationLoss"] < 0.6 * 5.6
    assert last["attempt"] == 1
    if not lab.external:
        folder = lab.volume_path("quickstart", cluster.namespace) / "quickstart"
        assert list(folder.glob("checkpoint_step_*/.metadata"))


@pytest.fixture
def gpu_nodes(lab: Lab) -> Iterator[None]:
    """Two nodes that say they have two GPUs each."""
    if lab.external:
        pytest.skip("nodes cannot be added to a cluster that is not ours")
    names = [lab.add_node(gpus=2, labels={"trainingjob.test/gpus": "true"}) for _ in range(2)]
    yield
    for name in names:
        lab.kill_node(name, delete=True)


def test_four_gpus_over_two_nodes(cluster: Cluster, gpu_nodes: None) -> None:
    claim, job = yaml.safe_load_all(QUICKSTART.read_text())
    job["spec"]["workers"] = {"gpus": 4, "gpuTypes": ["fake"], "cpu": "900m", "memory": "3Gi"}
    job["spec"]["config"]["training"]["steps"] = 40
    job["spec"]["config"]["training"]["evalEvery"] = 20
    seen = train(cluster, [claim, job])
    assert seen["workers"] == {"desired": 2, "ready": 2, "gpus": 4}
    cluster.until_gone(30)
