from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainingjob.api.job import TrainingJob, parse
from trainingjob.api.status import (
    Attempt,
    ClusterStatus,
    FailureCounts,
    Outcome,
    Phase,
    TrainingJobStatus,
)
from trainingjob.planning.lifecycle import plan
from trainingjob.planning.local import Host, catalogue, continued, localise, storage
from trainingjob.planning.observed import Observed
from trainingjob.planning.sizing import Sizing, size
from trainingjob.planning.unfit import Unfit

GIB = 2**30
NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def job(workers: dict[str, Any], **spec: Any) -> TrainingJob:
    return parse(
        {
            "apiVersion": "raytraining.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a", "uid": "0123456789"},
            "spec": {
                "image": "i",
                "rayVersion": "2.60.0",
                "entrypoint": "e",
                "workers": workers,
                **spec,
            },
        }
    )


def sized(workers: dict[str, Any], host: Host, **spec: Any) -> tuple[Sizing, list[str]]:
    local, notices = localise(job(workers, **spec), host)
    return size(local.spec.workers, catalogue(host), local.spec.spot.policy), notices


def test_gpus_that_are_there_are_used_as_asked() -> None:
    made, notices = sized({"gpus": 4, "replicas": 2, "gpuTypes": ["h100"]}, Host(32, 8, 64 * GIB))
    assert (made.pods, made.gpus_per_pod, made.train_workers) == (1, 4, 4)
    assert made.cpus_per_train_worker == 4
    assert notices == []


def test_fewer_gpus_than_asked() -> None:
    made, notices = sized({"gpus": 16}, Host(32, 8, 64 * GIB))
    assert made.train_workers == 8
    assert notices == [
        "this machine has 8 GPUs: training on 8 instead of 16; the global batch stays the same"
    ]


def test_workers_always_divide_what_was_asked_for() -> None:
    """16 GPUs' global batch cannot be shared by 3 workers."""
    assert sized({"gpus": 16}, Host(32, 3, 64 * GIB))[0].train_workers == 2
    assert sized({"gpus": 16}, Host(6, 0, 64 * GIB))[0].train_workers == 4


def test_no_gpu_trains_on_cpu_workers() -> None:
    made, notices = sized({"gpus": 16, "cpu": "24", "memory": "200Gi"}, Host(2, 0, 8 * GIB))
    assert (made.pods, made.gpus_per_pod, made.cpus_per_train_worker) == (2, 0, 1)
    assert notices == [
        "this machine has no GPU: training on 2 CPU workers instead of 16 GPUs; "
        "the global batch stays the same"
    ]


def test_more_cpu_workers_than_cpus() -> None:
    made, notices = sized({"replicas": 8, "cpu": "4", "memory": "16Gi"}, Host(2, 0, 8 * GIB))
    assert (made.pods, made.cpu) == (2, 1)
    assert "training on 2 workers instead of 8" in notices[0]


@given(
    gpus=st.integers(0, 600),
    replicas=st.none() | st.integers(1, 600),
    cpu=st.none() | st.sampled_from(["250m", "1", "64"]),
    memory=st.none() | st.sampled_from(["1Gi", "900Gi"]),
    host=st.builds(Host, st.integers(1, 256), st.integers(0, 16), st.integers(GIB, 2048 * GIB)),
)
def test_every_job_fits_every_machine(
    gpus: int, replicas: int | None, cpu: str | None, memory: str | None, host: Host
) -> None:
    if gpus == 0 and replicas is None:
        return
    if gpus and replicas and gpus % replicas:
        return
    asked = {"gpus": gpus, "replicas": replicas, "cpu": cpu, "memory": memory}
    made, _ = sized({k: v for k, v in asked.items() if v is not None}, host)
    assert 1 <= made.train_workers <= max(host.cpus, host.gpus)
    assert made.pods * made.gpus_per_pod <= host.gpus
    wanted = gpus or replicas or 1
    assert wanted % made.train_workers == 0


def test_spot_volumes_suspend_and_ttl_are_left_out() -> None:
    asked = job(
        {"gpus": 2},
        spot={"policy": "Require"},
        volumes=[{"name": "d"}],
        volumeMounts=[{"name": "d", "mountPath": "/data"}],
        suspend=True,
        cleanup={"ttlSecondsAfterFinished": 0},
        worker={"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
    )
    local, notices = localise(asked, Host(2, 2, 8 * GIB, "2.59.0"))
    assert not local.spec.suspend
    assert local.spec.cleanup.ttl_seconds_after_finished is None
    assert local.spec.worker.pod_template is None
    for word in ("spec.spot", "/data", "spec.suspend", "Ray 2.59.0"):
        assert any(word in n for n in notices), word


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"envFrom": [{"secretRef": {"name": "s"}}]}, "spec.envFrom"),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}]},
            "spec.env[1].valueFrom (B)",
        ),
        (
            {"checkpoint": {"persistentVolumeClaim": {"claimName": "c", "subPath": "../../x"}}},
            "spec.checkpoint.persistentVolumeClaim",
        ),
        ({"checkpoint": {"persistentVolumeClaim": {"claimName": ".."}}}, "claimName"),
    ],
)
def test_what_needs_kubernetes_is_refused_by_name(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(Unfit) as refused:
        localise(job({"replicas": 1}, **spec), Host(2, 0, 8 * GIB))
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("checkpoint", "place"),
    [
        (None, "/runs/a/checkpoints"),
        ({"uri": "s3://b/p"}, "s3://b/p"),
        ({"uri": "file:///data"}, "file:///data"),
        ({"persistentVolumeClaim": {"claimName": "c"}}, "/runs/a/volumes/c"),
        ({"persistentVolumeClaim": {"claimName": "c", "subPath": "x/y"}}, "/runs/a/volumes/c/x/y"),
    ],
)
def test_place_of_checkpoints(checkpoint: dict[str, Any] | None, place: str) -> None:
    spec = {"checkpoint": checkpoint} if checkpoint else {}
    assert storage(job({"replicas": 1}, **spec), PurePath("/runs/a")) == place


def running() -> TrainingJobStatus:
    return TrainingJobStatus(
        phase=Phase.RUNNING,
        attempt=2,
        submissions=2,
        clusters=1,
        cluster=ClusterStatus(name="c", generation=1, created_time=NOW, head_pod_uid="u"),
        active_since=NOW,
        active_seconds=5,
        charged=FailureCounts(user=1),
        failures=FailureCounts(user=1),
        attempts=[
            Attempt(
                attempt=1,
                cluster="c",
                submission_id="s1",
                start_time=NOW,
                end_time=NOW,
                outcome=Outcome.USER_FAILURE,
            ),
            Attempt(attempt=2, cluster="c", submission_id="s2", start_time=NOW),
        ],
    )


def test_a_killed_command_charges_nobody_and_time_asleep_does_not_count() -> None:
    saved, now = NOW + timedelta(seconds=30), NOW + timedelta(days=3)
    status = continued(running(), saved, now)
    last = status.attempts[-1]
    assert (last.end_time, last.outcome, last.reason) == (
        saved,
        Outcome.NOT_CHARGED,
        "CommandEnded",
    )
    assert status.active_seconds == 35
    assert status.charged == FailureCounts(user=1)
    host = Host(2, 0, 8 * GIB)
    local, _ = localise(job({"replicas": 1}).with_status(status), host)
    step = plan(local, Observed(), now, catalogue(host))
    assert step.status.cluster is not None
    assert step.status.clusters == 2
    assert step.status.phase is Phase.RECOVERING


def test_a_failed_job_gets_its_budgets_anew_and_keeps_its_history() -> None:
    before = running().model_copy(update={"phase": Phase.FAILED, "completion_time": NOW})
    status = continued(before, NOW, NOW)
    assert status.phase is Phase.PENDING
    assert status.charged == FailureCounts()
    assert status.failures == FailureCounts(user=1)
    assert status.attempt == 2
    assert status.active_seconds == 0
    assert status.completion_time is None
