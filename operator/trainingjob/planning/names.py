"""Names and labels of all that a job owns: functions of the job, so writes are idempotent."""

import hashlib

from trainingjob.api.job import GROUP, Metadata

JOB_LABEL = f"{GROUP}/job"
UID_LABEL = f"{GROUP}/job-uid"
GENERATION_LABEL = f"{GROUP}/cluster-generation"
MANAGED_LABEL = f"{GROUP}/managed"
FINALIZER = f"{GROUP}/ray-cluster"
FIELD_MANAGER = "trainingjob-operator"

# Tracking keys: an object that carries them is pruned or upgraded by the tool that set them.
_TRACKING = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by")
_TRACKING_DOMAINS = ("helm.sh", "argocd.argoproj.io", "kubectl.kubernetes.io")


def cluster(metadata: Metadata, generation: int) -> str:
    """Name of the job's RayCluster number `generation`; at most 46 characters (KubeRay: 53)."""
    digest = hashlib.sha256(f"{metadata.uid}/{generation}".encode()).hexdigest()
    return f"{metadata.name}-{digest[:5]}"


def submission(metadata: Metadata, number: int) -> str:
    """Id of the job's Ray submission number `number`."""
    return f"{metadata.name}-{metadata.uid.replace('-', '')[:8]}-{number}"


def progress_file(submission_id: str) -> str:
    """Name of the progress file within Ray's log directory."""
    return f"trainingjob-progress-{submission_id}.jsonl"


def driver_log(submission_id: str) -> str:
    """Name of the driver's log within Ray's log directory (set by Ray)."""
    return f"job-driver-{submission_id}.log"


def labels(metadata: Metadata) -> dict[str, str]:
    """Labels of the job's children: the job's own, without tracking keys, and ours."""
    kept = {
        k: v
        for k, v in metadata.labels.items()
        if k not in _TRACKING and not _tracked(k.partition("/")[0])
    }
    ours = {JOB_LABEL: metadata.name, UID_LABEL: metadata.uid, MANAGED_LABEL: "true"}
    return {**kept, **ours}


def _tracked(domain: str) -> bool:
    return domain in _TRACKING_DOMAINS or domain.endswith(".toolkit.fluxcd.io")
