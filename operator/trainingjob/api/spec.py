"""`TrainingJob.spec`: what a user asks for."""

from typing import Annotated, Literal

from pydantic import Field

from trainingjob.api.base import ApiModel, Count, OpenObject, Quantity, Rule, Seconds

NonEmpty = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=253)]


class EnvVar(ApiModel):
    """An environment variable, as in a container of a Pod."""

    name: Name
    """Name of the variable."""
    value: Annotated[str, Field(max_length=96 * 1024)] | None = None
    """Value; at most 96 KiB, since the kernel refuses to start a process with longer ones."""
    value_from: OpenObject | None = None
    """Source of the value (secretKeyRef, configMapKeyRef, fieldRef), as in a Pod."""

    rules = (
        Rule(
            "!(has(self.value) && has(self.valueFrom))",
            "set value or valueFrom, not both",
            lambda e: e.value is None or e.value_from is None,
        ),
    )


EnvVars = Annotated[
    list[EnvVar],
    Field(
        max_length=256,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    ),
]
OpenList = Annotated[list[OpenObject], Field(max_length=64)]


class Workers(ApiModel):
    """The training workers: how many GPUs, of which kind, in how many pods."""

    gpus: Count = 0
    """GPUs in total, over all workers. 0: training on CPUs, then `replicas` is required."""
    gpu_types: Annotated[list[Name], Field(max_length=16)] = []
    """GPU types in order of preference, by their names in the operator's node-pool catalogue.
    Empty: any type."""
    replicas: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Worker pods. Derived from `gpus` and the shape of the pool's nodes when absent."""
    cpu: Quantity | None = None
    """CPUs of each worker pod. Default: its GPUs' share of the node; 1 without GPUs."""
    memory: Quantity | None = None
    """Memory of each worker pod. Default: its GPUs' share of the node; 4Gi without GPUs."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm of each worker pod, part of `memory`. Default: a quarter of it."""
    object_store_memory: Quantity | None = None
    """Ray's object store in each worker pod, part of `sharedMemory`. Default: 30 % of it."""

    rules = (
        Rule(
            "self.gpus > 0 || has(self.replicas)",
            "set gpus (training on GPUs) or replicas (training on CPUs)",
            lambda w: w.gpus > 0 or w.replicas is not None,
        ),
        Rule(
            "self.gpus == 0 || !has(self.replicas) || self.gpus % self.replicas == 0",
            "gpus must be a multiple of replicas: every worker pod holds the same number of GPUs",
            lambda w: w.gpus == 0 or w.replicas is None or w.gpus % w.replicas == 0,
            field=".replicas",
        ),
        Rule(
            "self.gpus > 0 || !has(self.gpuTypes) || size(self.gpuTypes) == 0",
            "gpuTypes needs gpus",
            lambda w: w.gpus > 0 or not w.gpu_types,
            field=".gpuTypes",
        ),
    )


class Spot(ApiModel):
    """Whether the workers run on spot (preemptible) nodes. The head never does."""

    policy: Literal["Never", "Prefer", "Require"] = "Never"
    """Never: on-demand nodes only. Require: spot nodes only. Prefer: spot nodes, and on-demand
    ones when spot pods stay unschedulable for `fallbackAfterSeconds`."""
    fallback_after_seconds: Seconds = 600
    """Prefer: how long spot pods may stay unschedulable before on-demand ones replace them."""


class PersistentVolumeClaim(ApiModel):
    """A claim in the job's namespace. Workers on several nodes need ReadWriteMany."""

    claim_name: Name
    """Name of the claim."""
    sub_path: Annotated[str, Field(max_length=4096)] = ""
    """Folder within the volume."""


class Checkpoint(ApiModel):
    """Where checkpoints are kept: the same place for every attempt, so that each one resumes."""

    uri: Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^(s3|gs|file)://.+$")] | (
        None
    ) = None
    """Object store or shared file system: s3://bucket/path, gs://bucket/path, file:///path."""
    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A claim, mounted in head and workers."""

    rules = (
        Rule(
            "has(self.uri) != has(self.persistentVolumeClaim)",
            "set exactly one of uri and persistentVolumeClaim",
            lambda c: (c.uri is None) != (c.persistent_volume_claim is None),
        ),
    )


class FailurePolicy(ApiModel):
    """How many failures of each class a job survives, and how long it waits between attempts."""

    max_user_failures: Count = 3
    """Failures of the training code that the job survives; the next one ends it."""
    max_infrastructure_failures: Count = 10
    """Failures of nodes, pods, network or Ray that the job survives."""
    max_preemptions: Count | None = None
    """Preemptions that the job survives. Absent: no limit."""
    reset_on_progress: bool = True
    """An attempt that wrote a newer checkpoint makes the budgets whole again."""
    backoff_seconds: Seconds = 10
    """Wait before the second retry in a row without progress; the first one is immediate. It
    doubles with each further one."""
    max_backoff_seconds: Seconds = 600
    """Longest wait."""

    rules = (
        Rule(
            "self.backoffSeconds <= self.maxBackoffSeconds",
            "backoffSeconds must not exceed maxBackoffSeconds",
            lambda p: p.backoff_seconds <= p.max_backoff_seconds,
            field=".backoffSeconds",
        ),
    )


class Deadlines(ApiModel):
    """Limits in time."""

    provisioning_seconds: Annotated[Seconds, Field(ge=1)] = 1800
    """How long a cluster may take until all its workers are ready, anew for each cluster."""
    total_seconds: Annotated[Seconds, Field(ge=1)] | None = None
    """How long the job may take, over all attempts, time suspended not counted. It is stopped
    gracefully, with a checkpoint. Absent: no limit."""


class Cleanup(ApiModel):
    """What is removed after the end."""

    ttl_seconds_after_finished: Seconds | None = None
    """Deletes the TrainingJob this long after its end. Absent: never. The Ray cluster goes at the
    end in any case."""


class PodGroup(ApiModel):
    """Overrides for the pods of one group."""

    pod_template: OpenObject | None = None
    """Parts of a PodTemplateSpec, merged over what the operator renders: `metadata.labels`,
    `metadata.annotations`, `spec`. Containers merge by name; Ray's is `ray-head` or
    `ray-worker`."""


class Head(PodGroup):
    """The head pod: Ray's control plane and the driver. It runs on on-demand nodes."""

    cpu: Quantity = "2"
    """CPUs of the head."""
    memory: Quantity = "8Gi"
    """Memory of the head. Below 3Gi Ray's own processes do not fit."""


class TrainingJobSpec(ApiModel):
    """What is to be trained, on what, and how failures are met."""

    image: NonEmpty
    """Image of head and workers: Ray, and all that the entrypoint needs."""
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=16)]
    """Version of Ray in the image, such as 2.60.0."""
    entrypoint: NonEmpty
    """Command of the driver, run by a shell on the head."""
    config: OpenObject = {}
    """Configuration for the entrypoint, handed to it as a file. A change applies to the job's
    next Ray cluster."""
    env: EnvVars = []
    """Environment of head and workers."""
    env_from: OpenList = []
    """Sources of environment variables, as in a container of a Pod."""
    runtime_env: OpenObject = {}
    """Ray runtime environment of the driver. What it holds is visible on the dashboard."""
    volumes: OpenList = []
    """Volumes of head and workers, as in a Pod."""
    volume_mounts: OpenList = []
    """Where the volumes are mounted, as in a container of a Pod."""
    workers: Workers
    """The training workers."""
    spot: Spot = Spot()
    """Spot nodes."""
    checkpoint: Checkpoint | None = None
    """Where checkpoints are kept. Without it a job that loses its cluster starts anew."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Budgets for failures."""
    deadlines: Deadlines = Deadlines()
    """Limits in time."""
    cleanup: Cleanup = Cleanup()
    """What is removed after the end."""
    suspend: bool = False
    """true stops the job gracefully, with a checkpoint, and frees its cluster; false goes on."""
    head: Head = Head()
    """The head pod."""
    worker: PodGroup = PodGroup()
    """The worker pods."""

    rules = (
        Rule(
            "int(self.rayVersion.split('.')[0]) > 2 || "
            "(int(self.rayVersion.split('.')[0]) == 2 && "
            "int(self.rayVersion.split('.')[1]) >= 52)",
            "rayVersion must be 2.52.0 or newer: older ones let anyone run code on the cluster",
            lambda s: tuple(map(int, s.ray_version.split(".")))[:2] >= (2, 52),
            field=".rayVersion",
        ),
        Rule(
            "self.spot.policy == 'Never' || self.workers.gpus > 0",
            "spot needs workers.gpus: spot pools are found by GPU type",
            lambda s: s.spot.policy == "Never" or s.workers.gpus > 0,
            field=".spot",
        ),
    )


IMMUTABLE_AFTER_START = (
    "image",
    "rayVersion",
    "entrypoint",
    "workers",
    "spot",
    "checkpoint",
    "head.cpu",
    "head.memory",
)
"""Paths below `spec` that the API server refuses to change once `status.startTime` is set."""
