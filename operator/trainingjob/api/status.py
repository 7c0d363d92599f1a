"""`TrainingJob.status`: what the operator has seen and done. Nobody else writes it."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PlainSerializer

from trainingjob.api.base import ApiModel


def rfc3339(moment: datetime) -> str:
    """`moment` (UTC) as Kubernetes writes times: 2026-12-01T09:30:00Z."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[datetime, PlainSerializer(rfc3339, when_used="json")]


class Phase(StrEnum):
    """Where a job is in its life. Succeeded and Failed are final."""

    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Outcome(StrEnum):
    """How an attempt ended, and so which budget it was charged to."""

    SUCCEEDED = "Succeeded"
    USER_FAILURE = "UserFailure"
    INFRASTRUCTURE_FAILURE = "InfrastructureFailure"
    PREEMPTED = "Preempted"
    NOT_CHARGED = "NotCharged"
    STOPPED = "Stopped"


class StatusModel(ApiModel):
    """Base of the status types: what another version of the operator wrote is passed over."""

    model_config = ConfigDict(extra="ignore", strict=False)


class Condition(StatusModel):
    """A metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: Time
    observed_generation: int | None = None


class ClusterStatus(StatusModel):
    """The Ray cluster in use."""

    name: str
    """Name of the RayCluster."""
    generation: int
    """1 for the job's first cluster, one more for each cluster that replaced one."""
    created_time: Time
    """When the operator asked for it."""
    dashboard_url: str | None = Field(default=None, alias="dashboardURL")
    """Address of the Ray dashboard inside the Kubernetes cluster."""
    head_pod_uid: str | None = None
    """The head pod that runs the driver. Another one means that the driver is gone."""
    workers_ready_time: Time | None = None
    """When all workers were ready for the first time."""
    failures: int = 0
    """Failed attempts on this cluster."""
    on_demand: bool = False
    """The cluster fell back from spot to on-demand nodes."""


class WorkersStatus(StatusModel):
    """The worker pods."""

    desired: int = 0
    """Worker pods wanted."""
    ready: int = 0
    """Worker pods ready."""
    gpus: int = 0
    """GPUs held by ready workers."""


class TrainingStatus(StatusModel):
    """What the entrypoint says of its progress."""

    step: int | None = None
    """Steps done."""
    total_steps: int | None = None
    """Steps to do."""
    percent: int | None = None
    """Steps done, in per cent."""
    loss: float | None = None
    """Training loss."""
    validation_loss: float | None = None
    """Validation loss."""
    tokens_per_second: float | None = None
    """Tokens trained on per second, by all workers together."""
    eta_seconds: int | None = None
    """Seconds to the end at this speed."""
    checkpoint_step: int | None = None
    """Step of the newest complete checkpoint."""
    checkpoint_time: Time | None = None
    """When it was complete."""
    resumed_from_step: int | None = None
    """Step of the checkpoint that this attempt went on from."""
    gpu_utilization: float | None = None
    """Busy share of the GPUs, 0 to 1."""


class FailureCounts(StatusModel):
    """Every failure so far, by class."""

    user: int = 0
    """Failures of the training code."""
    infrastructure: int = 0
    """Failures of nodes, pods, network or Ray."""
    preemptions: int = 0
    """Preemptions."""


class Attempt(StatusModel):
    """One run of the entrypoint."""

    attempt: int
    """Number of the attempt, from 1."""
    cluster: str
    """Name of the RayCluster it ran on."""
    submission_id: str
    """Id of its Ray job."""
    accepted: bool = False
    """Ray has been seen to know it."""
    workers_ready: bool = False
    """All workers were ready while it ran: only then can its failure be charged."""
    start_time: Time
    """When it was submitted."""
    end_time: Time | None = None
    """When it ended."""
    outcome: Outcome | None = None
    """How it ended."""
    reason: str = ""
    """Cause in one word."""
    message: str = ""
    """Cause and remedy."""
    exit_code: int | None = None
    """Exit code of the driver."""
    node: str | None = None
    """Node of the head pod."""
    start_step: int | None = None
    """Step of the checkpoint that it went on from."""
    last_step: int | None = None
    """Last step seen."""
    log: str = ""
    """Last lines of the driver's log."""


class TrainingJobStatus(StatusModel):
    """What the operator has seen and done."""

    observed_generation: int = -1
    """Generation of the spec that this status is about."""
    phase: Phase = Phase.PENDING
    """Where the job is in its life."""
    message: str = ""
    """What the job is doing or waiting for, in a sentence."""
    conditions: Annotated[
        list[Condition],
        Field(
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            }
        ),
    ] = []
    """Ready, Reconciling and Stalled as kstatus reads them; Complete, Failed and Suspended for
    `kubectl wait`; ClusterReady and WorkersReady for progress."""
    attempt: int = 0
    """Number of the current attempt, from 1; 0 before the first."""
    submission_id: str | None = None
    """Id of the current attempt's Ray job."""
    submissions: int = 0
    """Ray jobs submitted so far: attempts, and their repetitions after a suspension."""
    stop_requested_time: Time | None = None
    """When the driver was asked to stop."""
    ending_reason: str = ""
    """Why the job is being ended, while its driver is being stopped."""
    retry_time: Time | None = None
    """When the next attempt is due."""
    cluster: ClusterStatus | None = None
    """The Ray cluster in use."""
    clusters: int = 0
    """Ray clusters asked for so far."""
    workers: WorkersStatus | None = None
    """The worker pods."""
    worker_summary: str = ""
    """Ready and desired workers, for the printer column."""
    training: TrainingStatus | None = None
    """Progress of the training."""
    progress: str = ""
    """Progress in a few characters, for the printer column."""
    failures: FailureCounts = FailureCounts()
    """Every failure so far, by class."""
    charged: FailureCounts = FailureCounts()
    """Failures that stand against the budgets, since the last progress."""
    attempts: Annotated[list[Attempt], Field(max_length=10)] = []
    """The last ten attempts, the newest last."""
    start_time: Time | None = None
    """When the first cluster was asked for."""
    active_seconds: int = 0
    """Seconds not suspended before `activeSince`."""
    active_since: Time | None = None
    """Since when the job has been active without a break."""
    completion_time: Time | None = None
    """When the job ended."""

    def condition(self, kind: str) -> Condition | None:
        """The condition of type `kind`, if there."""
        return next((c for c in self.conditions if c.type == kind), None)
