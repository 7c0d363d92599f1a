"""The training loop: what each rank runs.

The driver imports this module, so torch, Transformers and Ray are imported inside the functions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainingjob_trainer import checkpoint, contract, data, errors, models
from trainingjob_trainer.config import Config, Training
from trainingjob_trainer.progress import Reporter
from trainingjob_trainer.storage import Done, Manifest, RunDirectory, checkpoint_name

if TYPE_CHECKING:
    import torch
    from torch import nn


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Ray Train's entry point on each worker; returns how it ended (see `Outcome`).

    `settings` holds `job` (contract.Job), `config` (Config) and `board` (progress.Board's handle).
    Raises TrainingError and nothing else.
    """
    import ray.train

    where = f"rank {ray.train.get_context().get_world_rank()} on {socket.gethostname()}"
    try:
        return Trainer(settings["job"], settings["config"], settings["board"], where).run()
    except BaseException as error:
        failure = errors.in_worker(error, where)
        if failure.code is contract.ExitCode.COMMUNICATION:
            # Mostly because a peer died. Give Ray time to see that, so that it names the cause.
            time.sleep(5)
        raise failure from None


def learning_rate(step: int, training: Training) -> float:
    """Rate of step `step` (from 1): linear warm-up, then half a cosine down to the minimum."""
    if step <= training.warmup_steps:
        return training.learning_rate * step / training.warmup_steps
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    low = training.min_learning_rate_ratio
    return training.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * min(done, 1))) / 2)


def seed_of(seed: int, step: int, rank: int) -> int:
    """Seed of a rank's random numbers (dropout) in a step, so that no generator needs saving."""
    digest = hashlib.blake2b(repr((seed, step, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class Counters:
    """Where training stands."""

    step: int = 0
    consumed: int = 0
    """Samples used so far, over all ranks and epochs."""
    resumed_from: int | None = None
    loss: float | None = None
    start_validation_loss: float | None = None
    validation_loss: float | None = None


class Trainer:
    """One rank."""

    def __init__(self, job: contract.Job, config: Config, board: Any, where: str) -> None:
        import ray.train
        import torch
        import torch.distributed as dist

        context = ray.train.get_context()
        self.job, self.config, self.where = job, config, where
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.device = _device()
        self.reporter = Reporter(board) if self.rank == 0 else None
        self.run_directory = RunDirectory(job.storage, job.name)
        self.run_directory.check_visible(job, where)

        tokenizer = data.tokenizer(config.data.tokenizer)
        self.train_set, self.validation_set, self.digest = self._samples(tokenizer, context)
        model = models.build(config, tokenizer.vocab_size).to(self.device)
        self.optimizer = _adamw(model, config.training, self.device)
        self.model = model
        self.parallel = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        # Apart from the gradients' group: the checkpoint thread runs collectives of its own, and on
        # GPUs the per-step agreement must not wait for the device.
        self.control = dist.new_group(backend="gloo")
        self.checkpointer = checkpoint.Checkpointer(
            self.run_directory, model, self.optimizer, dist.new_group(backend="gloo")
        )
        self.at = Counters()
        self.validated_at = -1
        self.watch = Watch(config, self.reporter)
        self.meter = Meter(self.device)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    # --- the loop --------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train from the latest checkpoint to the last step, or until told to stop."""
        training = self.config.training
        self._resume()
        if self.at.step == 0:
            self._validate()
        self._log(force=True)
        stop = False
        while self.at.step < training.steps and not stop:
            self._step()
            last = self.at.step == training.steps
            if last or (training.eval_every and self.at.step % training.eval_every == 0):
                self._validate()
            self._log(force=last)
            orders = self._agree()
            if self.checkpointer.busy and (orders.written or last or orders.save):
                self._commit()
            stop = orders.stop
            if self._due(orders) or last or stop:
                self._save(wait=last or stop)
        if self.at.step == training.steps:
            self._finish()
        if self.reporter:
            self.reporter.flush()
        return {
            "step": self.at.step,
            "reason": "done" if self.at.step == training.steps else "stop",
        }

    def _step(self) -> None:
        """One optimizer update from one global batch."""
        import torch

        training = self.config.training
        step, batch = self.at.step + 1, training.global_batch_size
        torch.manual_seed(seed_of(training.seed, step, self.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        ids = data.sample_ids(training.seed, self.at.consumed, batch, len(self.train_set))
        own = data.rank_share(ids, self.rank, self.world)
        valid = self.train_set.valid(ids)
        micro = list(data.micro_batches(own, training.micro_batch_size or len(own)))
        for number, chosen in enumerate(micro):
            self.parallel.require_backward_grad_sync = number == len(micro) - 1
            loss = self._loss(self.parallel, self.train_set, chosen)
            # DDP averages the ranks' gradients; this makes it the mean over all tokens of the batch.
            (loss * (self.world / valid)).backward()
            self.meter.loss += loss.detach()
        limit = training.gradient_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.finite &= torch.isfinite(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.at.step, self.at.consumed = step, self.at.consumed + batch
        self.meter.count(valid)
        self._log_samples(own)

    def _loss(self, model: nn.Module, samples: data.Samples, ids: data.Ids) -> torch.Tensor:
        """Sum over the valid tokens of the cross entropy in nats, a scalar in fp32."""
        import torch

        inputs, targets = (torch.from_numpy(x).to(self.device) for x in samples.batch(ids))
        bf16 = self.config.training.precision == "bf16" or (
            self.config.training.precision == "auto" and self.device.type == "cuda"
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )

    def _validate(self) -> None:
        """Mean loss over the first validation samples; which ones does not depend on the ranks."""
        import torch
        import torch.distributed as dist

        training, started = self.config.training, time.monotonic()
        batch = training.global_batch_size
        ids = np.arange(min(len(self.validation_set), training.eval_batches * batch))
        total = torch.zeros((), dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            own = ids[self.rank :: self.world]
            for chosen in data.micro_batches(own, training.micro_batch_size or batch):
                total += self._loss(self.model, self.validation_set, chosen).double().cpu()
        self.model.train()
        dist.all_reduce(total, group=self.control)
        self.at.validation_loss = float(total) / self.validation_set.valid(ids)
        if self.at.step == 0:
            self.at.start_validation_loss = self.at.validation_loss
        self.validated_at = self.at.step
        self.meter.pause(time.monotonic() - started)

    def _agree(self) -> Orders:
        """What all ranks do after this step: rank 0 decides, one small all-reduce tells."""
        import ray.train
        import torch
        import torch.distributed as dist

        wish = self.watch.orders() if self.rank == 0 else Orders()
        flags = torch.tensor(
            [self.checkpointer.written, wish.save, wish.stop, wish.look], dtype=torch.int32
        )
        dist.all_reduce(flags, group=self.control)
        written, save, stop, look = flags.tolist()
        if look:  # a collective of Ray Train: all ranks or none
            self.watch.notice(ray.train.get_preemption_info(), self.checkpointer.seconds)
        return Orders(written == self.world, bool(save), bool(stop), bool(look))

    # --- checkpoints -----------------------------------------------------------------------------

    def _resume(self) -> None:
        whole = self.run_directory.checkpoints()
        latest = self._same_on_all_ranks(max(whole.values(), key=lambda m: m.step, default=None))
        if latest is None:
            return
        self.checkpointer.load(checkpoint_name(latest.step), latest)
        self.at = Counters(
            latest.step,
            latest.consumed_samples,
            latest.step,
            latest.loss,
            latest.start_validation_loss,
            latest.validation_loss,
        )
        note = f"resumed from step {latest.step}"
        if latest.world_size != self.world:
            note += f" (saved by {latest.world_size} workers, now {self.world})"
        if latest.data_digest != self.digest:
            note += "; the training text has changed since, so samples may repeat"
        self._tell(
            note,
            resumed_from_step=latest.step,
            checkpoint_step=latest.step,
            checkpoint_time=latest.time,
        )

    def _due(self, orders: Orders) -> bool:
        every = self.config.checkpoint.every_steps
        return orders.save or (every is not None and self.at.step % every == 0)

    def _save(self, wait: bool) -> None:
        saved = self.checkpointer.saved
        if self.at.step == (saved.step if saved else self.at.resumed_from):
            return
        if self.checkpointer.busy:
            self._commit()
        if not bool(self.finite):
            raise contract_failure(self.at.step)
        if self.rank == 0:
            self.run_directory.check_owner(self.job)
        started = time.monotonic()
        self.checkpointer.save(
            Manifest(
                step=self.at.step,
                consumed_samples=self.at.consumed,
                world_size=self.world,
                global_batch_size=self.config.training.global_batch_size,
                data_digest=self.digest,
                start_validation_loss=self.at.start_validation_loss,
                validation_loss=self.at.validation_loss,
                loss=self.at.loss,
                time=contract.now(),
                uid=self.job.uid,
                attempt=self.job.attempt,
            )
        )
        self.watch.saving()
        if wait:
            self._commit()
        self.meter.pause(time.monotonic() - started)

    def _commit(self) -> None:
        manifest = self.checkpointer.commit()
        self._tell(checkpoint_step=manifest.step, checkpoint_time=manifest.time)

    def _finish(self) -> None:
        at = self.at
        if self.rank == 0:
            self.run_directory.write_done(
                Done(
                    uid=self.job.uid,
                    step=at.step,
                    total_steps=self.config.training.steps,
                    start_validation_loss=at.start_validation_loss,
                    validation_loss=at.validation_loss,
                    checkpoint=self.run_directory.join(checkpoint_name(at.step)),
                )
            )

    # --- reports ---------------------------------------------------------------------------------

    def _log(self, force: bool) -> None:
        training, at = self.config.training, self.at
        if at.step % training.log_every and not force:
            if self.reporter:
                self.reporter.tick(step=at.step)
            return
        tokens = self.meter.tokens
        if tokens:
            if not bool(self.finite):
                raise contract_failure(at.step)
            at.loss = self.meter.mean_loss(self.control)
        speed = self.meter.tokens_per_second()
        eta = self.meter.seconds_per_step() * (training.steps - at.step)
        busy = self.meter.gpu_utilization(self.control, self.world)
        self.meter.reset()
        if self.reporter is None:
            return
        parts = [f"step {at.step}/{training.steps}"]
        parts += [f"loss {at.loss:.4g}"] if tokens and at.loss is not None else []
        if self.validated_at == at.step:
            parts.append(f"val {at.validation_loss:.4g}")
        if tokens:
            parts += [f"tokens/s {speed:.0f}", f"eta {int(eta) // 60}:{int(eta) % 60:02d}"]
        fields: dict[str, Any] = {"step": at.step, "total_steps": training.steps}
        if tokens:
            fields |= {
                "loss": at.loss,
                "tokens_per_second": round(speed, 1),
                "eta_seconds": round(eta),
            }
        if at.validation_loss is not None:
            fields["validation_loss"] = at.validation_loss
        if busy is not None:
            fields["gpu_utilization"] = busy
        self.reporter.tick("  ".join(parts), **fields)

    def _tell(self, *lines: str, **fields: Any) -> None:
        if self.reporter:
            self.reporter.tick(*lines, urgent=True, **fields)

    def _log_samples(self, ids: data.Ids) -> None:
        if self.config.debug.sample_log is None:
            return
        directory = Path(self.config.debug.sample_log)
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"attempt-{self.job.attempt}-rank-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": self.at.step, "ids": ids.tolist()}) + "\n")

    # --- setup -----------------------------------------------------------------------------------

    def _samples(
        self, tokenizer: data.Tokenizer, context: Any
    ) -> tuple[data.Samples, data.Samples, str]:
        import ray.train.collective

        config = self.config.data

        def tokens(patterns: Any) -> data.Tokens:
            return data.cached_tokens(
                data.files(patterns, config), tokenizer, config.cache_directory
            )

        if context.get_local_rank() == 0:
            data.sample_sets(config, tokens)
        # Ray Train's barrier and not torch's: making the tokens may take longer than its timeout.
        ray.train.collective.barrier()
        train_set, validation_set, digest = data.sample_sets(config, tokens)
        seen = self._gather((digest, self.where))
        if len({d for d, _ in seen}) > 1:
            other = next(w for d, w in seen if d != seen[0][0])
            raise errors.data(
                f"the training text differs between {seen[0][1]} and {other}",
                "give all workers the same files: one image, or one shared volume",
            )
        return train_set, validation_set, digest

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def _same_on_all_ranks(self, value: Any) -> Any:
        """Rank 0's value: ranks that list the storage at different times may see different things."""
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def contract_failure(step: int) -> errors.TrainingError:
    """The loss or gradient became NaN or infinite."""
    return errors.TrainingError(
        contract.ExitCode.USER_CODE,
        f"the gradient is not finite at or before step {step}",
        "lower training.learningRate, lengthen warmupSteps, or set gradientClip",
    )


@dataclass(frozen=True, slots=True)
class Orders:
    """What all ranks do after a step."""

    written: bool = False
    """Every rank's part of the save in flight is on the storage."""
    save: bool = False
    stop: bool = False
    look: bool = False
    """Ask Ray Train for a preemption notice."""


class Watch:
    """Rank 0's eyes on the clock, on stop requests and on preemption notices."""

    def __init__(self, config: Config, reporter: Reporter | None) -> None:
        self._every = config.checkpoint.every_seconds
        self._reporter = reporter
        self._looked = self._saved = self._stepped = time.monotonic()
        self._step_seconds = 0.0
        self._deadline: float | None = None
        """When to have stopped by, on this machine's wall clock."""
        self._notice_pending = False

    def orders(self) -> Orders:
        """What rank 0 wants, called once a step."""
        now = time.monotonic()
        self._step_seconds, self._stepped = now - self._stepped, now
        look = now >= self._looked + 1
        self._looked = now if look else self._looked
        stop = self._reporter is not None and self._reporter.tick()
        if self._deadline is not None:
            stop = stop or time.time() + 2 * self._step_seconds >= self._deadline
        due = self._every is not None and now >= self._saved + self._every
        save = due or self._notice_pending
        self._notice_pending = False
        return Orders(save=save, stop=stop, look=look)

    def notice(self, info: Any, save_seconds: float) -> None:
        """Take in a preemption notice: save at once, then go on until just before the deadline.

        Ray goes on training until the deadline by itself and then loses what came after the save.
        """
        if info is None or self._deadline is not None:
            return
        left = 30.0 if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
        self._deadline = time.time() + left - max(2 * save_seconds, 3.0) - 2.0
        self._notice_pending = True
        if self._reporter:
            nodes = len(info.preempted_node_to_ranks)
            self._reporter.tick(f"{nodes} node(s) will be taken away in {left:.0f} s: saving")

    def saving(self) -> None:
        """A save has started."""
        self._saved = time.monotonic()


class Meter:
    """Loss, speed and GPU use since the last report."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self.loss = torch.zeros((), device=device)
        """Sum of the token losses of this rank; stays on the device until asked for."""
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
        """Over all ranks."""
        return self.tokens / max(1e-9, time.monotonic() - self._started - self._paused)

    def seconds_per_step(self) -> float:
        """Validation and saving included: it is for the time that is left."""
        return (time.monotonic() - self._started) / max(1, self.steps)

    def gpu_utilization(self, group: Any, world: int) -> float | None:
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
        return round(float(total) / world, 3) if total >= 0 else None


def _device() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    import ray.train.torch

    device: torch.device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device


def _adamw(model: nn.Module, training: Training, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only, and its state made at once."""
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        fused=device.type == "cuda",
    )
    checkpoint.initialize_optimizer(optimizer)
    return optimizer


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
