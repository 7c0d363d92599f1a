"""The RayCluster of a job, and the ConfigMap and Secret beside it, as manifests."""

import hashlib
import hmac
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trainingjob.api.job import API_VERSION, KIND, TrainingJob
from trainingjob.planning import contract, names, quantity
from trainingjob.planning.catalogue import Catalogue, NodePool
from trainingjob.planning.podtemplate import merge
from trainingjob.planning.sizing import Sizing

CONFIG_DIRECTORY = "/etc/trainingjob"
CONFIG_PATH = f"{CONFIG_DIRECTORY}/config.json"
STORAGE_PATH = "/var/trainingjob/storage"
LOG_DIRECTORY = "/tmp/ray/session_latest/logs"
DASHBOARD_PORT = 8265
TOKEN_KEY = "token"
SPOT, ON_DEMAND = "spot", "on-demand"

DRAIN_SECONDS = 30
"""How long a worker that is asked to go may train on; Ray tells the training at once."""
_WORKER_GRACE_SECONDS = DRAIN_SECONDS + 20
_HEAD_GRACE_SECONDS = 15

_NO_EVICTION = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that a job's cluster number `generation` is rendered from."""

    job: TrainingJob
    sizing: Sizing
    catalogue: Catalogue
    generation: int
    token: str
    on_demand: bool = False

    @property
    def name(self) -> str:
        """Name of the RayCluster, its ConfigMap and its Secret."""
        return names.cluster(self.job.metadata, self.generation)


def token(key: bytes, uid: str) -> str:
    """The Ray authentication token of the job `uid`: only who has the operator's key knows it."""
    return hmac.new(key, f"ray-token/{uid}".encode(), hashlib.sha256).hexdigest()


def manifests(plan: ClusterPlan) -> list[dict[str, Any]]:
    """Secret, ConfigMap and RayCluster, in the order in which they are needed.

    Raises:
        Unfit: a pod template or the size of config or environment is not acceptable.
    """
    return [_secret(plan), _config_map(plan), ray_cluster(plan)]


def check(job: TrainingJob, sizing: Sizing, catalogue: Catalogue) -> None:
    """Refuses a job whose cluster cannot be rendered.

    Raises:
        Unfit: see `manifests`.
    """
    ray_cluster(ClusterPlan(job, sizing, catalogue, generation=1, token=""))


def storage(job: TrainingJob) -> str | None:
    """Where the entrypoint finds the checkpoint storage: a URI, or a path in the pods."""
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return None
    return checkpoint.uri or STORAGE_PATH


def ray_cluster(plan: ClusterPlan) -> dict[str, Any]:
    """The RayCluster."""
    contract.check_sizes(plan.job)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            **_metadata(plan),
            # A head that KubeRay replaces silently would lose the driver without a sign.
            "annotations": {"ray.io/disable-provisioned-head-restart": "true"},
        },
        "spec": {
            "rayVersion": plan.job.spec.ray_version,
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {
                    "num-cpus": "0",
                    "num-gpus": "0",
                    "dashboard-host": "0.0.0.0",
                    "disable-usage-stats": "true",
                },
                "template": _head(plan),
            },
            "workerGroupSpecs": _groups(plan),
        },
    }


def _metadata(plan: ClusterPlan) -> dict[str, Any]:
    meta = plan.job.metadata
    return {
        "name": plan.name,
        "namespace": meta.namespace,
        "labels": {**names.labels(meta), names.GENERATION_LABEL: str(plan.generation)},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": meta.name,
                "uid": meta.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _secret(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(plan),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: plan.token},
    }


def _config_map(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(plan),
        "data": {"config.json": contract.config_file(plan.job)},
    }


def _groups(plan: ClusterPlan) -> list[dict[str, Any]]:
    """The worker groups. Their order never changes: patches address them by index."""
    sizing, pods = plan.sizing, plan.sizing.pods
    if sizing.spot is None:
        return [_group(plan, ON_DEMAND, sizing.on_demand, pods, pods)]
    if sizing.on_demand is None:
        return [_group(plan, SPOT, sizing.spot, pods, pods)]
    spot, on_demand = (0, pods) if plan.on_demand else (pods, 0)
    return [
        _group(plan, SPOT, sizing.spot, spot, 0),
        _group(plan, ON_DEMAND, sizing.on_demand, on_demand, 0),
    ]


def _group(
    plan: ClusterPlan, name: str, pool: NodePool | None, replicas: int, minimum: int
) -> dict[str, Any]:
    sizing = plan.sizing
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": minimum,
        "maxReplicas": sizing.pods,
        "rayStartParams": {
            "num-cpus": str(sizing.ray_cpus),
            "num-gpus": str(sizing.gpus_per_pod),
            "object-store-memory": str(sizing.object_store_memory),
            "disable-usage-stats": "true",
        },
        "template": _worker(plan, pool),
    }


def _head(plan: ClusterPlan) -> dict[str, Any]:
    head = plan.job.spec.head
    resources = {"cpu": head.cpu, "memory": head.memory}
    container = {
        **_container(plan, "ray-head", resources, drain_seconds=0),
        "ports": [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": DASHBOARD_PORT},
            {"name": "client", "containerPort": 10001},
            {"name": "metrics", "containerPort": 8080},
        ],
        "readinessProbe": _probe(DASHBOARD_PORT, "/api/gcs_healthz"),
    }
    pool = _head_pool(plan)
    template = _template(plan, container, pool, _HEAD_GRACE_SECONDS, [])
    return merge(template, head.pod_template or {}, "spec.head.podTemplate")


def _head_pool(plan: ClusterPlan) -> NodePool | None:
    cpu = quantity.parse(plan.job.spec.head.cpu)
    memory = quantity.parse(plan.job.spec.head.memory)
    for pool in plan.catalogue.pools:
        fits = pool.node.cores >= cpu and pool.node.bytes >= memory
        if not pool.gpu_type and pool.capacity_type == ON_DEMAND and fits:
            return pool
    return None


def _worker(plan: ClusterPlan, pool: NodePool | None) -> dict[str, Any]:
    sizing = plan.sizing
    resources = {
        "cpu": quantity.cores(sizing.cpu),
        "memory": quantity.mebibytes(Decimal(sizing.memory)),
    }
    if sizing.gpus_per_pod and pool:
        resources[pool.resource] = str(sizing.gpus_per_pod)
    container = {
        **_container(plan, "ray-worker", resources, drain_seconds=DRAIN_SECONDS),
        "readinessProbe": _probe(52365, "/api/local_raylet_healthz"),
    }
    container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
    limit = quantity.mebibytes(Decimal(sizing.shared_memory))
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]
    template = _template(plan, container, pool, _WORKER_GRACE_SECONDS, volumes)
    return merge(template, plan.job.spec.worker.pod_template or {}, "spec.worker.podTemplate")


def _container(
    plan: ClusterPlan, name: str, resources: dict[str, str], *, drain_seconds: int
) -> dict[str, Any]:
    spec = plan.job.spec
    env: list[dict[str, Any]] = [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {
            "name": "RAY_AUTH_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": plan.name, "key": TOKEN_KEY}},
        },
        # Ray would run training at nice 15, behind any other process of the node.
        {"name": "RAY_worker_niceness", "value": "0"},
        {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": str(drain_seconds)},
    ]
    ours = {e["name"] for e in env}
    mounts: list[dict[str, Any]] = [
        {"name": "trainingjob-config", "mountPath": CONFIG_DIRECTORY, "readOnly": True}
    ]
    claim = spec.checkpoint and spec.checkpoint.persistent_volume_claim
    if claim:
        mount = {"name": "trainingjob-storage", "mountPath": STORAGE_PATH}
        mounts.append({**mount, "subPath": claim.sub_path} if claim.sub_path else mount)
    return {
        "name": name,
        "image": spec.image,
        "env": [*env, *(e.dump() for e in spec.env if e.name not in ours)],
        **({"envFrom": spec.env_from} if spec.env_from else {}),
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [*mounts, *spec.volume_mounts],
    }


def _template(
    plan: ClusterPlan,
    container: dict[str, Any],
    pool: NodePool | None,
    grace: int,
    volumes: list[dict[str, Any]],
) -> dict[str, Any]:
    spec = plan.job.spec
    own: list[dict[str, Any]] = [
        {"name": "trainingjob-config", "configMap": {"name": plan.name}},
        *volumes,
    ]
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    claim = spec.checkpoint and spec.checkpoint.persistent_volume_claim
    if claim:
        own.append(
            {
                "name": "trainingjob-storage",
                "persistentVolumeClaim": {"claimName": claim.claim_name},
            }
        )
        # New volumes belong to root; the image's user must be able to write.
        security |= {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    labels = {**names.labels(plan.job.metadata), names.GENERATION_LABEL: str(plan.generation)}
    return {
        "metadata": {"labels": labels, "annotations": dict(_NO_EVICTION)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": security,
            "containers": [container],
            "volumes": [*own, *spec.volumes],
            **({"nodeSelector": dict(pool.node_selector)} if pool and pool.node_selector else {}),
            **({"tolerations": list(pool.tolerations)} if pool and pool.tolerations else {}),
        },
    }


def _probe(port: int, path: str) -> dict[str, Any]:
    # KubeRay's own waits 10 s before the first look.
    return {
        "httpGet": {"port": port, "path": path},
        "periodSeconds": 1,
        "timeoutSeconds": 5,
        "failureThreshold": 10,
    }


def lost_fields(sent: Any, stored: Any, path: str = "") -> list[str]:
    """Paths that `sent` has and `stored` lacks: what the API server did not keep.

    Changed values are not looked at: others (image mirrors, defaults) may have their reasons.
    """
    if isinstance(sent, dict):
        if not isinstance(stored, dict):
            return [path]
        return [
            lost
            for key, value in sent.items()
            if value not in (None, {}, [])
            for lost in (
                lost_fields(value, stored[key], f"{path}.{key}" if path else key)
                if key in stored
                else [f"{path}.{key}" if path else key]
            )
        ]
    if isinstance(sent, list) and isinstance(stored, list):
        if len(stored) < len(sent):
            return [path]
        pairs = zip(sent, stored, strict=False)
        return [lost for a, b in pairs for lost in lost_fields(a, b, path)]
    return []
