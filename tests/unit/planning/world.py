"""A job and its surroundings in virtual time: what `plan` decides is carried out on a model of
KubeRay and Ray, with faults wherever the test wants them."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from trainingjob.api.job import TrainingJob, parse
from trainingjob.api.status import TrainingStatus
from trainingjob.planning import actions as act
from trainingjob.planning import names
from trainingjob.planning.catalogue import Catalogue
from trainingjob.planning.lifecycle import plan
from trainingjob.planning.observed import (
    Cluster,
    Driver,
    DriverState,
    Head,
    Observed,
    Ray,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "raytraining.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": "job",
            "namespace": "ns",
            "uid": "11111111-2222-3333-4444-555555555555",
            "generation": 1,
        },
        "spec": {
            "image": "trainer",
            "rayVersion": "2.60.0",
            "entrypoint": "train",
            "workers": {"replicas": 2},
            **spec,
        },
    }


@dataclass
class FakeCluster:
    name: str
    head_uid: str
    workers: int = 0
    drivers: dict[str, Driver] = field(default_factory=dict)
    reachable: bool = True
    head: bool = True

    def running(self) -> list[str]:
        return [i for i, d in self.drivers.items() if not d.state.ended] if self.head else []


class World:
    """`step` is one reconcile; `crash_after` cuts it off after that many actions."""

    def __init__(self, **spec: Any) -> None:
        self.job: TrainingJob = parse(manifest(**spec))
        self.now = START
        self.clusters: dict[str, FakeCluster] = {}
        self.deleted = False
        self.training: TrainingStatus | None = None
        self.log = ""
        self.catalogue = Catalogue()
        self.actions: list[act.Action] = []
        self.requeue: float | None = None
        self.submitted: list[str] = []
        self.most_running = 0
        self._heads = 0

    @property
    def status(self) -> Any:
        return self.job.status

    @property
    def cluster(self) -> FakeCluster:
        assert self.job.status.cluster is not None
        return self.clusters[self.job.status.cluster.name]

    def set_spec(self, **fields: Any) -> None:
        self.job = self.job.model_copy(update={"spec": self.job.spec.model_copy(update=fields)})

    def delete_job(self) -> None:
        meta = self.job.metadata.model_copy(update={"deletion_timestamp": "now"})
        self.job = self.job.model_copy(update={"metadata": meta})
        self.deleted = not meta.finalizers

    def observe(self) -> Observed:
        known = self.job.status.cluster
        if known is None or known.name not in self.clusters:
            others = tuple(n for n in self.clusters if not known or n != known.name)
            return Observed(others=others)
        found = self.clusters[known.name]
        head = Head(uid=found.head_uid, node="node-1", ready=True) if found.head else None
        cluster = Cluster(
            name=found.name,
            head=head,
            workers_ready=found.workers,
            address="http://head:8265" if found.head else None,
        )
        attempt = self.job.status.attempts[-1] if self.job.status.attempts else None
        driver = found.drivers.get(attempt.submission_id) if attempt else None
        up = found.head and found.reachable
        return Observed(
            cluster=cluster,
            ray=Ray(reachable=up, driver=driver if up else None),
            training=self.training if up and driver else None,
            log=self.log if driver and driver.state.ended else "",
        )

    def step(self, *, crash_after: int | None = None, seconds: float | None = None) -> None:
        if self.deleted:
            return
        wait = self.requeue if seconds is None else seconds
        self.now += timedelta(seconds=round(max(1.0, wait if wait is not None else 5.0)))
        made = plan(self.job, self.observe(), self.now, self.catalogue)
        self.requeue = made.requeue_after
        # The status survives a round trip through its stored form.
        stored = type(made.status).model_validate(made.status.dump())
        self.job = self.job.with_status(stored)
        self.actions = list(made.actions)
        for number, action in enumerate(made.actions):
            if crash_after is not None and number >= crash_after:
                return
            self.execute(action)
        running = [d for c in self.clusters.values() for d in c.running()]
        self.most_running = max(self.most_running, len(running))

    def execute(self, action: act.Action) -> None:
        meta = self.job.metadata
        match action:
            case act.AddFinalizer():
                if names.FINALIZER not in meta.finalizers:
                    self._finalizers([*meta.finalizers, names.FINALIZER])
            case act.RemoveFinalizer():
                self._finalizers([])
                if meta.deletion_timestamp:
                    self.deleted = True
            case act.EnsureCluster(name, _):
                if name not in self.clusters:
                    self._heads += 1
                    self.clusters[name] = FakeCluster(name, f"head-{self._heads}")
            case act.DeleteCluster(name):
                self.clusters.pop(name, None)
            case act.Submit(submission_id, _):
                found = self.cluster
                if found.head and submission_id not in found.drivers:
                    self.submitted.append(submission_id)
                    found.drivers[submission_id] = Driver(DriverState.RUNNING)
            case act.StopDriver(submission_id):
                found = self.cluster
                driver = found.drivers.get(submission_id)
                if driver and not driver.state.ended:
                    found.drivers[submission_id] = replace(driver, state=DriverState.STOPPED)
            case act.DeleteJob():
                self.delete_job()
            case _:
                pass

    def _finalizers(self, wanted: list[str]) -> None:
        meta = self.job.metadata.model_copy(update={"finalizers": wanted})
        self.job = self.job.model_copy(update={"metadata": meta})

    def end_driver(self, code: int, error_type: str = "") -> None:
        """The driver under way ends with the exit code."""
        submission = self.job.status.submission_id
        state = DriverState.SUCCEEDED if code == 0 else DriverState.FAILED
        self.cluster.drivers[submission] = Driver(state, code, error_type)

    def until(self, phase: str, steps: int = 50) -> None:
        for _ in range(steps):
            if self.job.status.phase == phase:
                return
            self.step()
        raise AssertionError(f"still {self.job.status.phase}: {self.job.status.message}")

    def run(self, workers: int = 2) -> None:
        """To a running attempt."""
        for _ in range(30):
            self.step(seconds=1)
            for cluster in self.clusters.values():
                cluster.workers = workers
            if self.job.status.phase in ("Running", "Recovering") and any(
                c.running() for c in self.clusters.values()
            ):
                self.step(seconds=1)
                return
        raise AssertionError(f"still {self.job.status.phase}: {self.job.status.message}")
