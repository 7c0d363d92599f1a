"""Ray clusters on Kubernetes, run by KubeRay."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

import aiohttp

from trainingjob.api.job import TrainingJob
from trainingjob.backends import driver as driver_view
from trainingjob.backends import pods as pod_view
from trainingjob.kube.client import KubeClient, Object
from trainingjob.kube.errors import Conflict, NotFound
from trainingjob.kube.resources import (
    BY_KIND,
    EVENTS,
    NODES,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
)
from trainingjob.planning import actions as act
from trainingjob.planning import contract, names, raycluster
from trainingjob.planning.catalogue import Catalogue
from trainingjob.planning.lifecycle import STOP_GRACE_SECONDS
from trainingjob.planning.observed import Cluster, Observed, Ray, Trouble
from trainingjob.planning.sizing import size
from trainingjob.rayapi.client import Dashboard

log = logging.getLogger(__name__)

_SILENT_SECONDS = 5
"""After this a cluster without head, or a pod without containers, is asked for its events."""


class NodeTable:
    """The nodes that a watch has told of, and whether each is lost.

    With `enabled` false nodes cannot be read, and none is ever known to be lost.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lost: dict[str, bool] = {}

    def note(self, node: Object, *, deleted: bool) -> bool:
        """Takes over an event; True when the node was lost by it."""
        name = node["metadata"]["name"]
        before = self._lost.get(name, False)
        if deleted:
            self._lost.pop(name, None)
            return True
        self._lost[name] = pod_view.node_lost(node)
        return self._lost[name] and not before

    def lost(self, name: str) -> bool | None:
        """Whether the node is lost; None when the watch has not told of it."""
        return self._lost.get(name) if self.enabled else False


class KubeRayBackend:
    """See `trainingjob.backends.Backend`."""

    def __init__(
        self,
        client: KubeClient,
        session: aiohttp.ClientSession,
        catalogue: Catalogue,
        token_key: bytes,
        nodes: NodeTable,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client, self._session, self._catalogue = client, session, catalogue
        self._key, self._nodes, self._clock = token_key, nodes, clock

    # -- observing -----------------------------------------------------------------------------

    async def observe(self, job: TrainingJob) -> Observed:
        """What is there of the job's cluster and driver.

        Raises:
            KubeError: the API server did not answer.
        """
        known = job.status.cluster
        if known is None:
            others = await self._clusters(job) if job.status.clusters else ()
            return Observed(others=others)
        try:
            stored = await self._client.get(RAY_CLUSTERS, job.metadata.namespace, known.name)
        except NotFound:
            return Observed(others=await self._clusters(job))
        pods = await self._client.find(
            PODS, job.metadata.namespace, labels=f"ray.io/cluster={known.name}"
        )
        cluster = await self._cluster(job, stored, pods)
        if not cluster.address or cluster.deleting:
            return Observed(cluster=cluster, ray=Ray(reachable=False, error="no head"))
        ray, training, text = await driver_view.look(self._dashboard(job, cluster.address), job)
        return Observed(cluster=cluster, ray=ray, training=training, log=text)

    async def _clusters(self, job: TrainingJob) -> tuple[str, ...]:
        """Names of the job's clusters of which anything is left, be it only pods."""
        labels = f"{names.UID_LABEL}={job.metadata.uid}"
        clusters, pods = await asyncio.gather(
            self._client.find(RAY_CLUSTERS, job.metadata.namespace, labels=labels),
            self._client.find(PODS, job.metadata.namespace, labels=labels),
        )
        found = {c["metadata"]["name"] for c in clusters}
        for pod in pods:
            if pod.get("status", {}).get("phase") not in ("Failed", "Succeeded"):
                found.add(pod["metadata"]["labels"]["ray.io/cluster"])
        return tuple(sorted(found))

    async def _cluster(self, job: TrainingJob, stored: Object, pods: list[Object]) -> Cluster:
        workers = [p for p in pods if not pod_view.is_head(p)]
        lost = {
            name
            for name in {p["spec"]["nodeName"] for p in pods if p["spec"].get("nodeName")}
            if await self._node_lost(name)
        }
        address = pod_view.running_address(pods)
        known = job.status.cluster
        assert known is not None
        return Cluster(
            name=known.name,
            deleting=bool(stored["metadata"].get("deletionTimestamp")),
            head=pod_view.head(pods, lost.__contains__),
            workers_ready=sum(
                pod_view.ready(p) for p in workers if p["spec"].get("nodeName") not in lost
            ),
            troubles=tuple(await self._troubles(stored, pods)),
            dead_pods=tuple(pod_view.dead(pods, lost.__contains__)),
            lost_fields=() if known.head_pod_uid else self._lost_fields(job, stored),
            spot_unschedulable_seconds=self._spot_waits(workers),
            address=f"http://{address}:{raycluster.DASHBOARD_PORT}" if address else None,
        )

    async def _node_lost(self, name: str) -> bool:
        told = self._nodes.lost(name)
        if told is not None:
            return told
        try:
            return pod_view.node_lost(await self._client.get(NODES, None, name))
        except NotFound:
            return True

    async def _troubles(self, stored: Object, pods: list[Object]) -> list[Trouble]:
        found = [t for t in map(pod_view.trouble, pods) if t]
        for condition in stored.get("status", {}).get("conditions", []):
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                found.insert(0, Trouble(condition["reason"], condition.get("message", "")))
        if found:
            return found
        now = self._clock()
        silent = [
            p
            for p in pods
            if (since := pod_view.creating_since(p))
            and (now - since).total_seconds() > _SILENT_SECONDS
        ]
        age = now - pod_view.parse_time(stored["metadata"]["creationTimestamp"])
        if not pods and age.total_seconds() > _SILENT_SECONDS:
            silent.append(stored)
        for subject in silent:
            found += await self._warnings(subject)
        return found

    async def _warnings(self, subject: Object) -> list[Trouble]:
        """The newest warning about an object: KubeRay and the kubelet tell some things only so."""
        meta = subject["metadata"]
        events = await self._client.find(
            EVENTS,
            meta["namespace"],
            fields=f"involvedObject.uid={meta['uid']},type=Warning",
        )
        if not events:
            return []
        last = max(events, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")
        return [
            Trouble(
                last.get("reason", "Warning"),
                f"{meta['name']}: {last.get('message', '')}",
                meta["name"],
            )
        ]

    def _lost_fields(self, job: TrainingJob, stored: Object) -> tuple[str, ...]:
        sent = raycluster.ray_cluster(self._plan(job))
        return tuple(raycluster.lost_fields(sent["spec"], stored["spec"], "spec"))

    def _spot_waits(self, workers: list[Object]) -> float:
        spot = [
            p for p in workers if p["metadata"]["labels"].get("ray.io/group") == raycluster.SPOT
        ]
        since = [s for s in map(pod_view.unschedulable_since, spot) if s]
        return (self._clock() - min(since)).total_seconds() if since else 0

    # -- acting ------------------------------------------------------------------------------------

    async def execute(self, job: TrainingJob, action: act.Action) -> None:
        """Carries out one action.

        Raises:
            KubeError, RayError: it could not be done now.
        """
        match action:
            case act.EnsureCluster():
                *beside, cluster = raycluster.manifests(self._plan(job))
                # A pod that starts before its Secret is there is retried only after a while.
                await asyncio.gather(*map(self._apply, beside))
                await self._apply(cluster)
            case act.DeleteCluster(name):
                await self._delete_cluster(job, name)
            case act.DeletePod(name, uid):
                await self._delete_pod(job, name, uid)
            case act.FallBackToOnDemand(name):
                await self._fall_back(job, name)
            case act.Submit(submission_id, attempt):
                await self._submit(job, submission_id, attempt)
            case act.StopDriver(submission_id):
                if address := _address(job):
                    await self._dashboard(job, address).stop(submission_id)
            case _:
                raise AssertionError(f"not an action on clusters: {action}")

    async def _apply(self, manifest: Object) -> None:
        kind = BY_KIND[manifest["kind"]]
        if kind is not SECRETS:
            await self._client.apply(kind, manifest)
            return
        # The right to patch a Secret is the right to read it, since the answer holds it.
        try:
            await self._client.create(kind, manifest)
        except Conflict:
            log.debug("secret %s is there already", manifest["metadata"]["name"])

    def _plan(self, job: TrainingJob) -> raycluster.ClusterPlan:
        assert job.status.cluster is not None
        return raycluster.ClusterPlan(
            job=job,
            sizing=size(job.spec.workers, self._catalogue, job.spec.spot.policy),
            catalogue=self._catalogue,
            generation=job.status.cluster.generation,
            token=raycluster.token(self._key, job.metadata.uid),
            on_demand=job.status.cluster.on_demand,
        )

    async def _delete_cluster(self, job: TrainingJob, name: str) -> None:
        namespace = job.metadata.namespace
        # Pods first, and at once: the training is over, and what Ray's drain would wait for is not
        # there any more. Left to the garbage collector they would hold their GPUs for their whole
        # grace period, which a kubelet does not shorten afterwards. KubeRay replaces no pod that
        # is on its way out.
        for pod in await self._client.find(PODS, namespace, labels=f"ray.io/cluster={name}"):
            meta = pod["metadata"]
            if (node := pod["spec"].get("nodeName")) and await self._node_lost(node):
                await self._delete_pod(job, meta["name"], meta["uid"])
            elif meta.get("deletionGracePeriodSeconds", 60) > 1:
                await self._delete_pod(job, meta["name"], meta["uid"], 1)
        await self._client.delete(RAY_CLUSTERS, namespace, name)
        for kind in ("Secret", "ConfigMap"):
            await self._client.delete(BY_KIND[kind], namespace, name)

    async def _delete_pod(self, job: TrainingJob, name: str, uid: str, grace: int = 0) -> None:
        try:
            await self._client.delete(
                PODS, job.metadata.namespace, name, uid=uid, grace_seconds=grace
            )
        except Conflict:
            log.info("pod %s has been replaced already", name)

    async def _fall_back(self, job: TrainingJob, name: str) -> None:
        pods = self._plan(job).sizing.pods
        wanted = [(0, raycluster.SPOT, 0), (1, raycluster.ON_DEMAND, pods)]
        patch: list[Object] = []
        for index, group, replicas in wanted:
            path = f"/spec/workerGroupSpecs/{index}"
            patch += [
                {"op": "test", "path": f"{path}/groupName", "value": group},
                {"op": "replace", "path": f"{path}/replicas", "value": replicas},
            ]
        await self._client.patch(RAY_CLUSTERS, job.metadata.namespace, name, patch)

    async def _submit(self, job: TrainingJob, submission_id: str, attempt: int) -> None:
        address = _address(job)
        if address is None:
            return
        environment = contract.driver_environment(
            job,
            self._plan(job).sizing,
            attempt=attempt,
            storage=raycluster.storage(job),
            config=raycluster.CONFIG_PATH,
            progress=f"{raycluster.LOG_DIRECTORY}/{names.progress_file(submission_id)}",
        )
        await self._dashboard(job, address).submit(
            submission_id,
            job.spec.entrypoint,
            contract.runtime_env(job, environment, STOP_GRACE_SECONDS),
            contract.submission_metadata(job, attempt),
        )

    def _dashboard(self, job: TrainingJob, address: str) -> Dashboard:
        token = raycluster.token(self._key, job.metadata.uid)
        return Dashboard(self._session, address, token)


def _address(job: TrainingJob) -> str | None:
    return job.status.cluster.dashboard_url if job.status.cluster else None
