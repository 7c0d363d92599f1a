"""From GPUs to worker pods: the fewest equal pods that fit whole nodes."""

from dataclasses import dataclass
from decimal import Decimal

from trainingjob.api.spec import Workers
from trainingjob.planning import quantity
from trainingjob.planning.catalogue import Catalogue, NodePool
from trainingjob.planning.unfit import Unfit


@dataclass(frozen=True)
class Sizing:
    """The worker pods of a job. All quantities are per pod; `memory` and below in bytes."""

    pods: int
    gpus_per_pod: int
    cpu: Decimal
    memory: int
    shared_memory: int
    object_store_memory: int
    on_demand: NodePool | None
    spot: NodePool | None

    @property
    def train_workers(self) -> int:
        """Ray Train workers (ranks): one per GPU, or one per pod without GPUs."""
        return self.pods * max(1, self.gpus_per_pod)

    @property
    def ray_cpus(self) -> int:
        """CPUs that Ray counts in a pod: whole ones, and at least one."""
        return max(1, int(self.cpu))

    @property
    def cpus_per_train_worker(self) -> Decimal:
        """CPUs of each Ray Train worker; a fraction where a pod has fewer CPUs than GPUs."""
        share = Decimal(self.ray_cpus) / max(1, self.gpus_per_pod)
        step = Decimal(1) if share >= 1 else Decimal("0.01")
        return share // step * step


class DoesNotFit(Unfit):
    """No pool can hold the workers. The message says why, and what would fit."""

    def __init__(self, message: str) -> None:
        super().__init__("DoesNotFit", message)


def size(workers: Workers, catalogue: Catalogue, spot_policy: str) -> Sizing:
    """The worker pods for `workers` on the pools of `catalogue`.

    Raises:
        DoesNotFit: with the nearest valid numbers.
    """
    if workers.gpus == 0:
        return _on_cpus(workers, catalogue)
    wanted = workers.gpu_types or list(dict.fromkeys(p.gpu_type for p in catalogue.pools))
    candidates = [p for kind in wanted for p in catalogue.pools if kind and p.gpu_type == kind]
    if not candidates:
        raise DoesNotFit(_no_pool(workers, catalogue))
    spot = [p for p in candidates if p.capacity_type == "spot"]
    on_demand = [p for p in candidates if p.capacity_type == "on-demand"]
    if spot_policy == "Require":
        on_demand = []
        if not spot:
            raise DoesNotFit(
                "spot.policy is Require and no spot pool has "
                f"{_listed(workers.gpu_types or ['GPUs'])}: declare one in the operator's "
                "nodePools, or set spot.policy to Prefer or Never"
            )
    elif spot_policy == "Never":
        spot = []
        if not on_demand:
            raise DoesNotFit(
                f"only spot pools have {_listed(workers.gpu_types or ['GPUs'])}: set spot.policy "
                "to Prefer or Require, or declare an on-demand pool in the operator's nodePools"
            )
    first = spot or on_demand
    errors = []
    for pool in first:
        per_pod = _gpus_per_pod(workers, pool)
        if per_pod is None:
            errors.append(_nearest(workers, pool))
            continue
        second = next((p for p in (on_demand if spot else []) if _holds(workers, p, per_pod)), None)
        return _with_pool(workers, pool, per_pod, second if spot else None)
    raise DoesNotFit("; ".join(dict.fromkeys(errors)))


def _on_cpus(workers: Workers, catalogue: Catalogue) -> Sizing:
    assert workers.replicas is not None, "the schema demands it without gpus"
    cpu = quantity.parse(workers.cpu or "1")
    memory = quantity.parse(workers.memory or "4Gi")
    shapes = [p for p in catalogue.pools if not p.gpu_type and p.capacity_type == "on-demand"]
    fitting = [p for p in shapes if p.node.cores >= cpu and p.node.bytes >= memory]
    if shapes and not fitting:
        largest = max(shapes, key=lambda p: (p.node.cores, p.node.bytes))
        raise DoesNotFit(
            f"no pool without GPUs has nodes for a worker of {quantity.cores(cpu)} CPUs and "
            f"{quantity.mebibytes(memory)}: the largest, {largest.name}, has {largest.node.cpu} "
            f"CPUs and {largest.node.memory}; ask for less in workers.cpu and workers.memory"
        )
    return _sizing(workers, workers.replicas, 0, cpu, memory, fitting[0] if fitting else None, None)


def _gpus_per_pod(workers: Workers, pool: NodePool) -> int | None:
    """The most GPUs per pod that divide both the job and the pool's node, so that pods fill
    whole nodes; None when the pool cannot hold them."""
    if workers.replicas is not None:
        per_pod = workers.gpus // workers.replicas
        return per_pod if _holds(workers, pool, per_pod) else None
    for per_pod in range(min(workers.gpus, pool.node.gpus), 0, -1):
        whole = pool.node.gpus % per_pod == 0 or per_pod == workers.gpus
        # One GPU per pod scatters a job that asked for several over needless pods.
        scattered = per_pod == 1 and workers.gpus > 1 and pool.node.gpus > 1
        if (
            workers.gpus % per_pod == 0
            and whole
            and not scattered
            and _holds(workers, pool, per_pod)
        ):
            return per_pod
    return None


def _holds(workers: Workers, pool: NodePool, per_pod: int) -> bool:
    return (
        per_pod <= pool.node.gpus
        and quantity.parse(workers.cpu or "0") <= pool.node.cores
        and quantity.parse(workers.memory or "0") <= pool.node.bytes
    )


def _with_pool(workers: Workers, pool: NodePool, per_pod: int, fallback: NodePool | None) -> Sizing:
    share = Decimal(per_pod) / pool.node.gpus
    cores, room = pool.node.cores, pool.node.bytes
    if fallback:  # the same pods must fit both pools
        cores, room = min(cores, fallback.node.cores), min(room, fallback.node.bytes)
    cpu = quantity.parse(workers.cpu) if workers.cpu else max(Decimal(1), (cores * share) // 1)
    memory = quantity.parse(workers.memory) if workers.memory else room * share
    spot = pool if pool.capacity_type == "spot" else None
    on_demand = fallback if spot else pool
    pods = workers.gpus // per_pod
    return _sizing(workers, pods, per_pod, cpu, memory, on_demand, spot)


def _sizing(
    workers: Workers,
    pods: int,
    per_pod: int,
    cpu: Decimal,
    memory: Decimal,
    on_demand: NodePool | None,
    spot: NodePool | None,
) -> Sizing:
    shared = quantity.parse(workers.shared_memory) if workers.shared_memory else memory / 4
    if shared > memory:
        raise DoesNotFit("workers.sharedMemory is part of workers.memory and must not exceed it")
    store = workers.object_store_memory
    stored = quantity.parse(store) if store else shared * 3 / 10
    if stored > shared:
        raise DoesNotFit(
            "workers.objectStoreMemory is part of workers.sharedMemory and must not exceed it"
        )
    return Sizing(
        pods=pods,
        gpus_per_pod=per_pod,
        cpu=cpu,
        memory=int(memory),
        shared_memory=int(shared),
        object_store_memory=max(int(stored), 80 * 2**20),  # Ray refuses less than 75 MiB
        on_demand=on_demand,
        spot=spot,
    )


def _no_pool(workers: Workers, catalogue: Catalogue) -> str:
    known = sorted({p.gpu_type for p in catalogue.pools if p.gpu_type})
    if not known:
        return (
            "the operator knows no node pool with GPUs: declare your pools in its nodePools "
            "(Helm values)"
        )
    return (
        f"no node pool has GPU type {_listed(workers.gpu_types)}: the operator knows "
        f"{_listed(known)}; correct workers.gpuTypes or declare the pool in nodePools"
    )


def _nearest(workers: Workers, pool: NodePool) -> str:
    node = pool.node
    shape = f"{node.gpus} GPUs, {node.cpu} CPUs and {node.memory}"
    if not _holds(workers, pool, 1):
        return (
            f"a worker of {workers.cpu or 'default'} CPUs and {workers.memory or 'default'} "
            f"memory does not fit a node of pool {pool.name} ({shape})"
        )
    if workers.replicas is not None:
        per_pod = workers.gpus // workers.replicas
        fewest = -(-workers.gpus // node.gpus)
        valid = [n for n in range(fewest, workers.gpus + 1) if workers.gpus % n == 0][:3]
        return (
            f"{per_pod} GPUs per pod do not fit a node of pool {pool.name} ({shape}): set "
            f"workers.replicas to {_listed(map(str, valid))}, or leave it out"
        )
    sizes = [n for n in range(1, node.gpus + 1) if n == 1 or node.gpus % n == 0]
    valid = sorted(
        set(sizes)
        | {workers.gpus // node.gpus * node.gpus, -(-workers.gpus // node.gpus) * node.gpus} - {0}
    )
    below = [n for n in valid if n < workers.gpus][-1:]
    above = [n for n in valid if n > workers.gpus][:1]
    return (
        f"{workers.gpus} GPUs do not fill whole equal pods on nodes of pool {pool.name} "
        f"({shape}): use {' or '.join(map(str, below + above))} GPUs, or set workers.replicas"
    )


def _listed(items: object) -> str:
    return ", ".join(items)  # type: ignore[arg-type]
