"""The kinds of objects that the operator touches."""

from dataclasses import dataclass

from trainingjob.api.job import GROUP, PLURAL, VERSION


@dataclass(frozen=True)
class Resource:
    """A kind, as the API's paths name it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None, sub: str | None = None) -> str:
        """The URL path of an object, or of the collection without `name`."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [p for p in (self.plural, name, sub) if p]
        return "/" + "/".join(parts)


TRAINING_JOBS = Resource(GROUP, VERSION, PLURAL, "TrainingJob")
RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters", "RayCluster")
PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Resource("", "v1", "events", "Event")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")

BY_KIND = {r.kind: r for r in (TRAINING_JOBS, RAY_CLUSTERS, SECRETS, CONFIG_MAPS)}
