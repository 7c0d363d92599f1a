"""Where a job's Ray cluster lives: on Kubernetes through KubeRay, or on this machine."""

from typing import Protocol

from trainingjob.api.job import TrainingJob
from trainingjob.planning.actions import Action
from trainingjob.planning.observed import Observed


class Backend(Protocol):
    """What the reconciler needs of a place where Ray clusters live."""

    async def observe(self, job: TrainingJob) -> Observed:
        """What is there of the job's cluster and driver. Never raises for a silent dashboard."""

    async def execute(self, job: TrainingJob, action: Action) -> None:
        """Carries out one action on cluster or driver; doing it twice changes nothing."""
