"""`trainingjob run`: a job on this machine, from its file to its checkpoint."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from trainingjob.api.job import TrainingJob
from trainingjob.api.status import Phase, TrainingJobStatus
from trainingjob.backends.local import LocalError
from trainingjob.cli import guard, host, manifests
from trainingjob.cli.display import Display, display
from trainingjob.cli.errors import FAILURE, TIMED_OUT, CliError, invalid
from trainingjob.cli.text import clean, clean_block, duration, number
from trainingjob.engine.local import BadState, Busy, LocalJobStore, Run, RunDirectory
from trainingjob.planning import local
from trainingjob.planning.unfit import Unfit

_LOG_LINES = 15


def run(
    file: Path,
    *,
    name: str | None,
    runs: Path,
    fresh: bool,
    logs: bool,
    timeout: float | None,
    verbose: bool,
) -> int:
    """Runs the job in `file`; returns the exit code.

    Raises:
        CliError: it cannot be run.
    """
    _, job = manifests.one(file, name)
    machine = host.detect()
    try:
        local_job, notices = local.localise(job, machine)
    except Unfit as error:
        raise invalid(f"{file}: {error}") from None
    if verbose:
        notices.append(f"spec.image ({job.spec.image}) is not used: {sys.executable} is")
    directory = RunDirectory(runs, job.metadata.name)
    try:
        directory.take()
    except Busy as error:
        raise CliError(str(error)) from None
    except OSError as error:
        raise CliError(f"{runs} cannot be used for runs: {error.strerror}") from None
    try:
        if fresh and (aside := directory.set_aside()):
            print(f"what was in {directory.path} is now in {aside}", flush=True)
        store = LocalJobStore(directory.path, job)
        if store.job.status.phase is Phase.SUCCEEDED:
            _tell_done(store, directory, local_job)
            return 0
        for notice in notices:
            print(f"note: {clean(notice)}", flush=True)
        return asyncio.run(_Session(local_job, directory, store, machine, logs, timeout).run())
    except BadState as error:
        raise CliError(str(error)) from None
    except LocalError as error:
        raise CliError(clean_block(str(error))) from None
    finally:
        directory.release()


class _Session:
    """One command: a run, its display and the signals that end it."""

    def __init__(
        self,
        job: TrainingJob,
        directory: RunDirectory,
        store: LocalJobStore,
        machine: local.Host,
        logs: bool,
        timeout: float | None,
    ) -> None:
        self._job, self._directory, self._store, self._machine = job, directory, store, machine
        self._logs, self._timeout = logs, timeout
        self._ended_by: int | None = None
        self._forced = False
        self._display: Display

    async def run(self) -> int:
        """The exit code."""
        self._display = display(self._job.metadata.name)
        run = Run(
            self._job,
            self._directory,
            self._store,
            self._machine,
            [sys.executable, "-I", guard.__file__],
            on_status=self._display.status,
            on_log=self._display.log if self._logs else lambda line: None,
        )
        task = asyncio.create_task(run.run())
        loop = asyncio.get_running_loop()
        for number_ in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number_, self._stop, 128 + number_, run, task)
        timer = None
        if self._timeout is not None:
            timer = loop.call_later(self._timeout, self._stop, TIMED_OUT, run, task)
        try:
            status = await task
        except asyncio.CancelledError:
            if not self._forced:
                raise
            self._display.close()
            print("stopped at once; run the same command again to go on from the last checkpoint")
            return self._ended_by or FAILURE
        finally:
            if timer:
                timer.cancel()
            self._display.close()
        return self._conclude(status)

    def _stop(self, code: int, run: Run, task: "asyncio.Task[TrainingJobStatus]") -> None:
        if self._ended_by is None:
            self._ended_by = code
            why = "out of time: " if code == TIMED_OUT else ""
            again = "; once more stops at once" if code == 128 + signal.SIGINT else ""
            self._display.note(f"{why}stopping at a checkpoint{again}")
            run.suspend()
        elif code != TIMED_OUT and not self._forced:
            self._forced = True
            task.cancel()

    def _conclude(self, status: TrainingJobStatus) -> int:
        took = duration(status.active_seconds)
        if status.phase is Phase.SUCCEEDED:
            told = [t for t in (_losses(self._store), _checkpoint(self._directory, self._job)) if t]
            print(f"Succeeded in {took}" + (f": {'; '.join(told)}" if told else ""), flush=True)
            return 0
        if status.phase is Phase.SUSPENDED:
            print("Suspended: run the same command again to go on", flush=True)
            return self._ended_by or FAILURE
        last = status.attempts[-1] if status.attempts else None
        stalled = status.condition("Stalled")
        reason = f"{stalled.reason}: " if stalled else ""
        print(f"Failed after {took}: {reason}{clean(status.message)}", flush=True)
        if last and last.log and not self._logs:
            lines = clean_block(last.log).splitlines()[-_LOG_LINES:]
            print("\n".join(f"  | {line}" for line in lines), flush=True)
        logs = self._directory.path / "logs"
        if last and logs.is_dir():
            print(f"logs: {os.path.relpath(logs)}", flush=True)
        return FAILURE


def _losses(store: LocalJobStore) -> str:
    training = store.job.status.training
    if training is None or training.validation_loss is None:
        if training is None or training.loss is None:
            return ""
        return f"loss {number(training.loss)}"
    first, last = store.first_validation_loss, training.validation_loss
    before = f"{number(first)} → " if first is not None and first != last else ""
    return f"validation loss {before}{number(last)}"


def _checkpoint(directory: RunDirectory, job: TrainingJob) -> str:
    """Where the newest checkpoint is, as far as that can be told."""
    place = local.storage(job, directory.path)
    if "://" in place and not place.startswith("file://"):
        return f"checkpoint: {place}"
    root = Path(place.removeprefix("file://"))
    found = sorted((root / job.metadata.name).glob("checkpoint_*/"))
    if found:
        return f"checkpoint: {os.path.relpath(found[-1])}"
    return f"checkpoint: {os.path.relpath(root)}" if root.is_dir() and any(root.iterdir()) else ""


def _tell_done(store: LocalJobStore, directory: RunDirectory, job: TrainingJob) -> None:
    status = store.job.status
    when = f" at {status.completion_time:%Y-%m-%d %H:%M:%S} UTC" if status.completion_time else ""
    told = [t for t in (_losses(store), _checkpoint(directory, job)) if t]
    print(f"{job.metadata.name} has succeeded already{when}" + "".join(f"; {t}" for t in told))
    changed = " with the changed spec" if store.spec_changed else ""
    print(f"Nothing is left to do; --fresh trains anew{changed}", flush=True)
