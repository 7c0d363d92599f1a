"""What a backend sees of a job's Ray cluster and driver at one moment."""

from dataclasses import dataclass, field
from enum import StrEnum

from trainingjob.api.status import TrainingStatus


@dataclass(frozen=True)
class Trouble:
    """Something that keeps a pod or the cluster from getting ready."""

    reason: str
    message: str
    subject: str = ""


@dataclass(frozen=True)
class Head:
    """The head of the cluster, in Kubernetes its pod."""

    uid: str
    node: str | None = None
    ended: bool = False
    """Its process has ended for good."""
    unreachable: bool = False
    """Its node does not answer: it may still run."""
    ready: bool = False
    reason: str = ""
    """Why it ended: OOMKilled, Evicted, …"""


@dataclass(frozen=True)
class DeadPod:
    """A pod whose node is gone or unreachable, that the API still shows as running."""

    name: str
    uid: str
    node: str


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster."""

    name: str
    deleting: bool = False
    head: Head | None = None
    workers_ready: int = 0
    troubles: tuple[Trouble, ...] = ()
    dead_pods: tuple[DeadPod, ...] = ()
    lost_fields: tuple[str, ...] = ()
    """Fields that were written and that the API server did not store."""
    spot_unschedulable_seconds: float = 0
    """How long pods of the spot group have found no node."""
    address: str | None = None
    """URL of the dashboard."""


class DriverState(StrEnum):
    """Status of a Ray job, as the Jobs API names it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether the driver no longer runs."""
        return self in (DriverState.STOPPED, DriverState.SUCCEEDED, DriverState.FAILED)


@dataclass(frozen=True)
class Driver:
    """The Ray job of the current submission."""

    state: DriverState
    exit_code: int | None = None
    error_type: str = ""
    message: str = ""


@dataclass(frozen=True)
class Ray:
    """What the dashboard answered. `driver` is None when it does not know the submission."""

    reachable: bool
    driver: Driver | None = None
    error: str = ""


@dataclass(frozen=True)
class Observed:
    """Everything seen at one moment. `others` names clusters of the job beside the current one."""

    cluster: Cluster | None = None
    others: tuple[str, ...] = ()
    ray: Ray = field(default_factory=lambda: Ray(reachable=False))
    training: TrainingStatus | None = None
    log: str = ""
