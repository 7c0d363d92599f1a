"""Merging a user's pod template over the rendered one."""

from typing import Any

from trainingjob.planning.unfit import Unfit

_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
_APPENDED = {"tolerations", "envFrom", "topologySpreadConstraints"}
_REFUSED_IN_POD = {
    "restartPolicy": "the operator replaces pods itself",
    "terminationGracePeriodSeconds": "it must exceed Ray's drain time",
}
_REFUSED_IN_RAY = ("command", "args")


def merge(rendered: dict[str, Any], override: dict[str, Any], where: str) -> dict[str, Any]:
    """`rendered` (a PodTemplateSpec) with `override` over it. Ray's container stays first.

    Raises:
        Unfit: `override` holds something that would break the cluster.
    """
    ray = rendered["spec"]["containers"][0]["name"]
    _check(override, ray, where)
    merged = _merge(rendered, override)
    assert isinstance(merged, dict)
    return merged


def _check(override: dict[str, Any], ray: str, where: str) -> None:
    unknown = set(override) - {"metadata", "spec"}
    if unknown:
        raise _unfit(where, sorted(unknown)[0], "a pod template has metadata and spec")
    for part in ("metadata", "spec"):
        if not isinstance(override.get(part, {}), dict):
            raise _unfit(where, part, "it must be an object")
    spec = override.get("spec", {})
    for field, why in _REFUSED_IN_POD.items():
        if field in spec:
            raise _unfit(where, f"spec.{field}", why)
    containers = spec.get("containers", [])
    if not isinstance(containers, list):
        raise _unfit(where, "spec.containers", "it must be a list")
    for container in containers:
        if not isinstance(container, dict) or not container.get("name"):
            raise _unfit(where, "spec.containers", f"each needs a name; Ray's is {ray}")
        if container["name"] == ray:
            for field in _REFUSED_IN_RAY:
                if field in container:
                    raise _unfit(
                        where, f"spec.containers[{ray}].{field}", "KubeRay starts Ray there"
                    )


def _unfit(where: str, field: str, why: str) -> Unfit:
    return Unfit("InvalidPodTemplate", f"{where}.{field} is not allowed: {why}; take it out")


def _merge(below: Any, above: Any, name: str = "") -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {
            key: _merge(below[key], above[key], key)
            if key in below and key in above
            else above.get(key, below.get(key))
            for key in [*below, *(k for k in above if k not in below)]
        }
    if isinstance(below, list) and isinstance(above, list):
        if name in _APPENDED:
            return [*below, *(item for item in above if item not in below)]
        if name in _LIST_KEYS:
            return _merge_by(_LIST_KEYS[name], below, above)
    return above


def _merge_by(key: str, below: list[Any], above: list[Any]) -> list[Any]:
    overrides = {item.get(key): item for item in above if isinstance(item, dict)}
    merged = [_merge(item, overrides.pop(item.get(key), {})) for item in below]
    return [*merged, *overrides.values()]
