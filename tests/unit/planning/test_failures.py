import pytest

from trainingjob.api.status import Outcome
from trainingjob.planning.failures import judge
from trainingjob.planning.observed import Driver, DriverState

COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"
USER, INFRASTRUCTURE = Outcome.USER_FAILURE, Outcome.INFRASTRUCTURE_FAILURE


def failed(code: int | None, error_type: str = COMMAND, message: str = "") -> Driver:
    return Driver(DriverState.FAILED, code, error_type, message)


@pytest.mark.parametrize(
    ("driver", "outcome", "reason", "retry"),
    [
        (failed(1), USER, "ExitCode", True),
        (failed(64), USER, "ConfigurationError", False),
        (failed(65), USER, "DataError", False),
        (failed(66), INFRASTRUCTURE, "StorageError", True),
        (failed(70), USER, "TrainingError", True),
        (failed(71), USER, "HostOutOfMemory", True),
        (failed(72), USER, "CudaOutOfMemory", True),
        (failed(73), INFRASTRUCTURE, "CommunicationError", True),
        (failed(74), INFRASTRUCTURE, "InfrastructureError", True),
        (failed(75), Outcome.PREEMPTED, "Preempted", True),
        (failed(126), USER, "EntrypointNotExecutable", False),
        (failed(127), USER, "EntrypointNotFound", False),
        (failed(137), INFRASTRUCTURE, "DriverKilled", True),
        (failed(-9), INFRASTRUCTURE, "DriverKilled", True),
        (failed(None, "JOB_SUPERVISOR_ACTOR_DIED", "gone"), INFRASTRUCTURE, "RayJobFailed", True),
        (failed(None, "RUNTIME_ENV_SETUP_FAILURE", "no pip"), USER, "RuntimeEnvError", True),
        (
            failed(None, "JOB_SUPERVISOR_ACTOR_START_FAILURE", "runtime_env['pip'] must be a list"),
            USER,
            "RuntimeEnvError",
            False,
        ),
        (Driver(DriverState.STOPPED), Outcome.PREEMPTED, "StoppedFromOutside", True),
    ],
)
def test_exit_codes_and_causes_are_charged_to_the_right_budget(
    driver: Driver, outcome: Outcome, reason: str, retry: bool
) -> None:
    verdict = judge(driver, "", stop_requested=False)
    assert (verdict.outcome, verdict.reason, verdict.retry) == (outcome, reason, retry)
    assert verdict.message


def test_a_driver_that_was_asked_to_stop_is_charged_to_nothing() -> None:
    for driver in (failed(75), failed(1), Driver(DriverState.STOPPED)):
        assert judge(driver, "", stop_requested=True).outcome is Outcome.STOPPED


def test_the_entrypoints_own_words_win_over_the_exit_code() -> None:
    log = "step 1\nerror: unknown key `hidenSize`\nremedy: write `hiddenSize`\n"
    assert judge(failed(64), log, stop_requested=False).message == (
        "unknown key `hidenSize`; write `hiddenSize`"
    )
