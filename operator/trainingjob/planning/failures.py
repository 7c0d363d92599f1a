"""Why a driver ended, which budget pays, and what to do about it."""

from dataclasses import dataclass
from enum import IntEnum

from trainingjob.api.status import Outcome
from trainingjob.planning.observed import Driver


class ExitCode(IntEnum):
    """Exit codes of the contract with the entrypoint (docs/contract.md)."""

    DONE = 0
    CONFIGURATION = 64
    DATA = 65
    STORAGE = 66
    USER = 70
    HOST_OOM = 71
    CUDA_OOM = 72
    COMMUNICATION = 73
    INFRASTRUCTURE = 74
    STOPPED = 75
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


@dataclass(frozen=True)
class Verdict:
    """The judgement on one ended attempt."""

    outcome: Outcome
    reason: str
    message: str
    retry: bool = True
    """False: another attempt could only fail in the same way."""
    new_cluster: bool = False
    """The cluster itself is at fault."""


def _user(reason: str, message: str, *, retry: bool = True) -> Verdict:
    return Verdict(Outcome.USER_FAILURE, reason, message, retry=retry)


def _infrastructure(reason: str, message: str, *, new_cluster: bool = False) -> Verdict:
    return Verdict(Outcome.INFRASTRUCTURE_FAILURE, reason, message, new_cluster=new_cluster)


_BY_CODE = {
    ExitCode.CONFIGURATION: _user(
        "ConfigurationError", "the configuration is wrong; correct spec.config", retry=False
    ),
    ExitCode.DATA: _user(
        "DataError", "the training data cannot be used; correct spec.config", retry=False
    ),
    ExitCode.STORAGE: _infrastructure(
        "StorageError", "the checkpoint storage cannot be used; see spec.checkpoint"
    ),
    ExitCode.USER: _user("TrainingError", "the training code failed; see the log"),
    ExitCode.HOST_OOM: _user(
        "HostOutOfMemory",
        "a worker ran out of host memory; raise workers.memory or lower the micro-batch",
    ),
    ExitCode.CUDA_OOM: _user(
        "CudaOutOfMemory",
        "a GPU ran out of memory; lower the micro-batch or spread over more GPUs",
    ),
    ExitCode.COMMUNICATION: _infrastructure("CommunicationError", "the workers lost each other"),
    ExitCode.INFRASTRUCTURE: _infrastructure("InfrastructureError", "a worker or node was lost"),
    ExitCode.NOT_EXECUTABLE: _user(
        "EntrypointNotExecutable",
        "the entrypoint cannot be executed; correct spec.entrypoint or the image",
        retry=False,
    ),
    ExitCode.NOT_FOUND: _user(
        "EntrypointNotFound",
        "the entrypoint was not found; correct spec.entrypoint or the image",
        retry=False,
    ),
}


def judge(driver: Driver, log: str, *, stop_requested: bool) -> Verdict:
    """The verdict on a driver that ended with anything but success.

    `log` is the tail of its log: entrypoints of ours end it with an `error:` line and a
    `remedy:` line, which say more than the exit code.
    """
    if stop_requested:
        return Verdict(Outcome.STOPPED, "Stopped", "stopped on request")
    code = driver.exit_code
    if driver.state == "STOPPED":
        # Only somebody with access to the dashboard can have done it.
        return Verdict(
            Outcome.PREEMPTED, "StoppedFromOutside", "the Ray job was stopped on the dashboard"
        )
    if code == ExitCode.STOPPED:
        return Verdict(Outcome.PREEMPTED, "Preempted", "the training stopped at a checkpoint")
    if driver.error_type == "RUNTIME_ENV_SETUP_FAILURE":
        return _user("RuntimeEnvError", f"spec.runtimeEnv failed: {_first_line(driver.message)}")
    if driver.error_type != "JOB_ENTRYPOINT_COMMAND_ERROR" and any(
        sign in driver.message for sign in ("runtime_env[", "parse_and_validate")
    ):
        # Ray finds some errors in it only when it starts the driver's supervisor.
        said = _first_line(driver.message)
        return _user("RuntimeEnvError", f"spec.runtimeEnv is refused by Ray: {said}", retry=False)
    if driver.error_type not in ("", "JOB_ENTRYPOINT_COMMAND_ERROR"):
        return _infrastructure("RayJobFailed", _first_line(driver.message) or driver.error_type)
    if code is None:
        return _infrastructure("DriverLost", _first_line(driver.message) or "the driver was lost")
    if code in (137, -9, 143, -15):
        return _infrastructure(
            "DriverKilled",
            "the driver was killed by a signal; when the head ran out of memory, raise head.memory",
        )
    known = _BY_CODE.get(ExitCode(code)) if code in set(ExitCode) else None
    verdict = known or _user("ExitCode", f"the entrypoint ended with exit code {code}")
    said = _said(log)
    if not said:
        return verdict
    return Verdict(verdict.outcome, verdict.reason, said, verdict.retry, verdict.new_cluster)


def _said(log: str) -> str:
    found = {}
    for line in log.splitlines()[-20:]:
        for word in ("error", "remedy"):
            if line.startswith(f"{word}: "):
                found[word] = line.removeprefix(f"{word}: ").strip()
    return "; ".join(found[w] for w in ("error", "remedy") if w in found)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:500] if text.strip() else ""
