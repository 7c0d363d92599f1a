"""Reading pods and nodes: which are ready, which are in trouble and why. Pure functions."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from trainingjob.planning.observed import DeadPod, Head, Trouble

Object = dict[str, Any]

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}


def is_head(pod: Object) -> bool:
    """Whether the pod is the cluster's head."""
    return bool(pod["metadata"]["labels"].get("ray.io/node-type") == "head")


def ready(pod: Object) -> bool:
    """Whether the pod is ready and not on its way out."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any(
        c["type"] == "Ready" and c["status"] == "True"
        for c in pod.get("status", {}).get("conditions", [])
    )


def head(pods: Iterable[Object], node_dead: Callable[[str], bool]) -> Head | None:
    """The head as it stands, None when there is none."""
    heads = [p for p in pods if is_head(p)]
    if not heads:
        return None
    # A pod on its way out counts only when there is no other.
    pod = min(heads, key=lambda p: bool(p["metadata"].get("deletionTimestamp")))
    status = pod.get("status", {})
    node = pod["spec"].get("nodeName")
    ended = [
        s["state"]["terminated"]
        for s in status.get("containerStatuses", [])
        if s["name"] == pod["spec"]["containers"][0]["name"] and s["state"].get("terminated")
    ]
    over = status.get("phase") in ("Failed", "Succeeded") or bool(ended)
    reason = status.get("reason") or (ended[0].get("reason", "") if ended else "")
    return Head(
        uid=pod["metadata"]["uid"],
        node=node,
        ended=over,
        unreachable=bool(node and not over and node_dead(node)),
        ready=ready(pod),
        reason=reason,
    )


def running_address(pods: Iterable[Object]) -> str | None:
    """Address of the head's container, once it runs."""
    for pod in pods:
        status = pod.get("status", {})
        containers = status.get("containerStatuses", [])
        if (
            is_head(pod)
            and status.get("podIP")
            and any(c["state"].get("running") for c in containers)
        ):
            address = status["podIP"]
            return f"[{address}]" if ":" in address else str(address)
    return None


def dead(pods: Iterable[Object], node_dead: Callable[[str], bool]) -> list[DeadPod]:
    """Pods that the API shows although their node is gone or unreachable."""
    return [
        DeadPod(p["metadata"]["name"], p["metadata"]["uid"], p["spec"]["nodeName"])
        for p in pods
        if p["spec"].get("nodeName")
        and p.get("status", {}).get("phase") in ("Pending", "Running")
        and node_dead(p["spec"]["nodeName"])
    ]


def unschedulable_since(pod: Object) -> datetime | None:
    """Since when no node takes the pod."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return parse_time(condition["lastTransitionTime"])
    return None


def trouble(pod: Object) -> Trouble | None:
    """What keeps the pod from getting ready, in the cluster's words, and the remedy."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for state in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = state["state"].get("waiting") or {}
        reason, said = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            return Trouble(
                reason,
                f"image {state['image']} cannot be pulled: {said or reason}; correct spec.image, "
                "or name the registry's imagePullSecrets in head.podTemplate and "
                "worker.podTemplate",
                name,
            )
        if reason in _CONFIG:
            return Trouble(
                reason,
                f"pod {name}: {said or reason}; correct spec.env, spec.envFrom or the pod template",
                name,
            )
        ended = state["state"].get("terminated") or {}
        if ended.get("exitCode"):
            return Trouble(
                ended.get("reason") or "Error",
                f"container {state['name']} of pod {name} ended with exit code "
                f"{ended['exitCode']}: {ended.get('message') or ended.get('reason') or ''}",
                name,
            )
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Trouble("Unschedulable", _unschedulable(pod, condition.get("message", "")), name)
    if status.get("phase") == "Failed":
        said = status.get("message") or ""
        return Trouble(status.get("reason") or "Failed", f"pod {name} failed: {said}", name)
    return None


def _unschedulable(pod: Object, said: str) -> str:
    if "persistentvolumeclaim" in said:
        return (
            f"{said}; create the claim, or correct "
            "spec.checkpoint.persistentVolumeClaim.claimName or spec.volumes"
        )
    asked = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    wants = ", ".join(f"{k} {v}" for k, v in asked.items())
    return f"no node takes pod {pod['metadata']['name']} ({wants}): {said}"


def creating_since(pod: Object) -> datetime | None:
    """Since when the pod has had a node, while its containers are not yet created."""
    status = pod.get("status", {})
    waiting = [
        (s["state"].get("waiting") or {}).get("reason")
        for s in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    ]
    if "ContainerCreating" not in waiting and "PodInitializing" not in waiting:
        return None
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return parse_time(condition["lastTransitionTime"])
    return None


def node_lost(node: Object) -> bool:
    """Whether the node controller has lost the node: its kubelet does not report any more."""
    return any(
        c["type"] == "Ready" and c["status"] == "Unknown"
        for c in node.get("status", {}).get("conditions", [])
    )


def parse_time(text: str) -> datetime:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
