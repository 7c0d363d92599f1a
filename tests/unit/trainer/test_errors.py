"""Which exception means what."""

import errno
import pickle
from typing import Any

import pytest

from trainingjob_trainer import errors
from trainingjob_trainer.contract import ExitCode
from trainingjob_trainer.errors import TrainingError, in_driver, in_worker


def make(name: str, *bases: type[BaseException]) -> Any:
    """An exception class by its name, as torch and Ray name theirs."""
    return type(name, bases or (Exception,), {})


DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 8cba58052ff840cf0c9a6df908000000
\tpid: 22240
\tnamespace: 4a958fe1
\tip: 192.0.2.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer"""


def dead(text: str = DEATH, preempted: bool = False) -> Exception:
    class ActorDiedError(make("RayActorError", make("RayError"))):  # type: ignore[misc]
        pass

    actor = ActorDiedError(text)
    actor.preempted = preempted
    wrapper = make("WorkerHealthCheckFailedError", make("RayTrainError"))("A worker died.")
    wrapper.health_check_failure = actor
    assert isinstance(wrapper, Exception)
    return wrapper


def group(failures: dict[int, BaseException]) -> Exception:
    error = make("WorkerGroupError", make("TrainingFailedError", make("RayTrainError")))("failed")
    error.worker_failures = failures
    assert isinstance(error, Exception)
    return error


def controller(failure: BaseException) -> Exception:
    error = make("ControllerError", make("TrainingFailedError", make("RayTrainError")))("failed")
    error.controller_failure = failure
    assert isinstance(error, Exception)
    return error


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [192.0.2.7]:1")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad shape"), ExitCode.USER_CODE),
        (KeyError("x"), ExitCode.USER_CODE),
        (SystemExit(3), ExitCode.USER_CODE),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ExitCode.USER_CODE),
        (
            make("OutOfMemoryError", RuntimeError)("CUDA out of memory."),
            ExitCode.CUDA_OUT_OF_MEMORY,
        ),
        (MemoryError(), ExitCode.HOST_OUT_OF_MEMORY),
        (CLOSED, ExitCode.COMMUNICATION),
        (make("DistBackendError", RuntimeError)("NCCL error in x.cpp"), ExitCode.COMMUNICATION),
        (make("DistNetworkError", RuntimeError)("connection refused"), ExitCode.COMMUNICATION),
        (ConnectionResetError("reset"), ExitCode.COMMUNICATION),
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.STORAGE),
        (OSError(errno.EROFS, "Read-only file system"), ExitCode.STORAGE),
        (FileNotFoundError(errno.ENOENT, "vocab.txt"), ExitCode.USER_CODE),
    ],
)
def test_in_a_worker(error: BaseException, code: ExitCode):
    failure = in_worker(error, "rank 1 on host-b")
    assert failure.code is code
    assert failure.cause.startswith("rank 1 on host-b: ")
    assert failure.remedy
    assert "\n" not in failure.cause + failure.remedy
    assert type(error).__name__ in failure.detail


def test_torch_really_calls_them_so():
    """The names are matched as text: torch need not be importable where they are read."""
    import torch
    import torch.distributed as dist

    error = in_worker(torch.OutOfMemoryError("CUDA out of memory"), "rank 0")
    assert error.code is ExitCode.CUDA_OUT_OF_MEMORY
    assert in_worker(dist.DistBackendError("x: nccl"), "rank 0").code is ExitCode.COMMUNICATION


def checkpoint_exception(inner: BaseException) -> BaseException:
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException("save", {0: (inner, None)})  # type: ignore[dict-item]


def test_torch_s_checkpoint_exception_is_looked_into():
    full = checkpoint_exception(OSError(errno.ENOSPC, "No space left on device"))
    assert in_worker(full, "rank 0").code is ExitCode.STORAGE
    assert "disk is full" in in_worker(full, "rank 0").cause
    cut = checkpoint_exception(RuntimeError("unexpected pos 64 vs 0"))
    assert "unexpected pos 64 vs 0" in in_worker(cut, "rank 0").cause
    assert in_worker(cut, "rank 0").code is ExitCode.STORAGE
    assert in_worker(checkpoint_exception(CLOSED), "rank 0").code is ExitCode.COMMUNICATION


def test_known_failures_cross_process_boundaries():
    for error in (
        errors.data("no files", "give some"),
        errors.DamagedCheckpoint("cut"),
        in_worker(ValueError("x"), "rank 0"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (copy.code, copy.cause, copy.remedy, copy.detail) == (
            error.code, error.cause, error.remedy, error.detail,
        )  # fmt: skip
        assert in_worker(copy, "elsewhere") is copy
        assert in_driver(copy) is copy


def test_a_death_explains_the_other_ranks():
    lost = in_worker(CLOSED, "rank 0 on host-a")
    failure = in_driver(group({0: lost, 1: dead()}))
    assert failure.code is ExitCode.INFRASTRUCTURE
    assert failure.cause == (
        "rank 1 was lost: process 22240 on 192.0.2.7: "
        "Worker unexpectedly exits with a connection error code 2. End of file."
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`."),
        ("The actor died because its node has died. Node Id: ab", "its node has died. Node Id: ab"),
        ("Something new", "Something new"),
        ("", "no message"),
    ],
)
def test_whatever_ray_says_of_a_death_is_passed_on(text: str, said: str):
    assert in_driver(group({0: dead(text)})).cause == f"rank 0 was lost: {said}"


def test_a_preempted_node_is_said():
    assert "its node was taken away" in in_driver(group({0: dead(preempted=True)})).cause


def test_an_exception_of_the_user_explains_the_other_ranks():
    lost = in_worker(CLOSED, "rank 0 on host-a")
    bug = in_worker(ValueError("bad shape"), "rank 1 on host-b")
    failure = in_driver(group({0: lost, 1: bug}))
    assert failure.code is ExitCode.USER_CODE
    assert failure.cause == "rank 1 on host-b: ValueError: bad shape"
    assert "ValueError: bad shape" in failure.detail


def test_communication_remains_when_nothing_explains_it():
    lost = in_worker(CLOSED, "rank 0")
    assert in_driver(group({0: lost, 1: lost})).code is ExitCode.COMMUNICATION


def test_ray_s_memory_monitor_is_the_host_s_memory():
    killed = dead()
    killed.health_check_failure = make("OutOfMemoryError")(  # type: ignore[attr-defined]
        "Task was killed due to the node running low on memory."
    )
    failure = in_driver(group({0: in_worker(CLOSED, "rank 0"), 1: killed}))
    assert failure.code is ExitCode.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (make("CheckpointManagerInitializationError")("cut"), ExitCode.STORAGE),
        (OSError(errno.ENOSPC, "full"), ExitCode.STORAGE),
        (make("WorkerGroupStartupFailedError")("a worker died"), ExitCode.INFRASTRUCTURE),
        (make("DistNetworkError", RuntimeError)("connection refused"), ExitCode.COMMUNICATION),
        (
            make("RayTaskError", make("RayError"))("No module named 'trainingjob_trainer'"),
            ExitCode.CONFIGURATION,
        ),
    ],
)
def test_failures_of_the_controller(error: BaseException, code: ExitCode):
    assert in_driver(controller(error)).code is code


def test_anything_else_in_the_driver():
    assert in_driver(make("ActorDiedError", make("RayError"))("x")).code is ExitCode.INFRASTRUCTURE
    assert in_driver(ConnectionError("no cluster")).code is ExitCode.INFRASTRUCTURE
    assert in_driver(AssertionError()).code is ExitCode.USER_CODE
    assert isinstance(in_driver(KeyboardInterrupt()), TrainingError)
