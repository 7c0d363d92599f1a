from typing import Any

import pytest

from tests.unit.planning.world import World
from trainingjob.api.status import Outcome, Phase, TrainingStatus
from trainingjob.planning import actions as act
from trainingjob.planning import history, lifecycle
from trainingjob.planning.observed import Driver, DriverState


def conditions(world: World) -> dict[str, str]:
    return {c.type: c.status for c in world.status.conditions}


def outcomes(world: World) -> list[Outcome]:
    return [a.outcome for a in world.status.attempts]


def test_a_job_that_succeeds_leaves_no_cluster() -> None:
    world = World()
    world.run()
    assert world.status.phase is Phase.RUNNING
    assert conditions(world)["Ready"] == "True"
    world.end_driver(0)
    world.until("Succeeded")
    world.step()
    assert world.clusters == {}
    assert world.job.metadata.finalizers == []
    assert conditions(world) == {"Ready": "True", "Complete": "True"}
    assert [a.attempt for a in world.status.attempts] == [1]


def test_the_submission_is_in_the_status_before_it_is_made() -> None:
    world = World()
    world.step()
    world.step(crash_after=0)
    assert world.status.submission_id == "job-11111111-1"
    assert world.submitted == []
    world.step()
    assert world.submitted == ["job-11111111-1"]


def test_nothing_is_created_before_the_finalizer_is_there() -> None:
    world = World()
    world.step(crash_after=0)
    assert world.job.metadata.finalizers == []
    world.step()
    assert isinstance(world.actions[0], act.AddFinalizer)
    assert len(world.job.metadata.finalizers) == 1
    assert len(world.clusters) == 1


def test_submits_before_the_workers_are_ready() -> None:
    world = World()
    world.step()
    world.step()
    assert world.submitted == ["job-11111111-1"]
    assert world.status.phase is Phase.STARTING


def test_two_failures_of_the_code_then_success_on_the_same_cluster() -> None:
    world = World(failurePolicy={"maxUserFailures": 2})
    world.run()
    head = world.status.cluster.head_pod_uid
    for _ in range(2):
        world.log = "Traceback\nValueError: no"
        world.end_driver(1)
        world.step()
        world.run()
    assert world.status.cluster.head_pod_uid == head
    world.end_driver(0)
    world.until("Succeeded")
    assert world.status.attempt == 3
    assert world.status.failures.user == 2
    first = world.status.attempts[0]
    assert (first.exit_code, first.outcome) == (1, Outcome.USER_FAILURE)
    assert first.log == "Traceback\nValueError: no"


def test_one_failure_more_than_the_budget_ends_the_job() -> None:
    world = World(failurePolicy={"maxUserFailures": 1})
    world.run()
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.RECOVERING
    world.run()
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.FAILED
    assert world.status.failures.user == 2
    assert conditions(world) == {"Stalled": "True", "Ready": "False", "Failed": "True"}
    world.step()
    assert world.clusters == {}


def test_no_retry_with_a_budget_of_zero() -> None:
    world = World(failurePolicy={"maxUserFailures": 0})
    world.run()
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.FAILED


@pytest.mark.parametrize(
    ("code", "reason"),
    [(64, "ConfigurationError"), (65, "DataError"), (127, "EntrypointNotFound")],
)
def test_what_would_fail_again_is_not_retried(code: int, reason: str) -> None:
    world = World()
    world.run()
    world.log = "error: no such key\nremedy: correct it"
    world.end_driver(code)
    world.step()
    assert world.status.phase is Phase.FAILED
    assert world.status.attempts[-1].reason == reason
    assert world.status.message == "no such key; correct it"


def test_a_driver_that_fails_before_its_workers_are_ready_costs_nothing() -> None:
    world = World(failurePolicy={"maxUserFailures": 0})
    world.step()
    world.step()
    world.step()
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.RECOVERING
    assert world.status.attempts[-1].reason == "WorkersNotReady"
    assert world.status.failures.user == 0
    world.step()
    assert len(world.submitted) == 1, "the next one waits for the workers"
    world.run()
    assert len(world.submitted) == 2
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.FAILED


def test_a_driver_that_succeeds_early_has_succeeded() -> None:
    world = World()
    world.step()
    world.step()
    world.step()
    world.end_driver(0)
    world.step()
    assert world.status.phase is Phase.SUCCEEDED


def test_progress_makes_the_budget_whole() -> None:
    world = World(failurePolicy={"maxUserFailures": 1})
    for step in (10, 20, 30, 40):
        world.run()
        world.training = TrainingStatus(step=step, total_steps=100, checkpoint_step=step)
        world.step(seconds=1)
        world.end_driver(1)
        world.step(seconds=1)
        assert world.status.phase is Phase.RECOVERING
    assert world.status.failures.user == 4
    assert world.status.charged.user == 1


def test_without_progress_the_budget_stays_spent() -> None:
    world = World(failurePolicy={"maxUserFailures": 1})
    world.run()
    world.training = TrainingStatus(step=10, total_steps=100, checkpoint_step=10)
    world.step()
    world.end_driver(1)
    world.step()
    world.run()
    world.training = TrainingStatus(
        step=10, total_steps=100, checkpoint_step=10, resumed_from_step=10
    )
    world.step()
    world.end_driver(1)
    world.step()
    assert world.status.phase is Phase.FAILED


def test_the_first_retry_is_immediate_and_later_ones_wait_ever_longer() -> None:
    world = World(
        failurePolicy={"maxUserFailures": 9, "backoffSeconds": 10, "maxBackoffSeconds": 30}
    )
    waits = []
    for _ in range(5):
        world.run()
        world.end_driver(1)
        world.step(seconds=1)
        due = world.status.retry_time
        waits.append((due - world.now).total_seconds() if due else 0)
        if due:
            world.step(seconds=(due - world.now).total_seconds())
    assert waits[0] == 0
    assert 10 <= waits[1] <= 11
    assert 20 <= waits[2] <= 22
    assert 30 <= waits[3] <= 33
    assert 30 <= waits[4] <= 33


def test_a_lost_head_is_an_infrastructure_failure_and_brings_a_new_cluster() -> None:
    world = World()
    world.run()
    first = world.status.cluster.name
    world.cluster.head = False
    world.step()
    assert world.status.phase is Phase.RECOVERING
    assert world.status.failures.infrastructure == 1
    assert world.status.attempts[-1].reason == "HeadLost"
    world.run()
    assert world.status.cluster.name != first
    assert world.status.attempt == 2
    assert first not in world.clusters


def test_a_head_replaced_behind_our_back_is_a_lost_head() -> None:
    world = World()
    world.run()
    world.cluster.head_uid = "another"
    world.step()
    assert world.status.attempts[-1].reason == "HeadLost"


def test_an_unreachable_dashboard_is_no_failure_for_a_while() -> None:
    world = World()
    world.run()
    world.cluster.reachable = False
    for _ in range(4):
        world.step(seconds=60)
        assert world.status.phase is Phase.RUNNING
    assert conditions(world)["ClusterReady"] == "Unknown"
    world.cluster.reachable = True
    world.step()
    assert conditions(world)["ClusterReady"] == "True"
    world.cluster.reachable = False
    world.step(seconds=1)
    world.step(seconds=lifecycle.UNREACHABLE_SECONDS)
    assert world.status.attempts[-1].reason == "DashboardUnreachable"


def test_suspending_stops_the_driver_then_frees_the_cluster() -> None:
    world = World()
    world.run()
    world.set_spec(suspend=True)
    world.step()
    assert any(isinstance(a, act.StopDriver) for a in world.actions)
    world.until("Suspended")
    assert world.clusters == {}
    assert outcomes(world) == [Outcome.STOPPED]
    assert conditions(world)["Suspended"] == "True"
    world.set_spec(suspend=False)
    world.run()
    assert world.status.attempt == 1, "it goes on, charged to nothing"
    assert len(world.submitted) == 2
    assert len(set(world.submitted)) == 2
    assert world.status.failures.user == 0
    assert conditions(world)["Suspended"] == "False"


def test_a_driver_that_does_not_stop_is_given_its_time_only() -> None:
    world = World()
    world.run()
    submission = world.status.submission_id
    world.set_spec(suspend=True)
    for _ in range(3):
        world.step(seconds=10)
        world.cluster.drivers[submission] = Driver(DriverState.RUNNING)
    assert world.clusters
    world.step(seconds=lifecycle.STOP_GRACE_SECONDS)
    assert world.clusters == {}


def test_a_job_that_finishes_while_it_is_being_suspended_has_succeeded() -> None:
    world = World()
    world.run()
    world.set_spec(suspend=True)
    world.end_driver(0)
    world.step()
    assert world.status.phase is Phase.SUCCEEDED


def test_suspended_from_the_start_creates_nothing() -> None:
    world = World(suspend=True)
    world.step()
    assert world.status.phase is Phase.SUSPENDED
    assert world.clusters == {}


def test_deletion_stops_the_driver_and_lets_the_job_go() -> None:
    world = World()
    world.run()
    world.delete_job()
    world.step()
    assert any(isinstance(a, act.StopDriver) for a in world.actions)
    for _ in range(5):
        world.step()
    assert world.deleted
    assert world.clusters == {}


def test_deletion_is_bounded_when_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.run()
    world.delete_job()
    original = World.execute

    def deaf(self: World, action: act.Action) -> None:
        if not isinstance(action, act.StopDriver | act.DeleteCluster):
            original(self, action)

    monkeypatch.setattr(World, "execute", deaf)
    began = world.now
    for _ in range(200):
        world.step()
    assert world.deleted
    assert (world.now - began).total_seconds() < 1000


def test_the_ttl_deletes_the_job() -> None:
    world = World(cleanup={"ttlSecondsAfterFinished": 100})
    world.run()
    world.end_driver(0)
    world.until("Succeeded")
    world.step(seconds=50)
    assert not world.deleted
    world.step(seconds=60)
    assert world.deleted


def test_final_is_final() -> None:
    world = World()
    world.run()
    world.end_driver(0)
    world.until("Succeeded")
    world.step()
    before = world.status
    world.set_spec(suspend=True)
    world.step()
    world.set_spec(suspend=False)
    for _ in range(5):
        world.step()
    assert world.status == before
    assert world.clusters == {}


def test_workers_that_never_come_end_the_job_at_the_deadline() -> None:
    world = World(deadlines={"provisioningSeconds": 100})
    world.step()
    world.step()
    world.step(seconds=120)
    world.until("Failed", steps=5)
    stalled = world.status.condition("Stalled")
    assert stalled.reason == "ProvisioningDeadlineExceeded"
    assert "0 of 2 workers ready" in world.status.message
    world.step()
    assert world.clusters == {}


def test_the_total_deadline_does_not_count_time_suspended() -> None:
    world = World(deadlines={"totalSeconds": 200})
    world.run()
    world.set_spec(suspend=True)
    world.until("Suspended")
    world.step(seconds=1000)
    world.set_spec(suspend=False)
    world.run()
    assert world.status.phase is Phase.RUNNING
    world.step(seconds=200)
    world.until("Failed", steps=5)
    assert world.status.condition("Failed").reason == "TotalDeadlineExceeded"


def test_a_submission_that_ray_does_not_start_is_replaced_with_its_cluster() -> None:
    world = World()
    world.step()
    world.step()
    first, cluster = world.status.submission_id, world.status.cluster.name
    world.cluster.drivers[first] = Driver(DriverState.PENDING)
    world.step(seconds=lifecycle.PENDING_SECONDS + 1)
    assert world.status.attempts[-1].reason == "SubmissionStuck"
    assert world.status.failures.user == 0
    world.run()
    assert world.status.submission_id != first
    assert cluster not in world.clusters


def test_gpus_that_no_pool_can_hold_stall_the_job_with_the_remedy() -> None:
    world = World(workers={"gpus": 4})
    world.step()
    assert conditions(world)["Stalled"] == "True"
    assert "declare your pools" in world.status.message
    assert world.clusters == {}


def test_three_infrastructure_failures_on_one_cluster_bring_another() -> None:
    world = World(failurePolicy={"backoffSeconds": 0})
    world.run()
    first = world.status.cluster.name
    for _ in range(lifecycle.FAILURES_PER_CLUSTER):
        world.end_driver(74)
        world.step()
        world.run()
    assert world.status.cluster.name != first
    assert world.status.failures.infrastructure == lifecycle.FAILURES_PER_CLUSTER


def test_history_is_bounded() -> None:
    world = World(failurePolicy={"maxUserFailures": 100, "backoffSeconds": 0})
    world.log = "x" * 10_000
    for _ in range(15):
        world.run()
        world.end_driver(1)
        world.step()
    attempts = world.status.attempts
    assert [a.attempt for a in attempts] == list(range(6, 16))
    logs = [len(a.log.encode()) for a in attempts]
    assert max(logs) <= history.LOG_BYTES
    assert sum(logs) <= history.LOG_BYTES_TOTAL


def test_times_of_conditions_change_only_with_their_status() -> None:
    world = World()
    world.run()
    since = {c.type: c.last_transition_time for c in world.status.conditions}
    for _ in range(3):
        world.step(seconds=10)
    now: dict[str, Any] = {c.type: c.last_transition_time for c in world.status.conditions}
    assert now == since
