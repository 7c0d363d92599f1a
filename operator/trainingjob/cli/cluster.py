"""Commands on TrainingJobs in a Kubernetes cluster, with the rights of the kubeconfig."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
import yaml

from trainingjob.api.job import GROUP, KIND
from trainingjob.cli.errors import FAILURE, TIMED_OUT, CliError
from trainingjob.cli.text import age, clean, clean_block, duration, number, table

Object = dict[str, Any]

MANAGER = "trainingjob-cli"
FINAL = ("Succeeded", "Failed")
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Target:
    """Which cluster and namespace a command is about, as kubectl's options say it."""

    namespace: str | None = None
    all_namespaces: bool = False
    context: str | None = None
    kubeconfig: Path | None = None


@dataclass(frozen=True)
class Connection:
    """An open connection."""

    client: Any
    """A `trainingjob.kube.client.KubeClient`."""
    namespace: str
    context: str | None


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Connection]:
    """A connection to the target.

    Raises:
        CliError: there is none.
    """
    _choose_kubeconfig(target.kubeconfig)
    try:
        from trainingjob.kube.client import KubeClient
    except ModuleNotFoundError as error:
        raise CliError(
            f"the Kubernetes client is not installed ({error.name}): "
            "pip install 'trainingjob-operator[operator]'"
        ) from None
    client = await KubeClient.connect(MANAGER, context=target.context)
    try:
        yield Connection(client, target.namespace or _default_namespace(target), target.context)
    finally:
        await client.close()


def _choose_kubeconfig(path: Path | None) -> None:
    if path:
        # Read when the client library is imported, which happens later.
        os.environ["KUBECONFIG"] = str(path)
    named = os.environ.get("KUBECONFIG")
    if not named and "KUBERNETES_SERVICE_HOST" in os.environ:
        return
    places = named.split(os.pathsep) if named else [str(Path.home() / ".kube" / "config")]
    if not any(Path(place).is_file() for place in places if place):
        raise CliError(
            f"no kubeconfig at {os.pathsep.join(places)}: name one with --kubeconfig, or in the "
            "variable KUBECONFIG"
        )


def _default_namespace(target: Target) -> str:
    from kubernetes.aio import config

    try:
        contexts, active = config.list_kube_config_contexts()
    except (config.ConfigException, OSError, TypeError, ValueError):
        return _IN_POD.read_text().strip() if _IN_POD.is_file() else "default"
    chosen = next((c for c in contexts if c["name"] == target.context), active)
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")


def call(target: Target, command: Callable[[Connection], Awaitable[int]]) -> int:
    """Runs a command over a connection; returns its exit code.

    Raises:
        CliError: it cannot be done.
    """

    async def connected_command() -> int:
        async with connected(target) as connection:
            return await command(connection)

    from trainingjob.kube.errors import KubeError

    try:
        return asyncio.run(connected_command())
    except KubeError as error:
        raise CliError(_explained(error.message, error.status)) from None


def _explained(message: str, status: int) -> str:
    said = clean(message)
    if status == 404 and "could not find the requested resource" in said:
        return f"{said}: is the operator's CRD installed?"
    return said


def _get(connection: Connection, name: str) -> Awaitable[Object]:
    from trainingjob.kube.resources import TRAINING_JOBS

    found: Awaitable[Object] = connection.client.get(TRAINING_JOBS, connection.namespace, name)
    return found


# -- list ------------------------------------------------------------------------------------------


def show_list(target: Target, output: str) -> int:
    """Lists TrainingJobs."""

    async def command(connection: Connection) -> int:
        from trainingjob.kube.resources import TRAINING_JOBS

        namespace = None if target.all_namespaces else connection.namespace
        found = await connection.client.find(TRAINING_JOBS, namespace)
        jobs = sorted(found, key=lambda j: (j["metadata"]["namespace"], j["metadata"]["name"]))
        if output in ("json", "yaml"):
            whole = {"apiVersion": "v1", "kind": "List", "items": jobs}
            typer.echo(_dumped(whole, output), nl=False)
        elif output == "name":
            for job in jobs:
                typer.echo(f"trainingjob.{GROUP}/{clean(job['metadata']['name'])}")
        elif not jobs:
            place = "" if target.all_namespaces else f" in {connection.namespace} namespace"
            typer.echo(f"No resources found{place}.", err=True)
        else:
            typer.echo(listing(jobs, target.all_namespaces, wide=output == "wide"))
        return 0

    return call(target, command)


def _dumped(content: Object, output: str) -> str:
    if output == "json":
        return json.dumps(content, indent=4) + "\n"
    return yaml.safe_dump(content, sort_keys=False)


def listing(jobs: list[Object], with_namespace: bool, *, wide: bool) -> str:
    """The jobs as the table that `kubectl get` prints."""
    now = datetime.now(UTC)
    header = ["NAME", "PHASE", "PROGRESS", "WORKERS", "ATTEMPT", "AGE"]
    if wide:
        header += ["LOSS", "GPUS", "CLUSTER", "MESSAGE"]
    if with_namespace:
        header.insert(0, "NAMESPACE")
    rows = []
    for job in jobs:
        meta, spec, status = job["metadata"], job.get("spec", {}), job.get("status", {})
        row = [
            meta["name"],
            status.get("phase", ""),
            status.get("progress", ""),
            status.get("workerSummary", ""),
            status.get("attempt", ""),
            age(meta.get("creationTimestamp"), now),
        ]
        if wide:
            loss = status.get("training", {}).get("loss")
            row += [
                "" if loss is None else number(loss),
                spec.get("workers", {}).get("gpus", 0),
                status.get("cluster", {}).get("name", ""),
                status.get("message", ""),
            ]
        rows.append([meta["namespace"], *row] if with_namespace else row)
    return table(header, rows)


# -- describe --------------------------------------------------------------------------------------


def describe(target: Target, name: str) -> int:
    """Tells all that is known of a job."""

    async def command(connection: Connection) -> int:
        from trainingjob.kube.errors import KubeError
        from trainingjob.kube.resources import EVENTS

        job = await _get(connection, name)
        try:
            events = await connection.client.find(
                EVENTS,
                connection.namespace,
                fields=f"involvedObject.uid={job['metadata']['uid']}",
            )
        except KubeError as error:
            events = [{"reason": "NotReadable", "message": error.message}]
        typer.echo(description(job, events))
        return 0

    return call(target, command)


def description(job: Object, events: list[Object]) -> str:
    """The job in the manner of `kubectl describe`."""
    now = datetime.now(UTC)
    meta, spec, status = job["metadata"], job.get("spec", {}), job.get("status", {})
    facts: list[tuple[str, object]] = [
        ("Name", meta["name"]),
        ("Namespace", meta["namespace"]),
        ("Created", f"{meta.get('creationTimestamp')} ({age(meta.get('creationTimestamp'), now)})"),
        ("Phase", status.get("phase", "not seen by the operator yet")),
        ("Message", status.get("message", "")),
        ("Image", spec.get("image")),
        ("Ray version", spec.get("rayVersion")),
        ("Entrypoint", spec.get("entrypoint")),
        ("Workers", _workers(spec.get("workers", {}), status.get("workers", {}))),
        ("Spot", spec.get("spot", {}).get("policy", "Never")),
        ("Checkpoint", _checkpoint(spec.get("checkpoint"))),
        ("Suspend", "true" if spec.get("suspend") else ""),
        ("Cluster", status.get("cluster", {}).get("name")),
        ("Dashboard", status.get("cluster", {}).get("dashboardURL")),
        ("Training", _training(status)),
        ("Failures", _failures(status.get("failures", {}))),
        ("Completed", status.get("completionTime")),
    ]
    parts = [
        "\n".join(f"{label + ':':<13} {clean(value)}" for label, value in facts if value),
        _section("Conditions", _conditions(status.get("conditions", []), now)),
        _section("Attempts", "\n".join(_attempt(a) for a in status.get("attempts", []))),
        _section("Events", _events(events, now)),
    ]
    return "\n".join(parts)


def _section(title: str, body: str) -> str:
    if not body:
        return f"{title + ':':<13} <none>"
    return f"{title}:\n" + "\n".join(f"  {line}" for line in body.splitlines())


def _workers(spec: Object, seen: Object) -> str:
    asked = f"{spec['gpus']} GPUs" if spec.get("gpus") else "on CPUs"
    if spec.get("gpuTypes"):
        asked += f" ({', '.join(spec['gpuTypes'])})"
    if spec.get("replicas"):
        asked += f", {spec['replicas']} pods"
    return f"{asked}; {seen.get('ready', 0)} of {seen['desired']} ready" if seen else asked


def _checkpoint(spec: Object | None) -> str:
    if not spec:
        return "none: a job that loses its cluster starts anew"
    claim = spec.get("persistentVolumeClaim") or {}
    path = f"/{claim['subPath']}" if claim.get("subPath") else ""
    return str(spec.get("uri") or f"persistentVolumeClaim {claim.get('claimName')}{path}")


def _training(status: Object) -> str:
    told = status.get("training", {})
    parts = [f"step {status['progress']}"] if status.get("progress") else []
    for key, label in (("loss", "loss"), ("validationLoss", "validation loss")):
        if told.get(key) is not None:
            parts.append(f"{label} {number(told[key])}")
    if told.get("tokensPerSecond") is not None:
        parts.append(f"{number(told['tokensPerSecond'])} tokens/s")
    if told.get("etaSeconds") is not None and status.get("phase") not in FINAL:
        parts.append(f"ETA {duration(told['etaSeconds'])}")
    if told.get("checkpointStep") is not None:
        parts.append(f"checkpoint at step {told['checkpointStep']}")
    return ", ".join(parts)


def _failures(counts: Object) -> str:
    return ", ".join(f"{counts[k]} {k}" for k in counts if counts[k])


def _conditions(conditions: list[Object], now: datetime) -> str:
    if not conditions:
        return ""
    rows = [
        [
            c["type"],
            c["status"],
            c.get("reason", ""),
            age(c.get("lastTransitionTime"), now),
            c.get("message", ""),
        ]
        for c in conditions
    ]
    return table(["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], rows)


def _attempt(attempt: Object) -> str:
    ended = attempt.get("endTime")
    line = f"{attempt['attempt']}. {attempt.get('startTime')} to {ended or 'now'}"
    line += f": {attempt.get('outcome') or 'under way'}"
    if attempt.get("reason") and attempt["reason"] != attempt.get("outcome"):
        line += f" ({attempt['reason']})"
    if attempt.get("exitCode") is not None:
        line += f", exit code {attempt['exitCode']}"
    if attempt.get("lastStep") is not None:
        line += f", at step {attempt['lastStep']}"
    if attempt.get("node"):
        line += f", on {attempt['node']}"
    lines = [clean(line)]
    if attempt.get("message"):
        lines.append(f"   {clean(attempt['message'])}")
    shown = attempt.get("outcome") not in (None, "Succeeded")
    log = clean_block(attempt.get("log", "")).splitlines()
    lines += [f"   | {text}" for text in log if shown]
    return "\n".join(lines)


def _events(events: list[Object], now: datetime) -> str:
    if not events:
        return ""

    def last(event: Object) -> str:
        return str(event.get("lastTimestamp") or event.get("eventTime") or "")

    rows = []
    for event in sorted(events, key=last):
        times = event.get("count") or 1
        rows.append(
            [
                event.get("type", ""),
                event.get("reason", ""),
                age(last(event), now) + (f" (x{times})" if times > 1 else ""),
                event.get("message", ""),
            ]
        )
    return table(["TYPE", "REASON", "AGE", "MESSAGE"], rows)


# -- suspend, resume -------------------------------------------------------------------------------


def set_suspend(target: Target, name: str, value: bool) -> int:
    """Suspends a job or lets it go on."""

    async def command(connection: Connection) -> int:
        from trainingjob.kube.resources import TRAINING_JOBS

        job = await _get(connection, name)
        phase = job.get("status", {}).get("phase")
        if phase in FINAL:
            raise CliError(f"{KIND} {name} has ended ({phase}): it cannot be suspended or resumed")
        word = "suspended" if value else "resumed"
        if bool(job["spec"].get("suspend")) == value:
            typer.echo(f"trainingjob.{GROUP}/{name} {word} already")
            return 0
        await connection.client.patch(
            TRAINING_JOBS, connection.namespace, name, {"spec": {"suspend": value}}
        )
        typer.echo(f"trainingjob.{GROUP}/{name} {word}")
        return 0

    return call(target, command)


# -- wait ------------------------------------------------------------------------------------------

GOALS = {
    "Complete": "Succeeded",
    "Failed": "Failed",
    "Running": "Running",
    "Suspended": "Suspended",
}
"""What can be waited for, and the phase in which it is reached."""
_POLL_SECONDS = 1.0


def verdict(job: Object, goal: str) -> bool | None:
    """Whether the goal is reached; None while it still can be."""
    status = job.get("status", {})
    if status.get("observedGeneration", -1) < job["metadata"].get("generation", 0):
        return None  # the status tells of an older spec
    phase = status.get("phase", "")
    if phase == GOALS[goal]:
        return True
    return False if phase in FINAL else None


def wait(target: Target, name: str, goal: str, timeout: float | None) -> int:
    """Waits until a job is where it should be."""

    async def command(connection: Connection) -> int:
        from trainingjob.kube.errors import NotFound, Unavailable

        deadline = None if timeout is None else time.monotonic() + timeout
        told, silent, uid = "", 0, None
        while True:
            try:
                job = await _get(connection, name)
                silent = 0
            except NotFound:
                if uid is None:
                    raise
                raise CliError(f"{KIND} {name} was deleted") from None
            except Unavailable as error:
                silent += 1
                if uid is None or silent > 5:
                    raise
                typer.echo(f"warning: {clean(error.message)}", err=True)
            else:
                if uid not in (None, job["metadata"]["uid"]):
                    raise CliError(f"{KIND} {name} was deleted, and another one has its name")
                uid = job["metadata"]["uid"]
                told = _tell(job, told)
                reached = verdict(job, goal)
                if reached is not None:
                    if not reached:
                        phase = job["status"]["phase"]
                        typer.echo(f"error: {goal} can no longer be reached: {phase}", err=True)
                    return 0 if reached else FAILURE
            if deadline is not None and time.monotonic() >= deadline:
                typer.echo(f"error: {name} is not {goal} after {duration(timeout or 0)}", err=True)
                return TIMED_OUT
            left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
            await asyncio.sleep(max(0.0, min(_POLL_SECONDS, left)))

    return call(target, command)


def _tell(job: Object, told: str) -> str:
    status = job.get("status", {})
    phase = str(status.get("phase") or "Pending")
    if phase != told:
        message = f": {clean(status['message'])}" if status.get("message") else ""
        typer.echo(f"{clean(job['metadata']['name'])} {clean(phase)}{message}")
        sys.stdout.flush()
    return phase
