"""From the workers to the operator: a small actor on the driver's node.

Rank 0 sends its progress; the board sets Ray's metrics, writes the progress file and answers
whether a stop was requested. `ray.train.report` cannot do this: it takes up to its polling interval
for each call. Another Ray script uses it in a few lines::

    board = progress.start(contract.job())              # in the driver
    TorchTrainer(loop, train_loop_config={"board": board}, ...)

    reporter = progress.Reporter(config["board"])       # in rank 0
    stop = reporter.tick(step=step, loss=loss)          # True: save a checkpoint and return
"""

import contextlib
import time
from typing import Any

from trainingjob_trainer import contract

GAUGES = {
    "step": ("trainingjob_step", "Steps done."),
    "loss": ("trainingjob_loss", "Training loss, nats per token."),
    "validation_loss": ("trainingjob_validation_loss", "Validation loss, nats per token."),
    "tokens_per_second": ("trainingjob_tokens_per_second", "Training tokens per second."),
    "eta_seconds": ("trainingjob_eta_seconds", "Seconds until the last step."),
    "checkpoint_step": ("trainingjob_checkpoint_step", "Step of the latest checkpoint."),
}
"""Progress field -> name and description of its Ray metric (tags: job, namespace)."""


class Board:
    """The actor's class; `start` makes one."""

    def __init__(self, job: contract.Job) -> None:
        from ray.util.metrics import Gauge

        self._file = contract.ProgressFile(job.progress_path)
        self._gauges = {}
        for field, (name, description) in GAUGES.items():
            gauge = Gauge(name, description=description, tag_keys=("job", "namespace"))
            gauge.set_default_tags({"job": job.name, "namespace": job.namespace})
            self._gauges[field] = gauge
        self._lines: list[str] = []
        self._stop = False
        self._training = False

    def update(self, fields: dict[str, Any], lines: list[str]) -> bool:
        """Take in progress; returns whether the job was asked to stop."""
        if not self._training:
            self._training = True
            fields = {"started_at": contract.now(), **fields}
        self._lines += lines
        for field, gauge in self._gauges.items():
            value = fields.get(field)
            if isinstance(value, int | float):
                gauge.set(value)
        self._file.report(**fields)
        return self._stop

    def poll(self, stop: bool) -> tuple[list[str], bool]:
        """For the driver: pass on a stop request; lines to print, whether rank 0 is in its loop."""
        self._stop = self._stop or stop
        lines, self._lines = self._lines, []
        return lines, self._training


def start(job: contract.Job) -> Any:
    """Start a board on this node and return its actor handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote(job)
    )


class Reporter:
    """Rank 0's end: sends at most twice a second and never waits."""

    def __init__(self, board: Any, interval_seconds: float = 0.5) -> None:
        self._board = board
        self._interval = interval_seconds
        self._sent_at = 0.0
        self._answer: Any = None
        self._fields: dict[str, Any] = {}
        self._stop = False

    def tick(self, *lines: str, urgent: bool = False, **fields: float | str | None) -> bool:
        """Send what changed when it is time; returns whether the job was asked to stop.

        `lines` are printed by the driver. Losing the board loses reports, not training.
        """
        import ray

        self._fields.update(fields)
        if self._answer is not None:
            ready, _ = ray.wait([self._answer], timeout=0)
            if ready:
                with contextlib.suppress(ray.exceptions.RayError):
                    self._stop = ray.get(ready[0]) or self._stop
                self._answer = None
        now = time.monotonic()
        due = now >= self._sent_at + self._interval and self._answer is None
        if due or lines or urgent:
            self._sent_at = now
            self._answer = self._board.update.remote(self._fields, list(lines))
            self._fields = {}
        return self._stop

    def flush(self, timeout_seconds: float = 10.0) -> None:
        """Send the rest and wait for it to arrive."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._board.update.remote(self._fields, []), timeout=timeout_seconds)
