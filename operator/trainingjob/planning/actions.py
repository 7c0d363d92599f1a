"""What the operator can do to the world. Each is idempotent: doing it twice changes nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AddFinalizer:
    """Mark the job, so that its deletion waits for its cluster's end."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Let the job go."""


@dataclass(frozen=True)
class EnsureCluster:
    """Create the Ray cluster, or leave it as it is."""

    name: str
    generation: int


@dataclass(frozen=True)
class FallBackToOnDemand:
    """Replace the cluster's spot workers by on-demand ones."""

    cluster: str


@dataclass(frozen=True)
class DeleteCluster:
    """Delete the Ray cluster with all its pods."""

    name: str


@dataclass(frozen=True)
class DeletePod:
    """Delete, by force, a pod that is on a dead node."""

    name: str
    uid: str


@dataclass(frozen=True)
class Submit:
    """Submit the entrypoint as a Ray job, or adopt it when the id is known there."""

    submission_id: str
    attempt: int


@dataclass(frozen=True)
class StopDriver:
    """Ask the driver to write a checkpoint and end."""

    submission_id: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the TrainingJob itself."""


@dataclass(frozen=True)
class Announce:
    """Publish a Kubernetes event. `type` is Normal or Warning."""

    type: str
    reason: str
    message: str


Action = (
    AddFinalizer
    | RemoveFinalizer
    | EnsureCluster
    | FallBackToOnDemand
    | DeleteCluster
    | DeletePod
    | Submit
    | StopDriver
    | DeleteJob
    | Announce
)
