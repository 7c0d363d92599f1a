"""When to save and when to stop: rank 0 watches, all ranks agree after each step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from trainingjob_trainer.progress import Reporter


@dataclass(frozen=True, slots=True)
class Orders:
    """What all ranks do after a step."""

    written: bool = False
    """Every rank's part of the save in flight is on the storage."""
    save: bool = False
    stop: bool = False


class Watch:
    """Rank 0's eyes on the clock, on stop requests and on preemption notices."""

    def __init__(self, every_seconds: float | None, reporter: Reporter | None) -> None:
        self._every = every_seconds
        self._reporter = reporter
        self._looked = self._saved = self._stepped = time.monotonic()
        self._deadline: float | None = None
        """When to have stopped by, on the monotonic clock."""
        self._notice_pending = False
        self.reason = "stop"
        """Why `stop` was ordered: "stop" (asked to) or "preempted"."""

    def wishes(self) -> tuple[bool, bool, bool]:
        """(save, stop, look for a preemption notice), called once a step on rank 0."""
        now = time.monotonic()
        step_seconds, self._stepped = now - self._stepped, now
        look = now >= self._looked + 1
        self._looked = now if look else self._looked
        stop = self._reporter is not None and self._reporter.tick()
        if not stop and self._deadline is not None and now + step_seconds >= self._deadline:
            stop, self.reason = True, "preempted"
        due = self._every is not None and now >= self._saved + self._every
        save = due or self._notice_pending
        self._notice_pending = False
        return save, stop, look

    def notice(self, info: Any, save_seconds: float) -> None:
        """Take in Ray Train's preemption notice: save at once, go on, stop before the deadline.

        Ray by itself trains on until the deadline and then loses what came after the save.
        `save_seconds` is how long a save takes.
        """
        if info is None or self._deadline is not None:
            return
        # No deadline given: what Kubernetes grants by default.
        left = 30.0 if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
        self._deadline = time.monotonic() + left - max(2 * save_seconds, 3.0) - 2.0
        self._notice_pending = True
        if self._reporter:
            nodes = len(info.preempted_node_to_ranks)
            self._reporter.tick(f"{nodes} node(s) will be taken away in {left:.0f} s: saving")

    def saving(self) -> None:
        """A save has started."""
        self._saved = time.monotonic()


def agree(
    watch: Watch, written: bool, save_seconds: float, rank: int, world: int, group: Any
) -> Orders:
    """All ranks' decision after a step: one all-reduce of four integers over `group` (gloo).

    `written` says whether this rank's part of the save in flight is on the storage.
    """
    import ray.train
    import torch
    import torch.distributed as dist

    wishes = watch.wishes() if rank == 0 else (False, False, False)
    flags = torch.tensor([written, *wishes], dtype=torch.int32)
    dist.all_reduce(flags, group=group)
    parts, save, stop, look = flags.tolist()
    if look:  # a collective of Ray Train: all ranks ask or none
        watch.notice(ray.train.get_preemption_info(), save_seconds)
    return Orders(parts == world, bool(save), bool(stop))
