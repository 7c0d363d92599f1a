"""The process group of the workers.

Ray's own `TorchConfig` chooses NCCL where Ray counts GPUs, and its module imports torch in the
driver and in the controller (2.3 s each, measured), which do not need it. Here the workers say what
they have.
"""

import os
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig


@dataclass
class ProcessGroup(BackendConfig):  # type: ignore[misc]  # Ray has no types
    """Backend configuration: NCCL and gloo where every worker has CUDA, else gloo."""

    timeout_seconds: int = 600

    @property
    def backend_cls(self) -> type[Backend]:
        """What sets the group up."""
        return _ProcessGroupBackend

    def to_dict(self) -> dict[str, Any]:
        """For Ray Train's record of the run."""
        return {"timeout_seconds": self.timeout_seconds}


class _ProcessGroupBackend(Backend):  # type: ignore[misc]
    # Each worker sees all GPUs of its node that the job has, so that NCCL can use NVLink.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: ProcessGroup) -> None:
        import ray

        devices = worker_group.execute(_device_count)
        backend = "cpu:gloo,cuda:nccl" if all(devices) else "gloo"
        address = worker_group.execute_single(0, _free_address)
        world, timeout = len(worker_group), backend_config.timeout_seconds
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _join, backend, address, rank, world, timeout
                )
                for rank in range(world)
            ]
        )


def _device_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_address() -> str:
    import socket

    import ray

    ip = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _join(backend: str, address: str, rank: int, world: int, timeout: int) -> None:
    from datetime import timedelta

    import ray.train
    import torch.distributed as dist

    context = ray.train.get_context()
    # What torchrun sets, for libraries that look there.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
    )
    dist.init_process_group(
        backend=backend,
        init_method=address,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
