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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainingjob_trainer import contract, data, errors, models
from trainingjob_trainer.checkpoint import Checkpointer, initialize_optimizer
from trainingjob_trainer.config import Config, Training
from trainingjob_trainer.meter import Meter
from trainingjob_trainer.progress import Reporter
from trainingjob_trainer.storage import Done, Manifest, RunDirectory, checkpoint_name
from trainingjob_trainer.watch import Orders, Watch, agree

if TYPE_CHECKING:
    import torch
    from torch import nn

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models and tokenizers are local directories: pods often have no way out, and a hub is not pinned.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Ray Train's entry point on each worker; returns {"step": reached, "reason": why it ended}.

    `settings` holds `job` (contract.Job), `config` (Config) and `board` (progress.Board's handle).
    The reason is "done", "stop" (was asked to) or "preempted". Raises TrainingError, nothing else.
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
class State:
    """Where training stands; together with the tensors it is what a checkpoint holds."""

    step: int = 0
    consumed: int = 0
    """Samples used so far, over all ranks and epochs."""
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
        # Apart from the gradients' group: on GPUs the agreement after each step must not wait for
        # the device, and the checkpoint's thread runs collectives at any time.
        timeout = timedelta(seconds=config.training.communication_timeout_seconds)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.run_directory = RunDirectory(job.storage, job.name)
        self.run_directory.check_visible(job, where)

        tokenizer = data.tokenizer(config.data.tokenizer)
        self.train_set, self.validation_set, self.digest = self._samples(
            tokenizer, first=context.get_local_rank() == 0
        )
        self.model = models.build(config, tokenizer.vocab_size).to(self.device)
        self.optimizer = adamw(self.model, config.training, fused=self.device.type == "cuda")
        self.parallel = torch.nn.parallel.DistributedDataParallel(
            self.model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        self.checkpointer = Checkpointer(
            self.run_directory, self.model, self.optimizer, dist.new_group(backend="gloo")
        )
        self.at = State()
        self.saved_at = self.validated_at = -1
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.reporter = Reporter(board) if self.rank == 0 else None
        self.watch = Watch(config.checkpoint.every_seconds, self.reporter)
        self.meter = Meter(self.device)

    # --- the loop --------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train from the latest checkpoint to the last step, or until told to stop."""
        training, checkpoint, stop = self.config.training, self.config.checkpoint, False
        self._resume()
        if self.at.step == 0:
            self._validate()
        self._report(force=True)
        while self.at.step < training.steps and not stop:
            self._step()
            last = self.at.step == training.steps
            if last or _every(training.eval_every, self.at.step):
                self._validate()
            self._report(force=last)
            orders = self._agree()
            stop = orders.stop
            if orders.written:
                self._commit()
            if orders.save or last or stop or _every(checkpoint.every_steps, self.at.step):
                self._save()
            if last or stop:
                self._commit()
        done = self.at.step >= training.steps
        if done and self.rank == 0:
            self._write_done()
        if self.reporter:
            self.reporter.flush()
        return {"step": self.at.step, "reason": "done" if done else self.watch.reason}

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
            # The gradients are exchanged once, with the last piece.
            self.parallel.require_backward_grad_sync = number == len(micro) - 1
            loss = self._loss(self.parallel, self.train_set, chosen)
            # DDP takes the mean over the ranks; so this is the mean over all tokens of the batch.
            (loss * (self.world / valid)).backward()
            self.meter.loss += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), training.gradient_clip or math.inf
        )
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
        precision = self.config.training.precision
        bf16 = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )

    def _validate(self) -> None:
        """Mean loss over the first validation samples, the same ones for any number of ranks."""
        import torch
        import torch.distributed as dist

        training, started = self.config.training, time.monotonic()
        batch = training.global_batch_size
        ids = np.arange(min(len(self.validation_set), training.eval_batches * batch))
        own = ids[self.rank :: self.world]
        total = torch.zeros((), dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for chosen in data.micro_batches(own, training.micro_batch_size or batch):
                total += self._loss(self.model, self.validation_set, chosen).double().cpu()
        self.model.train()
        dist.all_reduce(total, group=self.control)
        self.at.validation_loss = _finite(float(total) / self.validation_set.valid(ids))
        if self.at.step == 0:
            self.at.start_validation_loss = self.at.validation_loss
        self.validated_at = self.at.step
        self.meter.pause(time.monotonic() - started)

    def _agree(self) -> Orders:
        saver = self.checkpointer
        return agree(self.watch, saver.written, saver.seconds, self.rank, self.world, self.control)

    # --- checkpoints -----------------------------------------------------------------------------

    def _resume(self) -> None:
        """Load the latest whole checkpoint, if there is one."""
        # Rank 0 looks for all: listings of one storage at different times may differ.
        whole = list(self.run_directory.checkpoints().values()) if self.rank == 0 else []
        latest: Manifest | None = self._gather(whole[-1] if whole else None)[0]
        if latest is None:
            return
        self.checkpointer.load(checkpoint_name(latest.step), latest)
        self.at = State(
            latest.step,
            latest.consumed_samples,
            latest.loss,
            latest.start_validation_loss,
            latest.validation_loss,
        )
        self.saved_at = latest.step
        note = f"resumed from step {latest.step}"
        if latest.world_size != self.world:
            note += f" (saved by {latest.world_size} workers, now {self.world})"
        if latest.data_digest != self.digest:
            note += "; the training text has changed since: samples may repeat"
        self._tell(
            note,
            resumed_from_step=latest.step,
            checkpoint_step=latest.step,
            checkpoint_time=latest.time,
        )

    def _save(self) -> None:
        """Start a checkpoint of this step, unless there is one."""
        if self.saved_at == self.at.step:
            return
        self._commit()
        self._check_finite()
        if self.rank == 0:
            self.run_directory.check_owner(self.job)
        started = time.monotonic()
        self.checkpointer.save(
            Manifest(
                step=self.at.step,
                consumed_samples=self.at.consumed,
                world_size=self.world,
                global_batch_size=self.config.training.global_batch_size,
                state_digest=self.checkpointer.state_digest,
                data_digest=self.digest,
                start_validation_loss=self.at.start_validation_loss,
                validation_loss=self.at.validation_loss,
                loss=self.at.loss,
                time=contract.now(),
                uid=self.job.uid,
                attempt=self.job.attempt,
            )
        )
        self.saved_at = self.at.step
        self.watch.saving()
        self.meter.pause(time.monotonic() - started)

    def _commit(self) -> None:
        """Wait for the save in flight, if there is one, and make it count."""
        if self.checkpointer.busy:
            manifest = self.checkpointer.commit()
            self._tell(checkpoint_step=manifest.step, checkpoint_time=manifest.time)

    def _check_finite(self) -> None:
        # Checked when something is reported or saved: each look makes the CPU wait for the GPU.
        if not bool(self.finite):
            raise errors.TrainingError(
                contract.ExitCode.USER_CODE,
                f"the gradient became infinite or NaN at or before step {self.at.step}",
                "lower training.learningRate, lengthen warmupSteps, or set gradientClip",
            )

    def _write_done(self) -> None:
        at = self.at
        checkpoint = f"{self.run_directory.url}/{checkpoint_name(at.step)}"
        self.run_directory.write_done(
            Done(
                uid=self.job.uid,
                step=at.step,
                total_steps=self.config.training.steps,
                start_validation_loss=at.start_validation_loss,
                validation_loss=at.validation_loss,
                checkpoint=checkpoint,
            )
        )

    # --- reports ---------------------------------------------------------------------------------

    def _report(self, force: bool) -> None:
        """Progress to the board; every `logEvery` steps (or by `force`) a line for the log too."""
        training, at, meter = self.config.training, self.at, self.meter
        if not (force or _every(training.log_every, at.step)):
            if self.reporter:
                self.reporter.tick(step=at.step)
            return
        self._check_finite()
        parts = [f"step {at.step}/{training.steps}"]
        fields: dict[str, Any] = {"step": at.step, "total_steps": training.steps}
        if meter.tokens:
            at.loss = _finite(meter.mean_loss(self.control))
            speed = meter.tokens_per_second()
            eta = round(meter.seconds_per_step() * (training.steps - at.step))
            fields |= {"loss": at.loss, "tokens_per_second": round(speed, 1), "eta_seconds": eta}
            if (busy := meter.gpu_utilization(self.control)) is not None:
                fields["gpu_utilization"] = busy
            parts += [f"loss {_shown(at.loss)}", f"tokens/s {speed:.0f}"]
            parts += [f"eta {eta // 60}:{eta % 60:02d}"]
        if self.validated_at == at.step:
            fields["validation_loss"] = at.validation_loss
            parts.insert(2 if meter.tokens else 1, f"val {_shown(at.validation_loss)}")
        meter.reset()
        if self.reporter:
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
        self, tokenizer: data.Tokenizer, first: bool
    ) -> tuple[data.Samples, data.Samples, str]:
        """The samples; the `first` rank of each node makes the tokens, the others find them."""
        import ray.train.collective

        config = self.config.data

        def tokens(patterns: Sequence[str]) -> data.Tokens:
            paths = data.files(patterns, config)
            return data.cached_tokens(paths, tokenizer, config.cache_directory)

        if first:
            data.sample_sets(config, tokens)
        # Ray Train's barrier and not torch's: making the tokens may take longer than its timeout.
        ray.train.collective.barrier()
        train_set, validation_set, digest = data.sample_sets(config, tokens)
        seen = self._gather((digest, self.where))
        for theirs, where in seen:
            if theirs != seen[0][0]:
                raise errors.data(
                    f"the training text differs between {seen[0][1]} and {where}",
                    "give all workers the same files: one image, or one shared volume",
                )
        return train_set, validation_set, digest

    def _gather(self, value: Any) -> list[Any]:
        """All ranks' values, in order of their ranks."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values


def adamw(model: nn.Module, training: Training, fused: bool) -> torch.optim.Optimizer:
    """AdamW with its state made at once and weight decay on matrices only.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        fused=fused,
    )
    initialize_optimizer(optimizer)
    return optimizer


def _device() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    import ray.train.torch

    device: torch.device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device


def _every(interval: int | None, step: int) -> bool:
    return bool(interval) and step % (interval or 1) == 0


def _shown(loss: float | None) -> str:
    return "nan" if loss is None else f"{loss:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
