"""The driver: `python -m trainingjob_trainer`.

Checks everything that can be checked before a worker starts, then hands over to Ray Train and
waits. It retries nothing: the operator does, and counts.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from trainingjob_trainer import config as configuration
from trainingjob_trainer import contract, errors
from trainingjob_trainer.contract import ExitCode, Job

RAY_SETTINGS = {
    # How soon a dead worker is noticed, and how long a report of a checkpoint may block.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A week: how long to wait for workers is the operator's to decide.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "604800",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "1800",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Leave the working directory of the workers as it is.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Set before Ray is imported, unless the environment says otherwise."""


def main(arguments: list[str] | None = None) -> int:
    """Run the job that the environment describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainingjob_trainer", description=__doc__)
    parser.add_argument("--config", help="JSON or YAML file; default: $TRAININGJOB_CONFIG")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and end"
    )
    options = parser.parse_args(arguments)
    try:
        job, config = _settings(options.config)
        say(f"job {job.namespace}/{job.name}, attempt {job.attempt}, {job.num_workers} worker(s)")
        say(config.yaml().rstrip())
        return 0 if options.print_config else Driver(job, config).run()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        return _explain(errors.in_driver(error))


def say(*lines: str) -> None:
    """Print to the job's log at once."""
    for line in lines:
        print(line, flush=True)


def _explain(failure: errors.TrainingError) -> int:
    sys.stdout.flush()
    if failure.detail:
        print(failure.detail.rstrip(), file=sys.stderr)
    print(f"error: {failure.cause}", file=sys.stderr)
    print(f"remedy: {failure.remedy}", file=sys.stderr, flush=True)
    return int(failure.code)


def _settings(path: str | None) -> tuple[Job, configuration.Config]:
    try:
        job = contract.job()
    except ValueError as error:
        raise errors.configuration(str(error), "correct the environment of the driver") from None
    return job, configuration.load(path or job.config_path, job.num_workers)


class Driver:
    """One attempt at a job."""

    def __init__(self, job: Job, config: configuration.Config) -> None:
        self.job, self.config = job, config
        self.stop = threading.Event()
        self.steps = config.training.steps

    def run(self) -> int:
        """Preflight, then training; returns the exit code, raises what went wrong."""
        from trainingjob_trainer import data
        from trainingjob_trainer.storage import RunDirectory

        self._catch_signals()
        for patterns in (self.config.data.train, self.config.data.validation):
            data.files(patterns, self.config.data)
        self.run_directory = RunDirectory(self.job.storage, self.job.name)
        self.run_directory.preflight()
        if note := self.run_directory.claim(self.job):
            say(note)
        if self._already_done():
            return ExitCode.DONE
        if self.stop.is_set():
            return ExitCode.STOPPED
        return self._train()

    # --- training --------------------------------------------------------------------------------

    def _train(self) -> int:
        for key, value in RAY_SETTINGS.items():
            os.environ.setdefault(key, value)
        import ray

        ray.init(log_to_driver=self.config.debug.worker_logs, logging_level="warning")
        self._catch_signals()  # ray.init has set its own
        try:
            while True:
                try:
                    return self._fit()
                except errors.DamagedCheckpoint as error:
                    # It is set aside, so each turn has one checkpoint less to try.
                    say(f"{error.cause}; going on from an older one")
        finally:
            ray.shutdown()  # before the last lines: Ray's log must not come after them

    def _fit(self) -> int:
        from trainingjob_trainer import progress

        for note in self.run_directory.doctor():
            say(note)
        board = progress.start(self.job)
        trainer = self._trainer(board)
        ended: list[Any] = []

        def fit() -> None:
            try:
                ended.append(trainer.fit())
            except BaseException as error:
                ended.append(error)

        # In a thread, so that this one stays free for signals and for the workers' lines.
        thread = threading.Thread(target=fit, daemon=True)
        thread.start()
        training = False
        waited_from = time.monotonic()
        while thread.is_alive():
            thread.join(0.2)
            training = self._relay(board) or training
            if self.stop.is_set() and not training and thread.is_alive():
                say("stopped before the first step")
                return ExitCode.STOPPED
            if not training and time.monotonic() > waited_from + 30:
                waited_from = time.monotonic()
                self._say_what_is_missing()
        self._relay(board)
        result = ended[0]
        if isinstance(result, BaseException):
            raise errors.in_driver(result)
        return self._conclude(result.return_value or {})

    def _trainer(self, board: Any) -> Any:
        import ray.train

        # The base class of TorchTrainer, whose module imports torch here and in the controller:
        # that would put off the first step by 4 s (measured).
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from trainingjob_trainer import loop
        from trainingjob_trainer.backend import ProcessGroup

        _start_coordinator()
        job, config = self.job, self.config
        resources = {"CPU": job.cpus_per_worker, "GPU": job.gpus_per_worker}
        return DataParallelTrainer(
            loop.train,
            train_loop_config={"job": job, "config": config, "board": board},
            backend_config=ProcessGroup(config.training.communication_timeout_seconds),
            scaling_config=ray.train.ScalingConfig(
                num_workers=job.num_workers,
                use_gpu=job.gpus_per_worker > 0,
                resources_per_worker={k: v for k, v in resources.items() if v},
                placement_strategy=job.placement,
            ),
            run_config=ray.train.RunConfig(
                name=job.name,
                storage_path=job.storage,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.checkpoint.keep),
                failure_config=ray.train.FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=2
                ),
            ),
        )

    def _relay(self, board: Any) -> bool:
        """Print the workers' lines, pass on a stop; returns whether training has begun."""
        import ray

        try:
            lines, training = ray.get(board.poll.remote(self.stop.is_set()), timeout=10)
        except ray.exceptions.RayError:  # the board is late or restarts; training goes on
            return False
        say(*lines)
        return bool(training)

    def _say_what_is_missing(self) -> None:
        import ray

        have = ray.cluster_resources()
        want = {"CPU": self.job.cpus_per_worker, "GPU": float(self.job.gpus_per_worker)}
        parts = [
            f"{self.job.num_workers * amount:g} {kind} ({have.get(kind, 0):g} in the cluster)"
            for kind, amount in want.items()
            if amount
        ]
        say(f"waiting for workers: they need {' and '.join(parts)}")

    # --- the end ---------------------------------------------------------------------------------

    def _already_done(self) -> bool:
        whole = self.run_directory.checkpoints()
        done = self.run_directory.done()
        latest = max((m.step for m in whole.values()), default=0)
        if max(latest, done.step if done else 0) < self.steps:
            return False
        say(f"training is complete already: step {latest or self.steps} of {self.steps}")
        contract.report_progress(step=self.steps, total_steps=self.steps, urgent=True)
        return True

    def _conclude(self, outcome: dict[str, Any]) -> int:
        from trainingjob_trainer.storage import checkpoint_name

        why = {"stop": "as asked", "preempted": "a node is being taken away"}
        if outcome.get("reason") in why:
            say(
                f"stopped at step {outcome['step']} of {self.steps}: {why[outcome['reason']]}",
                f"checkpoint: {self.run_directory.url}/{checkpoint_name(outcome['step'])}",
            )
            return ExitCode.STOPPED
        done = self.run_directory.done()
        if done is None or done.step < self.steps or done.uid != self.job.uid:
            raise errors.infrastructure(
                f"the workers ended, but {self.run_directory.url}/DONE.json does not say that step "
                f"{self.steps} was reached",
                "run the job again: it resumes from the last checkpoint",
            )
        start, end = done.start_validation_loss, done.validation_loss
        if start and end is not None:
            say(f"validation loss {start:.3f} -> {end:.3f} ({end / start:.2f} of its start)")
        say(f"checkpoint: {self.run_directory.url}/{checkpoint_name(done.step)}")
        return ExitCode.DONE

    def _catch_signals(self) -> None:
        def on_signal(number: int, _frame: object) -> None:
            if self.stop.is_set() and number == signal.SIGINT:
                os._exit(ExitCode.STOPPED)  # a second Ctrl-C: at once
            self.stop.set()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)


def _start_coordinator() -> None:
    """Start early the actor that Ray Train's controller makes and waits for before its workers.

    It then comes up beside the controller instead of after it. A Ray without it is as good.
    """
    with contextlib.suppress(ImportError):
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator

        default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()


if __name__ == "__main__":
    sys.exit(main())
