"""The conditions of a job, derived from its phase: a contract with kubectl, Flux and Argo CD.

kstatus reads Reconciling and Stalled before Ready, in the order in which they stand.
"""

from datetime import datetime
from typing import Literal

from trainingjob.api.status import Condition, Phase, TrainingJobStatus

_READY = {Phase.RUNNING, Phase.SUSPENDED, Phase.SUCCEEDED}
_RECONCILING = {Phase.PENDING, Phase.PROVISIONING, Phase.STARTING, Phase.RECOVERING}
UNREACHABLE = "DashboardUnreachable"

Status = Literal["True", "False", "Unknown"]


def derive(
    status: TrainingJobStatus,
    generation: int,
    now: datetime,
    *,
    trouble: tuple[str, str] | None,
    stalled: tuple[str, str] | None,
    unreachable: bool = False,
) -> TrainingJobStatus:
    """`status` with its conditions. `trouble` and `stalled` are pairs of reason and message."""
    phase, message = status.phase, status.message
    if phase is Phase.FAILED and stalled is None:
        before = status.condition("Stalled")
        stalled = (before.reason, before.message) if before else ("Failed", message)
    wanted: list[tuple[str, Status, str, str]] = []
    if stalled:
        wanted.append(("Stalled", "True", *stalled))
    elif phase in _RECONCILING:
        wanted.append(("Reconciling", "True", trouble[0] if trouble else str(phase), message))
    ready: Status = "True" if phase in _READY and not stalled else "False"
    wanted.append(("Ready", ready, stalled[0] if stalled else str(phase), message))
    if status.cluster:
        wanted.append(_cluster_ready(status, trouble, unreachable))
        wanted.append(_workers_ready(status, trouble))
    if phase is Phase.SUCCEEDED:
        wanted.append(("Complete", "True", "Succeeded", message))
    if phase is Phase.FAILED and stalled:
        wanted.append(("Failed", "True", *stalled))
    if phase is Phase.SUSPENDED:
        wanted.append(("Suspended", "True", "Suspended", message))
    elif status.condition("Suspended"):
        wanted.append(("Suspended", "False", "Resumed", ""))
    made = []
    for kind, value, reason, text in wanted:
        before = status.condition(kind)
        changed = before is None or before.status != value
        since = now if changed or before is None else before.last_transition_time
        if before and kind == "ClusterReady" and before.reason != reason:
            since = now
        made.append(
            Condition(
                type=kind,
                status=value,
                reason=reason,
                message=text[:2000],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return status.model_copy(update={"conditions": made})


def unreachable_since(status: TrainingJobStatus) -> datetime | None:
    """Since when the dashboard has been silent, if it is."""
    found = status.condition("ClusterReady")
    return found.last_transition_time if found and found.reason == UNREACHABLE else None


def _cluster_ready(
    status: TrainingJobStatus, trouble: tuple[str, str] | None, unreachable: bool
) -> tuple[str, Status, str, str]:
    assert status.cluster is not None
    if unreachable:
        return "ClusterReady", "Unknown", UNREACHABLE, "the Ray dashboard does not answer"
    if status.cluster.head_pod_uid:
        return "ClusterReady", "True", "HeadReady", ""
    return ("ClusterReady", "False", *(trouble or ("HeadNotReady", "waiting for the head")))


def _workers_ready(
    status: TrainingJobStatus, trouble: tuple[str, str] | None
) -> tuple[str, Status, str, str]:
    workers = status.workers
    if workers and workers.ready >= workers.desired:
        return "WorkersReady", "True", "AllReady", ""
    count = f"{workers.ready} of {workers.desired} workers ready" if workers else "no worker yet"
    return ("WorkersReady", "False", *(trouble or ("WorkersNotReady", count)))
