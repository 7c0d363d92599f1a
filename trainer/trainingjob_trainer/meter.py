"""Loss, speed and GPU use between two reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Meter:
    """Sums since the last `reset`. The methods with a `group` are collectives."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self.loss = torch.zeros((), device=device)
        """Sum of this rank's token losses in nats; stays on the device until asked for."""
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.loss.zero_()
        self.tokens = self.steps = 0
        self._started, self._paused = time.monotonic(), 0.0

    def count(self, tokens: int) -> None:
        """One step over `tokens` valid tokens of all ranks is done."""
        self.tokens += tokens
        self.steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training (validation, saving)."""
        self._paused += seconds

    def mean_loss(self, group: Any) -> float:
        """Nats per token over all ranks."""
        import torch.distributed as dist

        total = self.loss.double().cpu()
        dist.all_reduce(total, group=group)
        return float(total) / self.tokens

    def tokens_per_second(self) -> float:
        """Over all ranks, pauses left out."""
        return self.tokens / max(1e-9, time.monotonic() - self._started - self._paused)

    def seconds_per_step(self) -> float:
        """Pauses included: it is for the time that is left."""
        return (time.monotonic() - self._started) / max(1, self.steps)

    def gpu_utilization(self, group: Any) -> float | None:
        """Mean over the ranks, 0 to 1; None without a GPU or without NVIDIA's library."""
        import torch
        import torch.distributed as dist

        if self._device.type != "cuda":
            return None
        try:
            busy = torch.cuda.utilization(self._device) / 100
        except (ImportError, RuntimeError):
            busy = -1e6
        total = torch.tensor(busy)
        dist.all_reduce(total, group=group)
        return round(float(total) / dist.get_world_size(group), 3) if total >= 0 else None
