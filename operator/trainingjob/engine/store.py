"""Jobs kept by the API server."""

from datetime import UTC, datetime

from trainingjob.api.job import InvalidJob, TrainingJob, parse
from trainingjob.api.status import rfc3339
from trainingjob.engine.jobs import Key
from trainingjob.kube import events
from trainingjob.kube.client import KubeClient, Object
from trainingjob.kube.errors import NotFound
from trainingjob.kube.resources import TRAINING_JOBS
from trainingjob.planning import actions as act
from trainingjob.planning import names


class KubeJobStore:
    """See `trainingjob.engine.jobs.JobStore`."""

    def __init__(self, client: KubeClient, component: str) -> None:
        self._client, self._component = client, component
        self._written: dict[Key, str] = {}

    def wrote(self, body: Object) -> bool:
        """Whether this version of a job is the one that this operator wrote last."""
        meta = body["metadata"]
        key = meta["namespace"], meta["name"]
        return self._written.get(key) == str(meta["resourceVersion"])

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._written.pop(key, None)

    async def read(self, key: Key) -> TrainingJob | None:
        """See `trainingjob.engine.jobs.JobStore`.

        Raises:
            InvalidJob: the stored object does not fit the types (an older schema let it in).
        """
        try:
            body = await self._client.get(TRAINING_JOBS, *key)
        except NotFound:
            return None
        return parse(body)

    async def write_status(self, job: TrainingJob) -> TrainingJob:
        """See `trainingjob.engine.jobs.JobStore`.

        Raises:
            Conflict: somebody wrote the job since it was read.
        """
        meta = job.metadata
        body = await self._client.replace_status(
            TRAINING_JOBS,
            {
                "apiVersion": job.api_version,
                "kind": job.kind,
                "metadata": {
                    "name": meta.name,
                    "namespace": meta.namespace,
                    "resourceVersion": meta.resource_version,
                },
                "spec": job.spec.dump(),
                "status": job.status.dump(),
            },
        )
        version = body["metadata"]["resourceVersion"]
        self._written[job.key] = version
        return job.model_copy(
            update={"metadata": meta.model_copy(update={"resource_version": version})}
        )

    async def execute(self, job: TrainingJob, action: act.Action) -> None:
        """Carries out one action on the job itself."""
        meta = job.metadata
        match action:
            case act.AddFinalizer():
                await self._finalizers(job, [*meta.finalizers, names.FINALIZER])
            case act.RemoveFinalizer():
                await self._finalizers(job, [f for f in meta.finalizers if f != names.FINALIZER])
            case act.DeleteJob():
                await self._client.delete(TRAINING_JOBS, meta.namespace, meta.name, uid=meta.uid)
            case act.Announce(kind, reason, message):
                await events.publish(self._client, meta, kind, reason, message, self._component)
            case _:
                raise AssertionError(f"not an action on jobs: {action}")

    async def _finalizers(self, job: TrainingJob, wanted: list[str]) -> None:
        meta = job.metadata
        patch = {"metadata": {"finalizers": wanted, "resourceVersion": meta.resource_version}}
        try:
            await self._client.patch(TRAINING_JOBS, meta.namespace, meta.name, patch)
        except NotFound:
            return

    async def report_invalid(self, key: Key, error: InvalidJob) -> None:
        """Says in the status of a job that cannot be read what is wrong with it."""
        try:
            body = await self._client.get(TRAINING_JOBS, *key)
        except NotFound:
            return
        before = {c["type"]: c for c in body.get("status", {}).get("conditions", [])}
        message = f"the stored object is not valid: {error}"
        generation = body["metadata"]["generation"]
        conditions = [
            {
                "type": kind,
                "status": value,
                "reason": "InvalidSpec",
                "message": message[:2000],
                "lastTransitionTime": _since(before.get(kind), value),
                "observedGeneration": generation,
            }
            for kind, value in (("Stalled", "True"), ("Ready", "False"))
        ]
        if [c.get("message") for c in before.values()] == [c["message"] for c in conditions]:
            return
        body["status"] = {
            **body.get("status", {}),
            "observedGeneration": generation,
            "message": message[:2000],
            "conditions": conditions,
        }
        await self._client.replace_status(TRAINING_JOBS, body)


def _since(before: Object | None, value: str) -> str:
    if before and before["status"] == value:
        return str(before["lastTransitionTime"])
    return rfc3339(datetime.now(UTC))
