"""What failures cost, how many are survived, and how long to wait after one."""

import hashlib

from trainingjob.api.job import TrainingJob
from trainingjob.api.spec import FailurePolicy
from trainingjob.api.status import FailureCounts, Outcome, TrainingJobStatus

_FIELDS = {
    Outcome.USER_FAILURE: ("user", "max_user_failures", "maxUserFailures"),
    Outcome.INFRASTRUCTURE_FAILURE: (
        "infrastructure",
        "max_infrastructure_failures",
        "maxInfrastructureFailures",
    ),
    Outcome.PREEMPTED: ("preemptions", "max_preemptions", "maxPreemptions"),
}


def charge(status: TrainingJobStatus, policy: FailurePolicy, outcome: Outcome) -> TrainingJobStatus:
    """The status with the end of its last attempt charged to a budget, if to any."""
    if outcome not in _FIELDS:
        return status
    field = _FIELDS[outcome][0]
    standing = status.charged
    if policy.reset_on_progress and progressed(status):
        standing = FailureCounts()
    return status.model_copy(
        update={
            "failures": _plus_one(status.failures, field),
            "charged": _plus_one(standing, field),
        }
    )


def progressed(status: TrainingJobStatus) -> bool:
    """Whether the last attempt wrote a newer checkpoint than it went on from."""
    if status.training is None or status.training.checkpoint_step is None or not status.attempts:
        return False
    return status.training.checkpoint_step > (status.attempts[-1].start_step or 0)


def spent(status: TrainingJobStatus, policy: FailurePolicy, outcome: Outcome) -> str | None:
    """The limit that a failure of this kind has exceeded, in words; None when it is survived."""
    if outcome not in _FIELDS:
        return None
    field, limit_field, name = _FIELDS[outcome]
    limit: int | None = getattr(policy, limit_field)
    if limit is None or getattr(status.charged, field) <= limit:
        return None
    return f"failurePolicy.{name} is {limit}"


def backoff(job: TrainingJob, status: TrainingJobStatus, outcome: Outcome) -> float:
    """Seconds until the next attempt: none after progress, then doubling, with a jitter that is a
    function of job and attempt, so that many jobs do not come back at once."""
    if outcome not in _FIELDS:
        return 0.0
    policy, charged = job.spec.failure_policy, status.charged
    row = charged.user + charged.infrastructure + charged.preemptions
    if row <= 1:
        return 0.0
    delay = min(policy.max_backoff_seconds, policy.backoff_seconds * 2.0 ** min(row - 2, 30))
    seed = hashlib.sha256(f"{job.metadata.uid}/{status.attempt}".encode()).digest()
    return delay * (1 + int.from_bytes(seed[:2]) / 2**16 / 10)


def _plus_one(counts: FailureCounts, field: str) -> FailureCounts:
    return counts.model_copy(update={field: getattr(counts, field) + 1})
