"""From an exception to an exit code, its cause and its remedy.

Workers turn whatever they raise into a `TrainingError` before it crosses a process boundary: plain
strings always unpickle, a torch exception does so only where torch is installed. The driver then
picks the root cause among the ranks: when one rank dies, the others fail with "connection closed",
which says nothing.
"""

import errno
import re
import socket
import traceback
from collections.abc import Iterator

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


# --- in a worker ---------------------------------------------------------------------------------

_COMMUNICATION = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "watchdog caught collective",
)
_NETWORK = (
    "look for a dead or slow worker, a network policy or a wrong interface "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)
_FIX = "fix the code: the traceback stands above"


def in_worker(error: BaseException, where: str) -> TrainingError:
    """`error` of the training function on `where` ("rank 1 on host-a") as a known failure."""
    if isinstance(error, TrainingError):
        return error
    detail = "".join(traceback.format_exception(error))
    text = _first_line(f"{type(error).__name__}: {error}")
    chain = list(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    if "OutOfMemoryError" in names:  # torch.OutOfMemoryError, by name: torch may not be here
        return TrainingError(
            ExitCode.CUDA_OUT_OF_MEMORY,
            f"{where}: the memory of the GPU is full: {text}",
            "lower training.microBatchSize (the global batch stays) or data.sequenceLength",
            detail,
        )
    if "MemoryError" in names:
        return TrainingError(
            ExitCode.HOST_OUT_OF_MEMORY,
            f"{where}: no memory left: {text}",
            "raise workers.memory, or lower training.microBatchSize",
            detail,
        )
    if found := _storage_cause(chain):
        return TrainingError(
            ExitCode.STORAGE, f"{where}: {found}", "free space or repair the storage", detail
        )
    if any(_is_communication(link) for link in [error, *_inside_checkpoint(error)]):
        return TrainingError(
            ExitCode.COMMUNICATION,
            f"{where}: the workers lost each other: {text}",
            _NETWORK,
            detail,
        )
    return TrainingError(ExitCode.USER_CODE, f"{where}: {text}", _FIX, detail)


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
        todo += _inside_checkpoint(link)


def _inside_checkpoint(error: BaseException) -> list[BaseException]:
    """The ranks' exceptions in torch's CheckpointException ({rank: (exception, stack)})."""
    if type(error).__name__ != "CheckpointException":
        return []
    failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
    return [exception for exception, _ in failures.values()]


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
        # Derives from BaseException and has no errno: a full disk or a cut file looks like this.
        inside = _inside_checkpoint(link)
        if inside and not any(_is_communication(e) for e in inside):
            return f"a checkpoint could not be written or read: {_last_line(str(inside[0]))}"
    return ""


# --- in the driver -------------------------------------------------------------------------------

_AGAIN = "run the job again: it resumes from the last checkpoint"


def in_driver(error: BaseException) -> TrainingError:
    """The root cause of a failed `fit()`, from Ray Train's exception or anything else."""
    if isinstance(error, TrainingError):
        return error
    failures = getattr(error, "worker_failures", None)
    if isinstance(failures, dict) and failures:
        return _root_cause(failures)
    controller_failure = getattr(error, "controller_failure", None)
    cause = controller_failure if isinstance(controller_failure, BaseException) else error
    chain = list(_chain(cause))
    names = {base.__name__ for link in [error, *chain] for base in type(link).__mro__}
    text = f"{type(cause).__name__}: {_first_line(str(cause))}"
    detail = "".join(traceback.format_exception(error))
    if "CheckpointManagerInitializationError" in names:
        return TrainingError(
            ExitCode.STORAGE,
            f"Ray Train cannot read its record of checkpoints: {text}",
            "delete checkpoint_manager_snapshot.json in the run directory: it is rebuilt",
            detail,
        )
    if "PreemptionError" in names:
        return infrastructure(f"a node was taken away: {text}", _AGAIN)
    if "No module named 'trainingjob_trainer'" in str(cause):
        return configuration(
            "a worker cannot import trainingjob_trainer",
            "use one image with the trainer for head and workers",
        )
    if found := _storage_cause(chain):
        return TrainingError(ExitCode.STORAGE, found, "free space or repair the storage", detail)
    if cause is controller_failure and any(_is_communication(link) for link in chain):
        return TrainingError(
            ExitCode.COMMUNICATION, f"the workers did not find each other: {text}", _NETWORK, detail
        )
    if names & {"RayTrainError", "RayError", "ConnectionError"}:
        return TrainingError(
            ExitCode.INFRASTRUCTURE, f"the Ray cluster failed: {text}", _AGAIN, detail
        )
    return TrainingError(
        ExitCode.USER_CODE, f"driver on {socket.gethostname()}: {text}", _FIX, detail
    )


def _root_cause(failures: dict[int, BaseException]) -> TrainingError:
    """Of all ranks' errors the one that explains the others."""
    deaths = {}
    for rank, error in sorted(failures.items()):
        # Ray wraps what its health check met; torch's exceptions stay in the workers.
        met = getattr(error, "health_check_failure", None) or error
        names = {base.__name__ for base in type(met).__mro__}
        if "OutOfMemoryError" in names:
            return TrainingError(
                ExitCode.HOST_OUT_OF_MEMORY,
                f"rank {rank} was killed, its node ran out of memory: {_first_line(str(met))}",
                "raise workers.memory, or lower training.microBatchSize",
            )
        if met is not error or names & {"RayActorError", "WorkerHealthCheckTimeoutError"}:
            deaths[rank] = met
    for rank, death in deaths.items():
        preempted = ", its node was taken away" if getattr(death, "preempted", False) else ""
        return infrastructure(f"rank {rank} was lost{preempted}: {_obituary(str(death))}", _AGAIN)
    known = [in_worker(error, f"rank {rank}") for rank, error in sorted(failures.items())]
    return next((e for e in known if e.code is not ExitCode.COMMUNICATION), known[0])


def _obituary(text: str) -> str:
    """Who died where and why, from Ray's block of text about a dead actor."""
    facts = dict(re.findall(r"^\s*(pid|ip): (\S+)$", text, re.MULTILINE))
    who = f"process {facts['pid']} on {facts['ip']}: " if facts.keys() >= {"pid", "ip"} else ""
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text, re.MULTILINE)
    reason = re.search(
        r"^The actor (?:is dead|died) because (?!of an error)(.*)$", text, re.MULTILINE
    )
    if detail:
        return who + detail.group(1)
    return who + (reason.group(1) if reason else _first_line(text))


def _first_line(text: str) -> str:
    return next((line.strip()[:500] for line in text.splitlines() if line.strip()), "no message")


def _last_line(text: str) -> str:
    return _first_line("\n".join(reversed(text.splitlines())))
