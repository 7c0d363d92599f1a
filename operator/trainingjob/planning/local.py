"""A job on one machine without Kubernetes: what of it this machine can run, and how it goes on."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import PurePath

from trainingjob.api.job import TrainingJob
from trainingjob.api.spec import Cleanup, Head, PodGroup, Spot, TrainingJobSpec, Workers
from trainingjob.api.status import (
    Attempt,
    FailureCounts,
    Outcome,
    Phase,
    TrainingJobStatus,
)
from trainingjob.planning import quantity
from trainingjob.planning.catalogue import Catalogue, NodePool, NodeShape
from trainingjob.planning.unfit import Unfit

GPU_TYPE = "local"


@dataclass(frozen=True)
class Host:
    """What this machine can give to a job; `memory` in bytes."""

    cpus: int
    gpus: int
    memory: int
    ray_version: str = ""
    """Version of the installed Ray; empty when it is not known."""


def catalogue(host: Host) -> Catalogue:
    """The machine as the only node of the only pool."""
    if not host.gpus:
        return Catalogue()
    shape = NodeShape(gpus=host.gpus, cpu=str(host.cpus), memory=_bytes(host.memory))
    return Catalogue(pools=[NodePool(name="this-machine", gpu_type=GPU_TYPE, node=shape)])


def localise(job: TrainingJob, host: Host) -> tuple[TrainingJob, list[str]]:
    """The job as `host` can run it, and what is different, in plain words.

    Raises:
        Unfit: it takes something from Kubernetes that it cannot do without.
    """
    spec = job.spec
    _refuse_kubernetes_sources(spec)
    storage(job, PurePath())
    workers, notices = _workers(spec.workers, host)
    if spec.spot.policy != "Never":
        notices.append("spec.spot is left out: this machine is neither spot nor on-demand")
    if spec.volumes or spec.volume_mounts:
        mounts = ", ".join(str(m.get("mountPath")) for m in spec.volume_mounts) or "none"
        notices.append(
            f"spec.volumes is left out: paths of the mounts ({mounts}) must exist on this machine"
        )
    if spec.suspend:
        notices.append("spec.suspend is left out: the job starts now")
    if host.ray_version and host.ray_version != spec.ray_version:
        notices.append(
            f"this machine has Ray {host.ray_version}, spec.rayVersion is {spec.ray_version}"
        )
    local = spec.model_copy(
        update={
            "workers": workers,
            "spot": Spot(),
            "cleanup": Cleanup(),
            "suspend": False,
            "volumes": [],
            "volume_mounts": [],
            "head": Head(),
            "worker": PodGroup(),
        }
    )
    return job.model_copy(update={"spec": local}), notices


def _refuse_kubernetes_sources(spec: TrainingJobSpec) -> None:
    remedy = "for a run on this machine set the variable with env[].value"
    if spec.env_from:
        raise Unfit(
            "NotLocal",
            f"spec.envFrom takes variables from the Kubernetes cluster: {remedy}",
        )
    for index, variable in enumerate(spec.env):
        if variable.value_from is not None:
            raise Unfit(
                "NotLocal",
                f"spec.env[{index}].valueFrom ({variable.name}) takes its value from the "
                f"Kubernetes cluster: {remedy}",
            )


def _workers(asked: Workers, host: Host) -> tuple[Workers, list[str]]:
    if asked.gpus and host.gpus:
        gpus = _fitting(asked.gpus, host.gpus)
        notices = (
            [
                f"this machine has {_count(host.gpus, 'GPU')}: training on {gpus} instead of "
                f"{asked.gpus}; the global batch stays the same"
            ]
            if gpus < asked.gpus
            else []
        )
        # On one node more than one pod would only cut the same GPUs into pieces.
        return Workers(gpus=gpus, replicas=1, cpu=str(max(1, host.cpus * gpus // host.gpus))), (
            notices
        )
    wanted = asked.gpus or asked.replicas or 1
    replicas = _fitting(wanted, host.cpus)
    share = max(1, host.cpus // replicas)
    cpu = min(Decimal(share), quantity.parse(asked.cpu)) if asked.cpu and not asked.gpus else None
    memory = quantity.parse(asked.memory or "4Gi") if not asked.gpus else Decimal(host.memory)
    workers = Workers(
        replicas=replicas,
        cpu=quantity.cores(Decimal(share) if asked.gpus else cpu or Decimal(1)),
        memory=_bytes(min(memory, Decimal(host.memory // replicas))),
    )
    if asked.gpus:
        return workers, [
            f"this machine has no GPU: training on {_count(replicas, 'CPU worker')} instead of "
            f"{_count(asked.gpus, 'GPU')}; the global batch stays the same"
        ]
    if replicas < wanted:
        return workers, [
            f"this machine has {_count(host.cpus, 'CPU')}: training on "
            f"{_count(replicas, 'worker')} instead of {wanted}; the global batch stays the same"
        ]
    return workers, []


def _fitting(asked: int, room: int) -> int:
    """The most workers that fit and divide what was asked for, so that a global batch made for
    `asked` workers can still be shared out evenly."""
    return next(n for n in range(max(1, min(asked, room)), 0, -1) if asked % n == 0)


def _bytes(number: int | Decimal) -> str:
    return quantity.mebibytes(Decimal(number))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def storage(job: TrainingJob, directory: PurePath) -> str:
    """Where the job's checkpoints are kept: its URI, or a place below the run's `directory`.

    Raises:
        Unfit: the place would be elsewhere.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return str(directory / "checkpoints")
    claim = checkpoint.persistent_volume_claim
    if claim is None:
        return str(checkpoint.uri)
    below = PurePath(claim.claim_name, claim.sub_path)
    if below.is_absolute() or ".." in below.parts or "/" in claim.claim_name:
        raise Unfit(
            "NotLocal",
            "spec.checkpoint.persistentVolumeClaim: claimName must be a name and subPath a path "
            "within the volume",
        )
    return str(directory / "volumes" / below)


def continued(status: TrainingJobStatus, saved: datetime, now: datetime) -> TrainingJobStatus:
    """The status with which another command goes on where one ended that last wrote at `saved`.

    Whatever ran is gone with the command that ran it, which is no failure of the job. A failed
    job gets its budgets and deadlines anew.
    """
    changes: dict[str, object] = {
        "cluster": None,
        "workers": None,
        "worker_summary": "",
        "retry_time": None,
        "stop_requested_time": None,
        "active_since": None,
        "attempts": [_closed(a, saved) for a in status.attempts],
    }
    if status.active_since:
        ran = max(0.0, (saved - status.active_since).total_seconds())
        changes["active_seconds"] = status.active_seconds + int(ran)
    if status.phase is Phase.FAILED:
        changes |= {
            "phase": Phase.PENDING,
            "message": "",
            "conditions": [],
            "charged": FailureCounts(),
            "active_seconds": 0,
            "completion_time": None,
        }
    return status.model_copy(update=changes)


def _closed(attempt: Attempt, saved: datetime) -> Attempt:
    if attempt.end_time is not None:
        return attempt
    return attempt.model_copy(
        update={
            "end_time": max(saved, attempt.start_time),
            "outcome": Outcome.NOT_CHARGED,
            "reason": "CommandEnded",
            "message": "the command that ran it was ended",
        }
    )
