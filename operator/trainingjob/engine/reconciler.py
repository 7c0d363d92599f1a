"""One reconcile: read, observe, plan, write the status, act."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from trainingjob.api.job import TrainingJob
from trainingjob.api.status import TrainingJobStatus
from trainingjob.backends import Backend
from trainingjob.engine.jobs import JobStore, Key
from trainingjob.kube.errors import Conflict, KubeError, Refused
from trainingjob.planning import actions as act
from trainingjob.planning import lifecycle
from trainingjob.planning.catalogue import Catalogue
from trainingjob.rayapi.client import RayError, RayRefused

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""How often a status is written when only the training's figures have changed."""
REFUSED_SECONDS = 15.0
"""Wait after the cluster's own rules have refused something."""

_ON_JOB = (act.AddFinalizer, act.RemoveFinalizer, act.DeleteJob)


def utc_now() -> datetime:
    """Now, in whole seconds, as statuses hold it."""
    return datetime.now(UTC).replace(microsecond=0)


class Reconciler:
    """Brings jobs forward. `progress_seconds`: see `PROGRESS_SECONDS`."""

    def __init__(
        self,
        store: JobStore,
        backend: Backend,
        catalogue: Catalogue,
        *,
        clock: Callable[[], datetime] = utc_now,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._store, self._backend, self._catalogue = store, backend, catalogue
        self._clock, self._progress_seconds = clock, progress_seconds
        self._progress_written: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._progress_written.pop(key, None)

    async def reconcile(self, key: Key) -> float | None:
        """Brings the job one step forward; returns when to look again, in seconds.

        Raises:
            KubeError: nothing is known of the job, or a write was not taken.
            InvalidJob: the stored job does not fit the types.
        """
        job = await self._store.read(key)
        if job is None:
            return None
        seen = await self._backend.observe(job)
        plan = lifecycle.plan(job, seen, self._clock(), self._catalogue)
        try:
            job = await self._write(job, plan.status)
        except Conflict:
            return 0.0
        try:
            for action in plan.actions:
                await self._act(job, action)
        except Refused as error:
            return await self._refused(job, error.message)
        except Conflict as error:
            log.info("%s/%s: %s", *key, error)
            return 0.2
        except RayRefused as error:
            log.warning("%s/%s: %s", *key, error)
            await self._write(job, lifecycle.submission_refused(job, str(error), self._clock()))
            return 0.0
        except RayError as error:
            log.info("%s/%s: %s", *key, error)
            return 1.0
        return plan.requeue_after

    async def _refused(self, job: TrainingJob, message: str) -> float:
        try:
            await self._write(job, lifecycle.refused(job, message, self._clock()))
        except Conflict:  # an action before the refused one has changed the job
            return 0.0
        return REFUSED_SECONDS

    async def _write(self, job: TrainingJob, status: TrainingJobStatus) -> TrainingJob:
        wanted = job.with_status(status)
        if status == job.status:
            return wanted
        now = time.monotonic()
        last = self._progress_written.get(job.key, -self._progress_seconds)
        if _figures_apart(status) == _figures_apart(job.status) and (
            now - last < self._progress_seconds
        ):
            return wanted
        self._progress_written[job.key] = now
        return await self._store.write_status(wanted)

    async def _act(self, job: TrainingJob, action: act.Action) -> None:
        if isinstance(action, act.Announce):
            try:
                await self._store.execute(job, action)
            except KubeError as error:  # an event is never worth a delay
                log.warning("event not published: %s", error)
        elif isinstance(action, _ON_JOB):
            await self._store.execute(job, action)
        else:
            log.info("%s/%s: %s", *job.key, action)
            await self._backend.execute(job, action)


def _figures_apart(status: TrainingJobStatus) -> TrainingJobStatus:
    """The status without the training's figures."""
    attempts = [a.model_copy(update={"last_step": None}) for a in status.attempts]
    return status.model_copy(update={"training": None, "progress": "", "attempts": attempts})
