"""The operator itself may die at any moment."""

import random
import time
from typing import Any

import pytest

from tests.cluster.conftest import OPERATOR_NAMESPACE, Cluster, claim, job
from tests.cluster.processes import kill
from tests.lab.cluster import Lab
from tests.lab.proc import LabError

# The driver keeps a record of its life on the shared storage: that is the witness that no two
# drivers ever ran at a time, whatever Ray or the operator believe.
WITNESS = """
import os, time
place = "/var/trainingjob/storage/drivers"
name = os.environ["TRAININGJOB_ATTEMPT"] + "-" + str(time.time_ns())
def note(what):
    with open(place, "a") as record:
        record.write(f"{time.time():.3f} {what} {name}\\n")
note("begin")
for _ in range(20):
    time.sleep(0.25)
    note("alive")
note("end")
"""


def kill_leader(lab: Lab) -> bool:
    """kill -9 of the operator process that holds the lease; False when there is none just now."""
    lease = lab.kubectl_json("-n", OPERATOR_NAMESPACE, "get", "lease", "trainingjob-operator")
    holder = lease["spec"].get("holderIdentity", "").rpartition("_")[0]
    try:
        pod = lab.kubectl_json("-n", OPERATOR_NAMESPACE, "get", "pod", holder)
    except LabError:
        return False
    return kill(pod["metadata"]["uid"], "trainingjob.engine") > 0


def test_of_two_replicas_one_acts(lab: Lab) -> None:
    # A replica that an earlier test has killed comes back after its back-off only.
    label = "app.kubernetes.io/name=trainingjob-operator"
    wait = ("wait", "--for=condition=Ready", "pod", "-l", label, "--timeout=240s")
    lab.kubectl("-n", OPERATOR_NAMESPACE, *wait, timeout=250)
    pods: list[dict[str, Any]] = lab.kubectl_json(
        "-n", OPERATOR_NAMESPACE, "get", "pods", "-l", label
    )["items"]
    ready = [p for p in pods if p["status"]["phase"] == "Running"]
    assert len(ready) == 2
    leaders = []
    for pod in ready:
        metrics = lab.kubectl(
            "get",
            "--raw",
            f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/metrics",
        )
        leaders += [line for line in metrics.splitlines() if line.startswith("trainingjob_leader ")]
    assert sorted(leaders) == ["trainingjob_leader 0.0", "trainingjob_leader 1.0"]


def test_killed_at_ten_random_moments_a_job_runs_once_and_succeeds(
    cluster: Cluster, lab: Lab
) -> None:
    if lab.external:
        pytest.skip("processes of a cluster that is not ours are not killed")
    chance = random.Random(20)
    kills = 0
    for round_ in range(10):
        name = f"job-{round_}"
        volume = f"storage-{round_}"
        script = f"python -u -c '{WITNESS}'"
        cluster.apply(
            claim(volume),
            job(
                name,
                entrypoint=script,
                checkpoint={"persistentVolumeClaim": {"claimName": volume}},
            ),
        )
        time.sleep(chance.uniform(0, 16))
        kills += kill_leader(lab)
        status = cluster.until_phase("Succeeded", 180, job=name)
        assert status["attempt"] == 1
        assert status["failures"] == {"user": 0, "infrastructure": 0, "preemptions": 0}
        lines = (lab.volume_path(volume, cluster.namespace) / "drivers").read_text().splitlines()
        drivers = {line.split()[2] for line in lines}
        assert len(drivers) == 1, f"more than one driver ran: {lines}"
        assert lines[0].split()[1] == "begin"
        assert lines[-1].split()[1] == "end"
    assert kills >= 8, "the operator was not killed often enough"
    cluster.until_gone(60)
