"""Kopf as the source of events: each one only says which job to look at again."""

from typing import Any

import kopf

from trainingjob.api.job import GROUP, PLURAL, VERSION
from trainingjob.backends.kuberay import NodeTable
from trainingjob.engine.jobs import Key
from trainingjob.engine.metrics import JobPhases
from trainingjob.engine.queue import WorkQueue
from trainingjob.engine.reconciler import Reconciler
from trainingjob.engine.store import KubeJobStore
from trainingjob.planning import names

Event = Any


def register(
    registry: kopf.OperatorRegistry,
    queue: WorkQueue[Key],
    store: KubeJobStore,
    reconciler: Reconciler,
    phases: JobPhases,
    nodes: NodeTable,
) -> None:
    """Registers every handler. None does I/O, none keeps state of its own."""

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(event: Event, **_: Any) -> None:
        body = event["object"]
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        if event["type"] == "DELETED":
            phases.note(key, None)
            store.forget(key)
            reconciler.forget(key)
            queue.forget(key)
            return
        phases.note(key, body.get("status", {}).get("phase") or "Pending")
        if not store.wrote(body):
            queue.add(key)

    @kopf.on.event("ray.io", "v1", "rayclusters", registry=registry)
    async def cluster_event(event: Event, **_: Any) -> None:
        _look_at_owner(event)

    @kopf.on.event("v1", "pods", registry=registry)
    async def head_event(event: Event, **_: Any) -> None:
        _look_at_owner(event)

    async def node_event(event: Event, **_: Any) -> None:
        if nodes.note(event["object"], deleted=event["type"] == "DELETED"):
            for key in phases.active():
                queue.add(key)

    if nodes.enabled:
        kopf.on.event("v1", "nodes", registry=registry)(node_event)

    def _look_at_owner(event: Event) -> None:
        meta = event["object"]["metadata"]
        owner = meta.get("labels", {}).get(names.JOB_LABEL)
        if owner:
            queue.add((meta["namespace"], owner))


def kopf_settings() -> kopf.OperatorSettings:
    """Kopf's settings: it watches, and writes nothing."""
    settings = kopf.OperatorSettings()
    settings.watching.chunk_size = 500
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    ours = f"{names.MANAGED_LABEL}=true"
    settings.watching.label_selectors["ray.io", "v1", "rayclusters"] = ours
    # Heads only: the RayCluster's status counts the workers.
    settings.watching.label_selectors["v1", "pods"] = f"{ours},ray.io/node-type=head"
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.posting.enabled = False
    settings.scanning.disabled = True
    return settings
