"""Prometheus metrics of the operator."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trainingjob.api.status import Phase

REGISTRY = CollectorRegistry()

QUEUE_DEPTH = Gauge("trainingjob_queue_depth", "Jobs waiting for a reconcile", registry=REGISTRY)
RECONCILES = Histogram(
    "trainingjob_reconcile_seconds",
    "Duration of reconciles",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
ERRORS = Counter(
    "trainingjob_reconcile_errors_total", "Failed reconciles", ["cause"], registry=REGISTRY
)
REQUESTS = Histogram(
    "trainingjob_api_request_seconds",
    "Requests to the API server",
    ["verb", "resource", "status"],
    buckets=(0.005, 0.025, 0.1, 0.5, 2.5, 10, 30),
    registry=REGISTRY,
)
LEADER = Gauge("trainingjob_leader", "1 on the replica that acts", registry=REGISTRY)
JOBS = Gauge("trainingjob_jobs", "TrainingJobs by phase", ["phase"], registry=REGISTRY)


class JobPhases:
    """Counts jobs by phase."""

    def __init__(self) -> None:
        self._phases: dict[tuple[str, str], str] = {}
        for phase in Phase:
            JOBS.labels(phase.value).set(0)

    def note(self, key: tuple[str, str], phase: str | None) -> None:
        """The job's phase now; None: it is gone."""
        before = self._phases.pop(key, None)
        if before:
            JOBS.labels(before).dec()
        if phase:
            self._phases[key] = phase
            JOBS.labels(phase).inc()

    def active(self) -> list[tuple[str, str]]:
        """Jobs that have not ended."""
        final = {p.value for p in Phase if p.final}
        return [key for key, phase in self._phases.items() if phase not in final]


def observe_request(verb: str, plural: str, status: int, seconds: float) -> None:
    """Takes over one request to the API server."""
    REQUESTS.labels(verb, plural, str(status)).observe(seconds)
