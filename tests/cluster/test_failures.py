"""What a driver can do wrong, and what becomes of it."""

from tests.cluster.conftest import Cluster, job


def test_a_driver_that_exits_1_twice_then_succeeds_on_the_same_head(cluster: Cluster) -> None:
    script = 'echo "attempt $TRAININGJOB_ATTEMPT"; [ "$TRAININGJOB_ATTEMPT" -ge 3 ]'
    cluster.apply(job(entrypoint=script, failurePolicy={"backoffSeconds": 1}))
    heads = set()

    def succeeded(status: dict[str, object]) -> bool:
        heads.update(h["metadata"]["uid"] for h in cluster.heads())
        return status.get("phase") == "Succeeded"

    status = cluster.until("Succeeded", succeeded, 120)
    assert len(heads) == 1, "the same head throughout"
    assert status["attempt"] == 3
    assert [a["attempt"] for a in status["attempts"]] == [1, 2, 3]
    assert [a["exitCode"] for a in status["attempts"]] == [1, 1, 0]
    for number, attempt in enumerate(status["attempts"], start=1):
        assert f"attempt {number}" in attempt["log"]
    cluster.kubectl("wait", "--for=condition=Complete", "tj/job", "--timeout=5s")
    cluster.until_gone(30)


def test_an_entrypoint_that_is_not_there_fails_at_once(cluster: Cluster) -> None:
    cluster.apply(job(entrypoint="no-such-program --flag"))
    status = cluster.until_phase("Failed", 60)
    assert status["attempts"][-1]["reason"] == "EntrypointNotFound"
    assert "correct spec.entrypoint" in status["message"]
    assert len(status["attempts"]) == 1


def test_a_misspelt_key_of_the_config_is_named(cluster: Cluster) -> None:
    cluster.apply(
        job(
            entrypoint="python -m trainingjob_trainer",
            config={"model": {"config": {"hidenSize": 64}}, "data": {"train": ["/x"]}},
        )
    )
    status = cluster.until_phase("Failed", 90)
    assert status["attempts"][-1]["exitCode"] == 64
    assert "hidenSize" in status["message"]
    assert "hiddenSize" in status["message"]


def test_a_glob_without_files_is_named(cluster: Cluster) -> None:
    cluster.apply(
        job(
            entrypoint="python -m trainingjob_trainer",
            config={
                "model": {"config": {"hiddenSize": 64, "layers": 1, "heads": 2}},
                "data": {"train": ["/nowhere/*.txt"], "sequenceLength": 16},
                "training": {"steps": 1, "globalBatchSize": 2},
            },
        )
    )
    status = cluster.until_phase("Failed", 90)
    assert status["attempts"][-1]["exitCode"] == 65
    assert "/nowhere/*.txt" in status["message"]


def test_an_image_that_is_not_there_is_named_within_half_a_minute(cluster: Cluster) -> None:
    cluster.apply(job(image="no-such-image:1", deadlines={"provisioningSeconds": 20}))
    cluster.until(
        "named",
        lambda s: "no-such-image:1 cannot be pulled" in s.get("message", ""),
        30,
    )
    status = cluster.until_phase("Failed", 60)
    assert "deadlines.provisioningSeconds" in status["message"]
    assert "no-such-image:1" in status["message"]
    cluster.until_gone(30)


def test_a_claim_that_is_not_there_is_named(cluster: Cluster) -> None:
    cluster.apply(job(checkpoint={"persistentVolumeClaim": {"claimName": "nowhere"}}))
    status = cluster.until("named", lambda s: "nowhere" in s.get("message", ""), 30)
    assert "correct spec.checkpoint.persistentVolumeClaim.claimName" in status["message"]


def test_a_worker_that_no_node_can_hold_is_explained(cluster: Cluster) -> None:
    cluster.apply(job(workers={"replicas": 1, "cpu": "900"}, entrypoint="sleep 600"))
    status = cluster.until("explained", lambda s: "no node takes pod" in s.get("message", ""), 40)
    assert "cpu 900" in status["message"]


def test_gpus_that_fit_no_pool_stall_the_job_with_the_nearest_numbers(cluster: Cluster) -> None:
    cluster.apply(job(workers={"gpus": 3, "gpuTypes": ["fake"]}))
    status = cluster.until(
        "stalled",
        lambda s: any(c["type"] == "Stalled" for c in s.get("conditions", [])),
        5,
    )
    assert "use 2 or 4 GPUs" in status["message"]
    assert not cluster.heads()


def test_a_quota_speaks_in_its_own_words_and_the_job_goes_on_when_it_is_lifted(
    cluster: Cluster,
) -> None:
    cluster.kubectl("create", "quota", "none", "--hard=pods=0")
    cluster.apply(job())
    cluster.until("named", lambda s: "exceeded quota" in s.get("message", ""), 30)
    cluster.kubectl("delete", "quota", "none")
    status = cluster.until_phase("Succeeded", 120)
    assert status["failures"] == {"user": 0, "infrastructure": 0, "preemptions": 0}
