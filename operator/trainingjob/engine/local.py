"""Running one job on this machine: its state in a directory, and the loop that brings it forward.

<runs>/<name>/job.json      the job, its status and what this module adds; written at once
<runs>/<name>/config.json   what the entrypoint reads
<runs>/<name>/token         the token of the local Ray
<runs>/<name>/logs/         the drivers' logs
<runs>/.<name>.lock         held by the command that runs the job
"""

import asyncio
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import ValidationError

from trainingjob.api.job import TrainingJob
from trainingjob.api.status import Phase, TrainingJobStatus, rfc3339
from trainingjob.backends.local import LocalBackend, LocalError
from trainingjob.engine.reconciler import Reconciler, utc_now
from trainingjob.planning import actions as act
from trainingjob.planning import local, names
from trainingjob.planning.local import Host

Key = tuple[str, str]

LOOK_SECONDS, QUICK_LOOK_SECONDS = 1.0, 0.3
"""How often a job that runs is looked at, and one that gets there or has just got there."""
YOUNG_SECONDS = 15
"""Age of an attempt that is looked at more often."""
LOG_SECONDS = 0.15
"""How often the driver's log is read."""

_RAYS_OWN = re.compile(r"job_manager\.py:\d+ -- Runtime env is|^Running entrypoint for job ")


class Busy(Exception):
    """Another command runs the job."""


class BadState(Exception):
    """What an earlier run left cannot be used. The message says what to do."""


class RunDirectory:
    """The directory of one job, owned by this process from `take` to `release`."""

    def __init__(self, runs: Path, name: str) -> None:
        self.runs, self.name = runs.absolute(), name
        self.path = self.runs / name
        self._lock: int | None = None

    @property
    def lock(self) -> int:
        """The descriptor that holds the lock: whoever inherits it holds it too."""
        assert self._lock is not None
        return self._lock

    def take(self, patience: float = 20.0) -> None:
        """Takes the job for this process.

        Raises:
            Busy: another process runs it.
        """
        self.runs.mkdir(parents=True, exist_ok=True)
        if not (ignore := self.runs / ".gitignore").exists():
            ignore.write_text("*\n")
        self._lock = os.open(self.runs / f".{self.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                owner = self._owner()
                # Without its command only the clean-up after it still holds the lock.
                if (owner and _alive(owner)) or time.monotonic() > deadline:
                    who = f"process {owner}" if owner else "another process"
                    raise Busy(
                        f"job {self.name} is being run by {who} in {self.path}: wait for its end, "
                        "or stop it with Ctrl-C; another --runs-dir is independent of it"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.path.mkdir(exist_ok=True)

    def _owner(self) -> int | None:
        text = os.pread(self.lock, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None

    def release(self) -> None:
        """Lets the job go."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def set_aside(self) -> Path | None:
        """Moves what earlier runs left out of the way; returns where it is."""
        if not any(self.path.iterdir()):
            return None
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = self.runs / f"{self.name}.{stamp}"
        count = 1
        while aside.exists():
            count += 1
            aside = self.runs / f"{self.name}.{stamp}-{count}"
        self.path.rename(aside)
        self.path.mkdir()
        return aside

    def token(self) -> str:
        """The token of the local Ray, for this user's eyes only."""
        path = self.path / "token"
        with suppress(OSError):
            if len(found := path.read_text().strip()) >= 32:
                return found
        made = secrets.token_hex(32)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(made)
        return made


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class LocalJobStore:
    """See `trainingjob.engine.store.JobStore`: one job, in `job.json`."""

    def __init__(
        self,
        directory: Path,
        job: TrainingJob,
        *,
        announce: Callable[[act.Announce], None] = lambda event: None,
    ) -> None:
        self._file, self._announce = directory / "job.json", announce
        self._manifest = job.dump()
        self._manifest.pop("status", None)
        self.temporary: Path | None = None
        self.first_validation_loss: float | None = None
        self.spec_changed = False
        self.job = self._adopt(job)

    def _adopt(self, job: TrainingJob) -> TrainingJob:
        """The job with the identity and the status that an earlier run left, if any."""
        stored = self._stored()
        if stored is None:
            return _with_metadata(job, uid=str(uuid.uuid4()), generation=1)
        try:
            meta, own = stored["metadata"], stored["local"]
            status = TrainingJobStatus.model_validate(stored.get("status") or {})
            saved = datetime.fromisoformat(own["saved"].replace("Z", "+00:00"))
            self.first_validation_loss = own.get("firstValidationLoss")
            temporary = own.get("rayDirectory")
            self.spec_changed = stored["spec"] != self._manifest["spec"]
            job = _with_metadata(
                job, uid=str(meta["uid"]), generation=int(meta["generation"]) + self.spec_changed
            )
        except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
            raise BadState(self._unusable(error)) from None
        # A command that was killed together with its guard could not remove it.
        if temporary and Path(temporary).name.startswith("tj-"):
            shutil.rmtree(temporary, ignore_errors=True)
        if status.phase is not Phase.SUCCEEDED:
            status = local.continued(status, saved, utc_now())
        return job.with_status(status)

    def _stored(self) -> Any:
        try:
            return json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BadState(self._unusable(error)) from None

    def _unusable(self, error: Exception) -> str:
        return (
            f"{self._file} of an earlier run cannot be read ({type(error).__name__}): start anew "
            "with --fresh, which moves it aside"
        )

    def localise(self, job: TrainingJob) -> None:
        """Takes the spec that this machine can run; `job.json` keeps the one in the file."""
        self.job = self.job.model_copy(update={"spec": job.spec})
        self.save()

    def suspend(self) -> None:
        """As `kubectl patch` of spec.suspend does on a cluster, but for this run only."""
        self.job = self.job.model_copy(
            update={"spec": self.job.spec.model_copy(update={"suspend": True})}
        )

    async def read(self, key: Key) -> TrainingJob | None:
        """See `JobStore`."""
        return self.job

    async def write_status(self, job: TrainingJob) -> TrainingJob:
        """See `JobStore`."""
        self.job = self.job.with_status(job.status)
        training = job.status.training
        if training and training.validation_loss is not None and self.first_validation_loss is None:
            self.first_validation_loss = training.validation_loss
        self.save()
        return self.job

    def save(self) -> None:
        """Writes the file: it is the old one or the new one at any moment."""
        meta = self.job.metadata
        content = {
            **self._manifest,
            "metadata": {
                **self._manifest["metadata"],
                "uid": meta.uid,
                "generation": meta.generation,
            },
            "status": self.job.status.dump(),
            "local": {
                "saved": rfc3339(utc_now()),
                "rayDirectory": str(self.temporary) if self.temporary else None,
                "firstValidationLoss": self.first_validation_loss,
            },
        }
        temporary = self._file.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)

    async def execute(self, job: TrainingJob, action: act.Action) -> None:
        """See `JobStore`."""
        match action:
            case act.Announce():
                self._announce(action)
            case act.AddFinalizer():
                self.job = _with_metadata(self.job, finalizers=[names.FINALIZER])
            case act.RemoveFinalizer():
                self.job = _with_metadata(self.job, finalizers=[])
            case act.DeleteJob():
                pass
            case _:
                raise AssertionError(f"not an action on jobs: {action}")


def _with_metadata(job: TrainingJob, **fields: Any) -> TrainingJob:
    return job.model_copy(update={"metadata": job.metadata.model_copy(update=fields)})


class LogFollower:
    """Shows the lines of the drivers' logs as they are written, each once.

    `known` is a submission whose log an earlier run has shown.
    """

    def __init__(
        self,
        locate: Callable[[str], Path],
        show: Callable[[str], None],
        known: str | None = None,
    ) -> None:
        self._locate, self._show, self._known = locate, show, known
        self._submission: str | None = None
        self._file: Any = None
        self._rest = b""

    def pump(self, submission: str | None) -> None:
        """Shows what is new in the log of `submission`, after the rest of the one before."""
        if submission != self._submission and submission != self._known:
            self.finish()
            self._submission = submission
        self._read()

    def finish(self) -> None:
        """Shows the rest, a last line without an end too."""
        self._read()
        if self._rest:
            self._emit(self._rest)
        if self._file:
            self._file.close()
        self._file, self._rest, self._submission = None, b"", None

    def _read(self) -> None:
        if self._submission is None:
            return
        if self._file is None:
            try:
                self._file = open(self._locate(self._submission), "rb")  # noqa: SIM115
            except OSError:
                return
        while data := self._file.read(64 * 1024):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._emit(line)

    def _emit(self, line: bytes) -> None:
        # Progress bars overwrite their line: what they showed last is kept.
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not _RAYS_OWN.search(text):
            self._show(text)


class Run:
    """One job, run to its end or to its suspension."""

    def __init__(
        self,
        job: TrainingJob,
        directory: RunDirectory,
        store: LocalJobStore,
        host: Host,
        guard: Sequence[str],
        *,
        on_status: Callable[[TrainingJobStatus], None],
        on_log: Callable[[str], None],
    ) -> None:
        self._job, self._directory, self.store, self._host = job, directory, store, host
        self._guard, self._on_status, self._on_log = guard, on_status, on_log
        self._look = asyncio.Event()

    def suspend(self) -> None:
        """Stops the job at a checkpoint; `run` returns then."""
        self.store.suspend()
        self._look.set()

    async def run(self) -> TrainingJobStatus:
        """The status at the end. Nothing that this started runs any more then.

        Raises:
            LocalError: this machine cannot run the job.
        """
        self.store.localise(self._job)
        async with aiohttp.ClientSession() as session:
            backend = LocalBackend(
                session,
                self._directory.path,
                self._host,
                self._directory.token(),
                self._guard,
                held=[self._directory.lock],
            )
            known = self.store.job.status.submission_id
            follower = LogFollower(backend.driver_log, self._on_log, known)
            reconciler = Reconciler(
                self.store, backend, local.catalogue(self._host), progress_seconds=0
            )
            reading = asyncio.create_task(self._follow(follower))
            try:
                return await self._until_end(reconciler, backend, reading)
            finally:
                reading.cancel()
                await backend.close()
                follower.pump(self.store.job.status.submission_id)
                follower.finish()
                self.store.temporary = None
                self.store.save()

    async def _follow(self, follower: LogFollower) -> None:
        while True:
            follower.pump(self.store.job.status.submission_id)
            await asyncio.sleep(LOG_SECONDS)

    async def _until_end(
        self, reconciler: Reconciler, backend: LocalBackend, reading: "asyncio.Task[None]"
    ) -> TrainingJobStatus:
        while True:
            self._look.clear()
            again = await reconciler.reconcile(self.store.job.key)
            if self.store.temporary != backend.temporary:
                self.store.temporary = backend.temporary
                self.store.save()
            status = self.store.job.status
            self._on_status(status)
            if status.phase.final or status.phase is Phase.SUSPENDED:
                return status
            stalled = status.condition("Stalled")
            if stalled and status.cluster is None:
                raise LocalError(stalled.message)
            if reading.done():
                reading.result()
            limit = _interval(status)
            wait = limit if again is None else min(again, limit)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), max(wait, 0.02))


def _interval(status: TrainingJobStatus) -> float:
    last = status.attempts[-1] if status.attempts else None
    if status.phase is not Phase.RUNNING or last is None or status.stop_requested_time:
        return QUICK_LOOK_SECONDS
    young = (utc_now() - last.start_time).total_seconds() < YOUNG_SECONDS
    return QUICK_LOOK_SECONDS if young else LOOK_SECONDS
