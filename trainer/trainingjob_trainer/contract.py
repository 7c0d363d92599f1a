"""What the operator tells a training entrypoint, and what the entrypoint tells back.

Imports neither Ray nor torch, so any script can use it in a few lines::

    from trainingjob_trainer import contract

    job = contract.job()
    for step in range(1, 1001):
        if contract.stop_requested():
            sys.exit(contract.ExitCode.STOPPED)
        contract.report_progress(step=step, total_steps=1000, loss=train())

Call these in the driver process: SIGTERM reaches the driver only, and the progress file lies on its
node. `trainingjob_trainer.progress` carries both to Ray workers.
"""

import contextlib
import enum
import json
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

PROGRESS_FIELDS = {
    "step": "step",
    "total_steps": "totalSteps",
    "percent": "percent",
    "loss": "loss",
    "validation_loss": "validationLoss",
    "tokens_per_second": "tokensPerSecond",
    "eta_seconds": "etaSeconds",
    "checkpoint_step": "checkpointStep",
    "checkpoint_time": "checkpointTime",
    "gpu_utilization": "gpuUtilization",
    "resumed_from_step": "resumedFromStep",
    "started_at": "startedAt",
}
"""Keyword of `report_progress` -> key in the progress file and in `status.training`."""


class ExitCode(enum.IntEnum):
    """How an entrypoint ends; the operator picks the retry budget by it."""

    DONE = 0
    CONFIGURATION = 64
    DATA = 65
    STORAGE = 66
    USER_CODE = 70
    HOST_OUT_OF_MEMORY = 71
    CUDA_OUT_OF_MEMORY = 72
    COMMUNICATION = 73
    INFRASTRUCTURE = 74
    STOPPED = 75


@dataclass(frozen=True, slots=True)
class Job:
    """The job as the operator describes it; the defaults are those of a run by hand."""

    name: str = "trainingjob"
    namespace: str = "default"
    uid: str = ""
    attempt: int = 1
    num_workers: int = 1
    """Ray Train workers (ranks): one for each GPU, or one for each worker pod without GPUs."""
    gpus_per_worker: int = 0
    cpus_per_worker: float = 1.0
    placement: str = "PACK"
    storage: str = "trainingjob-runs"
    """Directory or URI, the same for every attempt."""
    config_path: str = ""
    """JSON or YAML file with `spec.config`; empty when there is none."""
    progress_path: str = ""
    """File that takes progress lines; empty when nobody reads them."""

    @property
    def run_directory(self) -> str:
        """Where checkpoints and markers lie: Ray Train's (storage_path, name)."""
        return f"{self.storage.rstrip('/')}/{self.name}"


def job(environment: Mapping[str, str] | None = None) -> Job:
    """Read the job from `TRAININGJOB_*` variables (default: `os.environ`).

    Raises ValueError where a variable does not hold what the contract says.
    """
    env = os.environ if environment is None else environment

    def integer(key: str, default: int, least: int) -> int:
        text = env.get(key, "") or str(default)
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ValueError(f"{key}={text!r} is not an integer of at least {least}")
        return int(text)

    default = Job()
    cpus = env.get("TRAININGJOB_CPUS_PER_WORKER", "") or str(default.cpus_per_worker)
    try:
        cpus_per_worker = float(cpus)
    except ValueError:
        cpus_per_worker = math.nan
    if not 0 <= cpus_per_worker < math.inf:
        raise ValueError(f"TRAININGJOB_CPUS_PER_WORKER={cpus!r} is not a number of CPUs")
    placement = env.get("TRAININGJOB_PLACEMENT", "") or default.placement
    if placement not in PLACEMENTS:
        raise ValueError(f"TRAININGJOB_PLACEMENT={placement!r} is none of {', '.join(PLACEMENTS)}")
    storage = env.get("TRAININGJOB_STORAGE", "") or default.storage
    if "://" not in storage:
        storage = os.path.abspath(storage)
    return Job(
        name=env.get("TRAININGJOB_NAME", "") or default.name,
        namespace=env.get("TRAININGJOB_NAMESPACE", "") or default.namespace,
        uid=env.get("TRAININGJOB_UID", ""),
        attempt=integer("TRAININGJOB_ATTEMPT", default.attempt, 1),
        num_workers=integer("TRAININGJOB_NUM_WORKERS", default.num_workers, 1),
        gpus_per_worker=integer("TRAININGJOB_GPUS_PER_WORKER", default.gpus_per_worker, 0),
        cpus_per_worker=cpus_per_worker,
        placement=placement,
        storage=storage,
        config_path=env.get("TRAININGJOB_CONFIG", ""),
        progress_path=env.get("TRAININGJOB_PROGRESS", ""),
    )


def now() -> str:
    """The time as RFC 3339 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ProgressFile:
    """Appends progress to a file, one JSON object a line, one line a second at most.

    A field stays until it is reported anew, so that the last line alone is the whole state.
    """

    def __init__(self, path: str, interval_seconds: float = 1.0) -> None:
        self._path = path
        self._interval = interval_seconds
        self._fields: dict[str, object] = {}
        self._written_at = -math.inf

    def report(self, *, urgent: bool = False, **fields: float | str | None) -> None:
        """Merge `fields` (keys of `PROGRESS_FIELDS`) and write when it is time or `urgent`.

        NaN and infinities become null, which JSON has; an unwritable file is not the training's
        trouble and is passed over. Raises TypeError on an unknown field.
        """
        for key, value in fields.items():
            if key not in PROGRESS_FIELDS:
                raise TypeError(f"unknown progress field {key!r}; known: {list(PROGRESS_FIELDS)}")
            finite = not isinstance(value, float) or math.isfinite(value)
            self._fields[PROGRESS_FIELDS[key]] = value if finite else None
            urgent = urgent or key in ("checkpoint_step", "checkpoint_time")
        step, total = self._fields.get("step"), self._fields.get("totalSteps")
        if isinstance(step, int) and isinstance(total, int) and total > 0:
            self._fields["percent"] = round(100 * step / total, 1)
            urgent = urgent or step == total
        clock = time.monotonic()
        if not self._path or (clock < self._written_at + self._interval and not urgent):
            return
        self._written_at = clock
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(self._fields, allow_nan=False) + "\n")


_file: ProgressFile | None = None
_stop = threading.Event()


def report_progress(*, urgent: bool = False, **fields: float | str | None) -> None:
    """Tell the operator how far training is; see `PROGRESS_FIELDS` for the fields.

    Cheap enough for every step. Checkpoints and the last step are written at once.
    """
    global _file
    if _file is None:
        _file = ProgressFile(os.environ.get("TRAININGJOB_PROGRESS", ""))
    _file.report(urgent=urgent, **fields)


def stop_requested() -> bool:
    """Whether the job was asked to stop: save a checkpoint, then exit with `ExitCode.STOPPED`.

    Catches SIGTERM from the first call on. Call it after `ray.init`, which sets a handler of its
    own, and from the main thread (Python allows handlers nowhere else).
    """
    # Each time: ray.init may have come in between. It costs a microsecond.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    return _stop.is_set()


def _on_sigterm(_signum: int, _frame: object) -> None:
    _stop.set()


def read_config(path: str) -> object:
    """The content of a JSON or YAML file, as plain Python values; an empty file is `{}`.

    Raises OSError when it cannot be read, ValueError when it cannot be parsed.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is neither JSON nor YAML: {error}") from error
