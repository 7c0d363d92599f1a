"""Checkpoints of the workers: torch's distributed checkpoint, written in the background.

A save copies the state to CPU memory and goes on training; a thread of each rank writes its part
and reads it back for a checksum. When the part of every rank is written, rank 0 writes the manifest
and all ranks register the checkpoint with Ray Train. At most one save is in flight.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from trainingjob_trainer import errors
from trainingjob_trainer.storage import Manifest, RunDirectory, checkpoint_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

Files = dict[str, tuple[int, int]]

Register = Callable[[str, dict[str, float | None]], None]
"""Tells Ray Train of a whole checkpoint: its directory name and its metrics."""


def initialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that AdamW makes at its first gradient.

    A parameter that got no gradient before a save would be saved without state, and every resume
    would fail on the missing key.
    """
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group.get("fused") else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of the training state by name; they are the live ones, so a load fills them."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = tensor
    return tensors


def state_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Digest of names and shapes: equal digests mean that one's checkpoint fits the other."""
    names = sorted((name, tuple(tensor.shape)) for name, tensor in tensors.items())
    return hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()


def register_with_ray(name: str, metrics: dict[str, float | None]) -> None:
    """Report the checkpoint directory `name`, which lies in the run directory, to Ray Train."""
    import ray.train

    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(path, storage.storage_filesystem),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


class Checkpointer:
    """Saves and loads the state of one rank. Every rank calls every method at the same step."""

    def __init__(
        self,
        run: RunDirectory,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: ProcessGroup,
        register: Register = register_with_ray,
    ) -> None:
        import torch.distributed as dist

        self._run = run
        self._state = state(model, optimizer)
        self._group = group
        self._register = register
        self.state_digest = state_digest(self._state)
        self._rank = dist.get_rank()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Manifest, Future[Files], float] | None = None
        self.seconds = 0.0
        """How long the latest save took, start to end."""
        self.saved: Manifest | None = None
        """The latest whole checkpoint of this attempt."""

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None

    @property
    def written(self) -> bool:
        """Whether this rank's part of the save in flight is on the storage.

        Raises what the write raised.
        """
        if self._pending is None:
            return False
        future = self._pending[1]
        if future.done():
            future.result()
        return future.done()

    def save(self, manifest: Manifest) -> None:
        """Start a save; the state may change as soon as this returns."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        assert self._pending is None
        name = checkpoint_name(manifest.step)
        if self._rank == 0:
            self._check_space()
        started = time.monotonic()
        write = async_save(
            dict(self._state), storage_writer=_writer(self._run, name), process_group=self._group
        )
        assert isinstance(write, Future)

        def finish() -> Files:
            write.result()
            own = [f for f in self._run.sizes(name) if f.startswith(f"__{self._rank}_")]
            # The metadata is the coordinator's, which is rank 0.
            own += [".metadata"] if self._rank == 0 else []
            return {file: self._run.checksum(name, file) for file in own}

        self._pending = (manifest, self._thread.submit(finish), started)

    def commit(self) -> Manifest:
        """Wait for the save in flight, declare it whole, register it with Ray Train."""
        import torch.distributed as dist

        assert self._pending is not None
        manifest, future, started = self._pending
        gathered: list[Files | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, future.result(), group=self._group)
        files = {file: mark for part in gathered if part for file, mark in part.items()}
        manifest = replace(manifest, files=files)
        name = checkpoint_name(manifest.step)
        if self._rank == 0:
            self._run.write_manifest(name, manifest)
        # No rank may report before the manifest stands: Ray would hold a checkpoint that is not.
        dist.barrier(group=self._group)
        self._register(name, {"step": manifest.step, "loss": manifest.loss})
        self._pending = None
        self.seconds = time.monotonic() - started
        self.saved = manifest
        return manifest

    def load(self, name: str, manifest: Manifest) -> None:
        """Fill the live state from a checkpoint.

        Raises DamagedCheckpoint where a file is not what was written (the ranks share the reading),
        TrainingError (exit 64) where the checkpoint is of another model.
        """
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_loader import load

        if manifest.state_digest != self.state_digest:
            raise errors.configuration(
                f"{self._run.url}/{name} was saved by another model than `model` describes",
                "restore `model` and `data.tokenizer` as they were, or use a new name or storage",
            )
        world = dist.get_world_size(self._group)
        own = sorted(manifest.files)[self._rank :: world]
        bad = [f for f in own if self._run.checksum(name, f) != manifest.files[f]]
        gathered: list[list[str]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, bad, group=self._group)
        if damaged := sorted(file for part in gathered for file in part):
            if self._rank == 0:
                self._run.set_aside(name)
            dist.barrier(group=self._group)
            raise errors.DamagedCheckpoint(
                f"{self._run.url}/{name} is damaged: {', '.join(damaged)} changed since the save"
            )
        load(self._state, storage_reader=_reader(self._run, name), process_group=self._group)

    def _check_space(self) -> None:
        if not self._run.is_local:
            return
        import shutil

        needed = sum(t.numel() * t.element_size() for t in self._state.values())
        free = shutil.disk_usage(self._run.path).free
        if free < needed * 1.05:
            raise errors.storage(
                f"{self._run.url} has {free / 1e9:.2f} GB free, "
                f"a checkpoint needs {needed / 1e9:.2f} GB",
                "enlarge the volume, or lower checkpoint.keep",
            )


def _writer(run: RunDirectory, name: str) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if run.is_local:
        return FileSystemWriter(run.join(name), overwrite=True)
    writer = FileSystemWriter(run.join(name), sync_files=False, overwrite=True)
    writer.fs, writer.path = _arrow_file_system(run), PurePosixPath(run.join(name))
    return writer


def _reader(run: RunDirectory, name: str) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(run.join(name))
    if not run.is_local:
        reader.fs, reader.path = _arrow_file_system(run), PurePosixPath(run.join(name))
    return reader


def _arrow_file_system(run: RunDirectory) -> Any:
    """torch's file-system interface over pyarrow's, for object stores."""
    from torch.distributed.checkpoint.filesystem import FileSystemBase

    fs = run.fs

    class ArrowFileSystem(FileSystemBase):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
            if mode == "wb":
                with fs.open_output_stream(str(path)) as stream:
                    yield stream
            elif mode == "rb":
                with fs.open_input_file(str(path)) as stream:
                    yield stream
            else:
                raise ValueError(f"mode {mode!r} is neither 'rb' nor 'wb'")

        def concat_path(self, path: Any, suffix: str) -> Any:
            return PurePosixPath(str(path)) / suffix

        def rename(self, path: Any, new_path: Any) -> None:
            fs.move(str(path), str(new_path))

        def init_path(self, path: Any) -> Any:
            return PurePosixPath(str(path))

        def mkdir(self, path: Any) -> None:
            fs.create_dir(str(path), recursive=True)

        def exists(self, path: Any) -> bool:
            import pyarrow.fs

            found = fs.get_file_info(str(path)).type
            return bool(found != pyarrow.fs.FileType.NotFound)

        def rm_file(self, path: Any) -> None:
            fs.delete_file(str(path))

        def ls(self, path: Any) -> list[str]:
            import pyarrow.fs

            return [info.path for info in fs.get_file_info(pyarrow.fs.FileSelector(str(path)))]

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return ArrowFileSystem()
