"""From an exception to an exit code, its cause and its remedy.

Workers turn whatever they raise into a `TrainingError` before it crosses a process boundary: plain
strings always unpickle, a torch exception does so only where torch is installed. The driver then
picks the root cause among the ranks: when one rank dies, the others fail with "connection closed",
which says nothing.
"""

import errno
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from trainingjob_trainer.contract import ExitCode


class TrainingError(Exception):
    """A failure whose cause and remedy are known.

    `detail` is a traceback for the log, empty where it would not help (configuration, data,
    storage).
    """

    def __init__(self, code: ExitCode, cause: str, remedy: str, detail: str = "") -> None:
        super().__init__(code, cause, remedy, detail)
        self.code = ExitCode(code)
        self.cause = " ".join(cause.split())
        self.remedy = " ".join(remedy.split())
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code.name}: {self.cause}"


class DamagedCheckpoint(TrainingError):
    """A checkpoint's files are not what was written; it was set aside, an older one may serve."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            ExitCode.STORAGE,
            cause,
            "check the storage; training can go on from an older checkpoint",
        )

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.cause,)


def configuration(cause: str, remedy: str) -> TrainingError:
    """Exit 64: `spec.config` or the contract's environment is wrong."""
    return TrainingError(ExitCode.CONFIGURATION, cause, remedy)


def data(cause: str, remedy: str) -> TrainingError:
    """Exit 65: training data is missing or unusable."""
    return TrainingError(ExitCode.DATA, cause, remedy)


def storage(cause: str, remedy: str) -> TrainingError:
    """Exit 66: the run directory cannot be used."""
    return TrainingError(ExitCode.STORAGE, cause, remedy)


def infrastructure(cause: str, remedy: str) -> TrainingError:
    """Exit 74: a node, a process or the cluster failed; the same job elsewhere would work."""
    return TrainingError(ExitCode.INFRASTRUCTURE, cause, remedy)


# --- in a worker -----------------------------------------------------------------------------------

_COMMUNICATION = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "timed out waiting",
    "watchdog caught collective",
)


def in_worker(error: BaseException, where: str) -> TrainingError:
    """`error`, raised by the training function on `where` ("rank 1 on host-a"), as a known failure."""
    if isinstance(error, TrainingError):
        return error
    detail = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}".strip()
    chain = list(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    if "OutOfMemoryError" in names:  # torch.OutOfMemoryError, by name: torch may not be here
        return TrainingError(
            ExitCode.CUDA_OUT_OF_MEMORY,
            f"{where}: the GPU's memory is full: {_first_line(str(error))}",
            "lower training.microBatchSize (the global batch stays the same) or data.sequenceLength",
            detail,
        )
    if "MemoryError" in names:
        return TrainingError(
            ExitCode.HOST_OUT_OF_MEMORY,
            f"{where}: no memory left: {_first_line(text)}",
            "raise workers.memory, or lower training.microBatchSize",
            detail,
        )
    if found := _storage_cause(chain):
        return TrainingError(
            ExitCode.STORAGE, f"{where}: {found}", "free space or repair the storage", detail
        )
    if _is_communication(error):
        return TrainingError(
            ExitCode.COMMUNICATION,
            f"{where}: the workers lost each other: {_first_line(text)}",
            "look for a dead or slow worker, a network policy or a wrong interface "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
            detail,
        )
    return TrainingError(
        ExitCode.USER_CODE,
        f"{where}: {_first_line(text)}",
        "fix the code; the traceback stands above",
        detail,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, its causes, and the per-rank failures inside torch's CheckpointException."""
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        link = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [e for e in (link.__cause__, link.__context__) if e is not None]
        failures = getattr(link, "failures", None)
        if isinstance(failures, dict):
            # torch wraps as {rank: (exception, traceback summary)}
            todo += [f[0] for f in failures.values() if f and isinstance(f[0], BaseException)]


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    text = f"{type(error).__name__}: {error}".lower()
    known = isinstance(error, RuntimeError) or type(error).__name__.startswith("Dist")
    return known and any(word in text for word in _COMMUNICATION)


_STORAGE_ERRNOS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.ESTALE: "the network file system lost a file (stale handle)",
    errno.EIO: "the disk answers with input/output errors",
}


def _storage_cause(chain: list[BaseException]) -> str:
    for link in chain:
        if isinstance(link, OSError) and link.errno in _STORAGE_ERRNOS:
            return f"{_STORAGE_ERRNOS[link.errno]}: {_first_line(str(link))}"
    for link in chain:
        # Of BaseException and without errno: what a full disk or a cut shard looks like in torch.
        if type(link).__name__ == "CheckpointException":
            inner = [e for e in chain if e is not link]
            return f"a checkpoint could not be written or read: {_last_line(str(inner[0] if inner else link))}"
    return ""


# --- in the driver ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What one rank ended with."""

    rank: int
    error: BaseException


def in_driver(error: BaseException) -> TrainingError:
    """The root cause of a failed `fit()`, from Ray Train's exception or anything else."""
    if isinstance(error, TrainingError):
        return error
    failures = getattr(error, "worker_failures", None)
    if isinstance(failures, dict) and failures:
        return _root_cause([RankFailure(rank, e) for rank, e in sorted(failures.items())])
    inner = getattr(error, "controller_failure", None)
    cause = inner if isinstance(inner, BaseException) else error
    names = {base.__name__ for link in _chain(cause) for base in type(link).__mro__}
    detail = "".join(traceback.format_exception(error))
    if "CheckpointManagerInitializationError" in names:
        return TrainingError(
            ExitCode.STORAGE,
            f"Ray Train cannot read its record of checkpoints: {_first_line(str(cause))}",
            "delete checkpoint_manager_snapshot.json in the run directory; it is rebuilt at the start",
            detail,
        )
    if "PreemptionError" in names:
        return TrainingError(
            ExitCode.INFRASTRUCTURE,
            f"a node was taken away: {_first_line(str(cause))}",
            "run the job again: it resumes from the last checkpoint",
        )
    if found := _storage_cause(list(_chain(cause))):
        return TrainingError(ExitCode.STORAGE, found, "free space or repair the storage", detail)
    if names & {"TrainingFailedError", "RayError", "ConnectionError"}:
        return TrainingError(
            ExitCode.INFRASTRUCTURE,
            f"the Ray cluster failed: {type(cause).__name__}: {_first_line(str(cause))}",
            "run the job again: it resumes from the last checkpoint",
            detail,
        )
    return TrainingError(
        ExitCode.USER_CODE,
        f"driver on {socket.gethostname()}: {type(cause).__name__}: {_first_line(str(cause))}",
        "fix the code; the traceback stands above",
        detail,
    )


def _root_cause(failures: list[RankFailure]) -> TrainingError:
    for failure in failures:
        health = getattr(failure.error, "health_check_failure", None) or failure.error
        # Ray's memory monitor; torch's class of the same name stays in the workers.
        if type(health).__name__ == "OutOfMemoryError":
            return TrainingError(
                ExitCode.HOST_OUT_OF_MEMORY,
                f"rank {failure.rank} was killed because its node ran out of memory: "
                f"{_first_line(str(health))}",
                "raise workers.memory, or lower training.microBatchSize",
            )
    for failure in failures:
        health = getattr(failure.error, "health_check_failure", None)
        if health is not None or _is_actor_death(failure.error):
            death = health or failure.error
            what = "its node was taken away" if getattr(death, "preempted", False) else "it died"
            return TrainingError(
                ExitCode.INFRASTRUCTURE,
                f"rank {failure.rank} of {_ranks(failures)} was lost, {what}: {_death(death)}",
                "run the job again: it resumes from the last checkpoint",
            )
    known = [in_worker(f.error, f"rank {f.rank}") for f in failures]
    for error in known:
        if error.code is not ExitCode.COMMUNICATION:
            return error
    return known[0]


def _is_actor_death(error: BaseException) -> bool:
    return any(
        base.__name__ in ("RayActorError", "WorkerHealthCheckTimeoutError")
        for base in type(error).__mro__
    )


def _ranks(failures: list[RankFailure]) -> str:
    return (
        ", ".join(str(f.rank) for f in failures) + " that failed"
        if len(failures) > 1
        else "the job"
    )


def _death(error: BaseException) -> str:
    """Ray's own sentence on why an actor died, without the block of identifiers before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if line.lower().startswith(("the actor died", "the actor is dead", "worker exit detail")):
            return line
    return lines[-1] if lines else type(error).__name__


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:500] if lines else "no message"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no message"
