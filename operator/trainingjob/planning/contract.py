"""The contract with the entrypoint: what the operator puts into the driver's environment.

The other side is `trainingjob_trainer.contract`; neither imports the other.
"""

import json
from typing import Any

from trainingjob.api.job import TrainingJob
from trainingjob.planning.sizing import Sizing
from trainingjob.planning.unfit import Unfit

CONFIG_LIMIT = 900 * 1024
ENVIRONMENT_LIMIT = 1024 * 1024


def config_file(job: TrainingJob) -> str:
    """The text of the entrypoint's configuration file (JSON, and so YAML)."""
    return json.dumps(job.spec.config, indent=1, sort_keys=True)


def check_sizes(job: TrainingJob) -> None:
    """Refuses what would not fit a ConfigMap or an environment.

    Raises:
        Unfit: with what is too large and what to do.
    """
    size = len(config_file(job).encode())
    if size > CONFIG_LIMIT:
        raise Unfit(
            "ConfigTooLarge",
            f"spec.config has {size} bytes, at most {CONFIG_LIMIT} fit a ConfigMap: keep large "
            "parts in the image or on a volume and name their paths",
        )
    total = sum(len(e.name) + len(e.value or "") for e in job.spec.env)
    if total > ENVIRONMENT_LIMIT:
        raise Unfit(
            "EnvironmentTooLarge",
            f"spec.env has {total} bytes, at most {ENVIRONMENT_LIMIT} are possible: use files",
        )


def driver_environment(
    job: TrainingJob,
    sizing: Sizing,
    *,
    attempt: int,
    storage: str | None,
    config: str,
    progress: str,
) -> dict[str, str]:
    """The variables of design and docs/contract.md for one attempt."""
    made = {
        "TRAININGJOB_NAME": job.metadata.name,
        "TRAININGJOB_NAMESPACE": job.metadata.namespace,
        "TRAININGJOB_UID": job.metadata.uid,
        "TRAININGJOB_ATTEMPT": str(attempt),
        "TRAININGJOB_NUM_WORKERS": str(sizing.train_workers),
        "TRAININGJOB_GPUS_PER_WORKER": "1" if sizing.gpus_per_pod else "0",
        "TRAININGJOB_CPUS_PER_WORKER": str(sizing.cpus_per_train_worker),
        "TRAININGJOB_PLACEMENT": "PACK",
        "TRAININGJOB_CONFIG": config,
        "TRAININGJOB_PROGRESS": progress,
    }
    if storage:
        made["TRAININGJOB_STORAGE"] = storage
    return made


def runtime_env(
    job: TrainingJob, environment: dict[str, str], stop_grace_seconds: int
) -> dict[str, Any]:
    """The runtime environment of the Ray job: the user's, and the contract's variables."""
    own = dict(job.spec.runtime_env)
    variables = dict(own.pop("env_vars", {}) or {})
    # Ray kills a stopped driver after 3 s otherwise: too soon for a checkpoint.
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(stop_grace_seconds)
    return {**own, "env_vars": {**variables, **environment}}


def submission_metadata(job: TrainingJob, attempt: int) -> dict[str, str]:
    """Metadata by which a submission is known to be this job's own."""
    return {"trainingjob_uid": job.metadata.uid, "trainingjob_attempt": str(attempt)}
