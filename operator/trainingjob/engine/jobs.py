"""What the reconciler needs of the place where jobs are kept."""

from typing import Protocol

from trainingjob.api.job import TrainingJob
from trainingjob.planning.actions import Action

Key = tuple[str, str]
"""Namespace and name of a job."""


class JobStore(Protocol):
    """Where jobs are read from and their status is written to."""

    async def read(self, key: Key) -> TrainingJob | None:
        """The job as it stands now, None when it is gone."""

    async def write_status(self, job: TrainingJob) -> TrainingJob:
        """Writes the status, if nobody wrote the job since it was read."""

    async def execute(self, job: TrainingJob, action: Action) -> None:
        """Carries out one action on the job itself."""
