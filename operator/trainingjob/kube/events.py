"""Kubernetes events about jobs: one object per distinct text, counted when it comes again."""

import hashlib
from datetime import UTC, datetime

from trainingjob.api.job import API_VERSION, KIND, Metadata
from trainingjob.api.status import rfc3339
from trainingjob.kube.client import KubeClient
from trainingjob.kube.errors import Conflict
from trainingjob.kube.resources import EVENTS


async def publish(
    client: KubeClient, metadata: Metadata, kind: str, reason: str, message: str, component: str
) -> None:
    """Publishes an event about the job. `kind` is Normal or Warning.

    Raises:
        KubeError: the API server did not take it.
    """
    now = rfc3339(datetime.now(UTC))
    text = f"{metadata.uid}/{kind}/{reason}/{message}"
    name = f"{metadata.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": component},
        "reportingComponent": component,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        await client.create(EVENTS, event)
    except Conflict:
        before = await client.get(EVENTS, metadata.namespace, name)
        again = {"count": before.get("count", 1) + 1, "lastTimestamp": now}
        await client.patch(EVENTS, metadata.namespace, name, again)
