"""The invariants of a job's life over random histories of faults."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.world import World
from trainingjob.api.status import Outcome, Phase, TrainingStatus
from trainingjob.planning.observed import Driver, DriverState

FAULTS = (
    "nothing",
    "nothing",
    "nothing",
    "crash",
    "exit",
    "exit",
    "succeed",
    "head lost",
    "head replaced",
    "silent",
    "answers",
    "cluster deleted",
    "workers",
    "no workers",
    "suspend",
    "resume",
    "delete job",
    "progress",
    "stopped from outside",
    "pending",
)


def disturb(world: World, chance: random.Random) -> None:
    known = world.status.cluster
    cluster = world.clusters.get(known.name) if known else None
    running = cluster.running() if cluster else []
    match chance.choice(FAULTS):
        case "exit" if running:
            world.end_driver(chance.choice([1, 64, 70, 71, 73, 74, 75, 137]))
        case "succeed" if running and chance.random() < 0.3:
            world.end_driver(0)
        case "stopped from outside" if running:
            world.cluster.drivers[running[0]] = Driver(DriverState.STOPPED)
        case "pending" if running:
            world.cluster.drivers[running[0]] = Driver(DriverState.PENDING)
        case "head lost" if cluster:
            cluster.head = False
        case "head replaced" if cluster:
            cluster.head_uid += "'"
            cluster.drivers = {}
        case "silent" if cluster:
            cluster.reachable = False
        case "answers" if cluster:
            cluster.reachable = True
        case "cluster deleted" if cluster:
            del world.clusters[cluster.name]
        case "workers" if cluster:
            cluster.workers = 2
        case "no workers" if cluster:
            cluster.workers = chance.choice([0, 1])
        case "suspend" if chance.random() < 0.3:
            world.set_spec(suspend=True)
        case "resume":
            world.set_spec(suspend=False)
        case "delete job" if chance.random() < 0.1:
            world.delete_job()
        case "progress" if running:
            before = world.training.checkpoint_step if world.training else 0
            step = (before or 0) + 10
            world.training = TrainingStatus(step=step, total_steps=1000, checkpoint_step=step)
        case _:
            pass


def check(world: World) -> None:
    status = world.status
    assert world.most_running <= 1, "two drivers at a time"
    charged = sum(a.outcome is Outcome.USER_FAILURE for a in status.attempts)
    assert charged <= status.failures.user
    assert len({a.submission_id for a in status.attempts}) == len(status.attempts)
    kinds = [c.type for c in status.conditions]
    assert not {"Reconciling", "Stalled"} <= set(kinds)
    if status.phase.final:
        assert status.completion_time is not None
        assert status.cluster is None


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_invariants_hold_over_random_histories(seed: int) -> None:
    chance = random.Random(seed)
    world = World(
        failurePolicy={
            "maxUserFailures": chance.choice([0, 1, 3]),
            "maxInfrastructureFailures": chance.choice([0, 5, 1000]),
            "backoffSeconds": chance.choice([0, 10]),
        },
        deadlines={"provisioningSeconds": 300, "totalSeconds": chance.choice([None, 5000])},
        cleanup={"ttlSecondsAfterFinished": chance.choice([None, 60])},
    )
    ended: Phase | None = None
    clusters_at_end = 0
    for _ in range(chance.randrange(5, 120)):
        disturb(world, chance)
        crash = chance.randrange(4) if chance.random() < 0.2 else None
        world.step(crash_after=crash, seconds=chance.choice([1, 1, 2, 10, 70]))
        check(world)
        if ended:
            assert world.status.phase is ended, "terminal is terminal"
            assert world.status.clusters == clusters_at_end
        elif world.status.phase.final:
            ended, clusters_at_end = world.status.phase, world.status.clusters
        if world.deleted:
            break
    # Whatever has happened: without further faults it comes to its end, and nothing is left.
    world.set_spec(suspend=False)
    for _ in range(400):
        known = world.status.cluster
        cluster = world.clusters.get(known.name) if known else None
        if cluster:
            cluster.workers, cluster.reachable = 2, True
            for submission in cluster.running():
                if cluster.drivers[submission].state is DriverState.RUNNING:
                    cluster.drivers[submission] = Driver(DriverState.SUCCEEDED, 0)
        world.step()
        check(world)
        if world.deleted or (world.status.phase.final and not world.clusters):
            break
    else:
        raise AssertionError(f"no end: {world.status.phase} {world.status.message}")
    assert world.clusters == {}


@settings(max_examples=100, deadline=None)
@given(codes=st.lists(st.sampled_from([73, 74, 75, 137]), max_size=8))
def test_faults_of_the_infrastructure_never_eat_the_users_budget(codes: list[int]) -> None:
    world = World(
        failurePolicy={
            "maxUserFailures": 0,
            "maxInfrastructureFailures": 1000,
            "backoffSeconds": 0,
        }
    )
    for code in codes:
        world.run()
        world.end_driver(code)
        world.step()
        assert world.status.phase is Phase.RECOVERING
    world.run()
    world.end_driver(0)
    world.until("Succeeded")
    assert world.status.failures.user == 0
