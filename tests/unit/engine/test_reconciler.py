from typing import Any

import pytest

from tests.unit.planning.world import World
from trainingjob.api.job import TrainingJob
from trainingjob.api.status import TrainingStatus
from trainingjob.engine.reconciler import REFUSED_SECONDS, Reconciler
from trainingjob.kube.errors import Conflict, Refused, Unavailable
from trainingjob.planning import actions as act
from trainingjob.planning.observed import Observed
from trainingjob.rayapi.client import RayError, RayRefused


class Fake:
    """Store and backend over one `World`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[str] = []
        self.fail: dict[str, Exception] = {}

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fail:
            raise self.fail.pop(what)

    async def read(self, key: tuple[str, str]) -> TrainingJob | None:
        return None if self.world.deleted else self.world.job

    async def write_status(self, job: TrainingJob) -> TrainingJob:
        self._note("status")
        self.world.job = self.world.job.with_status(job.status)
        return job

    async def observe(self, job: TrainingJob) -> Observed:
        return self.world.observe()

    async def execute(self, job: TrainingJob, action: act.Action) -> None:
        self._note(type(action).__name__)
        self.world.execute(action)


KEY = ("ns", "job")


def make(**spec: Any) -> tuple[Fake, Reconciler]:
    fake = Fake(World(**spec))

    def clock() -> Any:
        return fake.world.now

    return fake, Reconciler(fake, fake, fake.world.catalogue, clock=clock)


async def test_the_status_is_written_before_anything_is_done() -> None:
    fake, reconciler = make()
    await reconciler.reconcile(KEY)
    assert fake.log == ["status", "AddFinalizer", "EnsureCluster", "Announce"]


async def test_a_job_that_is_gone_asks_for_nothing() -> None:
    fake, reconciler = make()
    fake.world.deleted = True
    assert await reconciler.reconcile(KEY) is None
    assert fake.log == []


async def test_nothing_is_done_when_the_status_could_not_be_written() -> None:
    fake, reconciler = make()
    fake.fail["status"] = Conflict(409, "Conflict", "changed", "PUT")
    assert await reconciler.reconcile(KEY) == 0
    assert fake.log == ["status"]
    fake.fail["status"] = Unavailable(0, "NoAnswer", "no answer", "PUT")
    with pytest.raises(Unavailable):
        await reconciler.reconcile(KEY)
    assert fake.log == ["status", "status"]


async def test_a_refusal_of_the_cluster_is_in_the_condition_in_its_own_words() -> None:
    fake, reconciler = make()
    words = 'rayclusters.ray.io "x" is forbidden: exceeded quota'
    fake.fail["EnsureCluster"] = Refused(403, "Forbidden", words, "PATCH")
    assert await reconciler.reconcile(KEY) == REFUSED_SECONDS
    ready = fake.world.status.condition("ClusterReady")
    assert (ready.status, ready.reason, ready.message) == ("False", "Refused", words)
    assert fake.world.status.failures.infrastructure == 0
    await reconciler.reconcile(KEY)
    assert fake.world.clusters, "it is tried again by itself"


async def test_an_event_that_cannot_be_published_stops_nothing() -> None:
    fake, reconciler = make()
    fake.fail["Announce"] = Refused(403, "Forbidden", "no", "POST")
    assert await reconciler.reconcile(KEY) != REFUSED_SECONDS


async def test_a_silent_dashboard_is_asked_again_soon() -> None:
    fake, reconciler = make()
    await reconciler.reconcile(KEY)
    fake.fail["Submit"] = RayError("no answer")
    assert await reconciler.reconcile(KEY) == 1.0
    await reconciler.reconcile(KEY)
    assert fake.world.submitted == ["job-11111111-1"]


async def test_a_submission_that_ray_refuses_ends_the_job() -> None:
    fake, reconciler = make()
    await reconciler.reconcile(KEY)
    fake.fail["Submit"] = RayRefused("400 runtime_env must be an object")
    await reconciler.reconcile(KEY)
    assert fake.world.status.phase == "Failed"
    assert "runtime_env must be an object" in fake.world.status.message
    await reconciler.reconcile(KEY)
    assert fake.world.clusters == {}


async def test_figures_alone_are_written_only_now_and_then() -> None:
    fake, reconciler = make()
    for _ in range(6):
        await reconciler.reconcile(KEY)
        for cluster in fake.world.clusters.values():
            cluster.workers = 2
    assert fake.world.status.phase == "Running"
    fake.log.clear()
    for step in range(1, 50):
        fake.world.training = TrainingStatus(step=step, total_steps=100)
        await reconciler.reconcile(KEY)
    assert len(fake.log) <= 1
    fake.world.end_driver(1)
    await reconciler.reconcile(KEY)
    assert "status" in fake.log
    assert fake.world.status.attempts[0].last_step == 49
