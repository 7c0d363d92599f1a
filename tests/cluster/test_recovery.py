"""What the infrastructure can do to a job, and what it costs."""

from typing import Any

import pytest

from tests.cluster.conftest import IMAGE, Cluster, claim, job
from tests.lab.cluster import Lab

CONFIG = {
    "model": {"config": {"hiddenSize": 64, "layers": 2, "heads": 2, "intermediateSize": 128}},
    "data": {"train": ["${PYTHON_STDLIB}/json/*.py"], "sequenceLength": 64},
    "training": {"steps": 240, "globalBatchSize": 8, "evalEvery": 240, "logEvery": 5},
    "checkpoint": {"everySteps": 10, "keep": 2},
}


def trainer(**spec: Any) -> dict[str, Any]:
    return job(
        entrypoint="python -m trainingjob_trainer",
        config=CONFIG,
        checkpoint={"persistentVolumeClaim": {"claimName": "storage"}},
        **spec,
    )


def training(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = status.get("training", {})
    return found


@pytest.fixture
def spare_node(lab: Lab) -> str:
    if lab.external:
        pytest.skip("nodes of a cluster that is not ours are not killed")
    return lab.add_node(labels={"trainingjob.test/doomed": "true"})


def test_a_node_lost_without_notice_costs_the_steps_since_the_last_checkpoint(
    cluster: Cluster, lab: Lab, spare_node: str
) -> None:
    # The worker prefers the node that is about to be lost, and may go elsewhere afterwards.
    prefers = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {
                    "matchExpressions": [{"key": "trainingjob.test/doomed", "operator": "Exists"}]
                },
            }
        ]
    }
    template = {"spec": {"affinity": {"nodeAffinity": prefers}}}
    cluster.apply(claim(), trainer(worker={"podTemplate": template}))
    cluster.until("at a checkpoint", lambda s: training(s).get("checkpointStep", 0) >= 20, 150)
    (worker,) = cluster.workers()
    assert worker["spec"]["nodeName"] == spare_node
    lab.kill_node(spare_node)
    try:
        status = cluster.until_phase("Succeeded", 240)
    finally:
        lab.kubectl("delete", "node", spare_node, "--ignore-not-found", "--wait=false")
    assert status["failures"]["user"] == 0
    assert status["failures"]["infrastructure"] == 1
    assert status["attempt"] == 2
    assert status["attempts"][1]["startStep"] >= 20, "it went on from a checkpoint"
    assert training(status)["step"] == 240
    cluster.until_gone(60)


def test_a_lost_head_brings_a_new_cluster_and_the_last_checkpoint(cluster: Cluster) -> None:
    cluster.apply(claim(), trainer())
    status = cluster.until(
        "at a checkpoint", lambda s: training(s).get("checkpointStep", 0) >= 20, 150
    )
    first = status["cluster"]["name"]
    (head,) = cluster.heads()
    cluster.kubectl("delete", "pod", head["metadata"]["name"], "--force", "--grace-period=0")
    status = cluster.until_phase("Succeeded", 240)
    assert status["attempts"][0]["reason"] == "HeadLost"
    assert status["attempts"][0]["cluster"] == first
    assert status["attempts"][1]["cluster"] != first
    assert status["attempts"][1]["startStep"] >= 20
    assert status["failures"] == {"user": 0, "infrastructure": 1, "preemptions": 0}


def test_suspended_at_a_checkpoint_and_resumed_from_it(cluster: Cluster) -> None:
    cluster.apply(claim(), trainer())
    cluster.until("training", lambda s: training(s).get("step", 0) >= 15, 150)
    cluster.kubectl("patch", "tj", "job", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    cluster.kubectl("wait", "--for=condition=Suspended", "tj/job", "--timeout=90s", timeout=100)
    status = cluster.status()
    stopped_at = training(status)["checkpointStep"]
    assert stopped_at >= 15
    assert status["attempts"][0]["outcome"] == "Stopped"
    assert not cluster.get("raycluster")["items"]
    cluster.kubectl("patch", "tj", "job", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    status = cluster.until_phase("Succeeded", 240)
    assert status["attempts"][1]["startStep"] == stopped_at
    assert status["attempt"] == 1
    assert status["failures"] == {"user": 0, "infrastructure": 0, "preemptions": 0}


def test_a_deleted_job_stops_at_a_checkpoint_and_leaves_nothing(cluster: Cluster, lab: Lab) -> None:
    script = (
        "trap 'echo stopped > /var/trainingjob/storage/trap; exit 75' TERM; "
        "while true; do sleep 0.2; done"
    )
    body = job(entrypoint=script, checkpoint={"persistentVolumeClaim": {"claimName": "storage"}})
    cluster.apply(claim(), body)
    cluster.until_phase("Running", 120)
    path = None if lab.external else lab.volume_path("storage", cluster.namespace)
    cluster.kubectl("delete", "tj", "job", "--timeout=90s", timeout=100)
    cluster.until_gone(30)
    if path:
        assert (path / "trap").read_text() == "stopped\n"


def test_a_finished_job_goes_after_its_time_to_live(cluster: Cluster) -> None:
    cluster.apply(job(cleanup={"ttlSecondsAfterFinished": 3}))
    cluster.until_phase("Succeeded", 120)
    cluster.kubectl("wait", "--for=delete", "tj/job", "--timeout=30s", timeout=40)
    cluster.until_gone(30)


def test_nobody_without_the_token_can_use_the_dashboard(cluster: Cluster) -> None:
    cluster.apply(job(entrypoint="sleep 300"))
    status = cluster.until_phase("Running", 120)
    url = status["cluster"]["dashboardURL"]
    probe = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "c",
                    "image": IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [
                        "python",
                        "-c",
                        "import sys, urllib.request, urllib.error\n"
                        "for headers in ({}, {'Authorization': 'Bearer guess'}):\n"
                        "    request = urllib.request.Request(sys.argv[1], headers=headers)\n"
                        "    try: print(urllib.request.urlopen(request).status)\n"
                        "    except urllib.error.HTTPError as error: print(error.code)\n",
                        f"{url}/api/jobs/",
                    ],
                }
            ],
        },
    }
    cluster.apply(probe)
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/stranger", "--timeout=60s"
    )
    assert cluster.kubectl("logs", "stranger").split() == ["401", "403"]
