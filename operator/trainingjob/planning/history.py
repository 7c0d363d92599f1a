"""The attempts in a job's status: bounded in number and in size."""

from datetime import datetime
from typing import Any

from trainingjob.api.status import Attempt, TrainingJobStatus
from trainingjob.planning.failures import Verdict
from trainingjob.planning.text import tail

ATTEMPTS_KEPT = 10
LOG_BYTES = 2048
LOG_BYTES_TOTAL = 16 * 1024


def under_way(status: TrainingJobStatus) -> Attempt | None:
    """The attempt that has not ended."""
    last = status.attempts[-1] if status.attempts else None
    return last if last and last.end_time is None else None


def begin(status: TrainingJobStatus, attempt: Attempt) -> TrainingJobStatus:
    """The status with a new attempt at the end of its history."""
    return status.model_copy(
        update={
            "attempt": attempt.attempt,
            "submission_id": attempt.submission_id,
            "submissions": status.submissions + 1,
            "attempts": [*status.attempts, attempt][-ATTEMPTS_KEPT:],
        }
    )


def amend(status: TrainingJobStatus, **fields: Any) -> TrainingJobStatus:
    """The status with fields of its last attempt changed."""
    *older, last = status.attempts
    return status.model_copy(update={"attempts": [*older, last.model_copy(update=fields)]})


def end(
    status: TrainingJobStatus, verdict: Verdict, exit_code: int | None, log: str, now: datetime
) -> TrainingJobStatus:
    """The status with the attempt under way ended, if there is one."""
    if under_way(status) is None:
        return status
    status = amend(
        status,
        end_time=now,
        outcome=verdict.outcome,
        reason=verdict.reason,
        message=tail(verdict.message, LOG_BYTES),
        exit_code=exit_code,
        log=tail(log, LOG_BYTES),
    )
    room, kept = LOG_BYTES_TOTAL, []
    for attempt in reversed(status.attempts):
        text = tail(attempt.log, max(0, room))
        room -= len(text.encode())
        kept.append(attempt.model_copy(update={"log": text}))
    return status.model_copy(update={"attempts": kept[::-1]})
