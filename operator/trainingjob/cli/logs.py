"""`trainingjob logs`: the driver's log, read in the head pod with the rights of the user."""

import asyncio
import codecs
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer

from trainingjob.cli.cluster import FINAL, Connection, Object, Target, _get, call
from trainingjob.cli.errors import CliError
from trainingjob.cli.text import clean, clean_block
from trainingjob.planning import names
from trainingjob.planning.raycluster import LOG_DIRECTORY

_STDOUT, _STDERR, _ERROR = 1, 2, 3
# Ends with its standard input, that is with us: a lone `tail -F` would go on in the pod.
_FOLLOW = 'tail -n "$1" -F "$2" 2>/dev/null & follower=$!; read -r _; kill $follower'
_POLL_SECONDS = 2.0
_FILE_SECONDS = 2.0
"""How long after a driver's end lines may still come."""


class NotPossible(Exception):
    """The log cannot be read in the pod. The message says why."""


def logs(target: Target, name: str, *, follow: bool, tail: int) -> int:
    """Prints the log of a job's current attempt, and of the next ones with `follow`."""

    async def command(connection: Connection) -> int:
        job = await _get(connection, name)
        if follow:
            return await _follow(connection, job, tail)
        pod = await _head(connection, job)
        submission = job.get("status", {}).get("submissionId")
        why = "the job has no head pod now"
        if pod and submission:
            file = f"{LOG_DIRECTORY}/{names.driver_log(submission)}"
            try:
                await run_in_pod(connection, pod, ["tail", "-n", _count(tail), file], _Lines().feed)
                return 0
            except NotPossible as error:
                why = str(error)
        _print_saved(job, tail, why)
        return 0

    return call(target, command)


def _count(tail: int) -> str:
    return "+1" if tail < 0 else str(tail)


async def _head(connection: Connection, job: Object) -> Object | None:
    from trainingjob.kube.resources import PODS

    cluster = job.get("status", {}).get("cluster", {}).get("name")
    if not cluster:
        return None
    pods = await connection.client.find(
        PODS,
        connection.namespace,
        labels=f"ray.io/cluster={cluster},ray.io/node-type=head",
    )
    running = [
        p
        for p in pods
        if p.get("status", {}).get("phase") == "Running"
        and not p["metadata"].get("deletionTimestamp")
    ]
    return running[0] if running else None


def _print_saved(job: Object, tail: int, why: str) -> None:
    attempts = [a for a in job.get("status", {}).get("attempts", []) if a.get("log")]
    if not attempts:
        raise CliError(f"there is no log: {clean(why)}, and no attempt has left its last lines")
    last = attempts[-1]
    typer.echo(f"# {clean(why)}: last lines of attempt {last['attempt']} from the status", err=True)
    lines = clean_block(last["log"]).splitlines()
    for line in lines if tail < 0 else lines[len(lines) - min(tail, len(lines)) :]:
        typer.echo(line)


async def _follow(connection: Connection, job: Object, tail: int) -> int:
    shown: str | None = None
    count = _count(tail)
    waiting = False
    while True:
        status = job.get("status", {})
        submission, phase = status.get("submissionId"), status.get("phase")
        pod = await _head(connection, job) if submission != shown else None
        if pod and submission:
            typer.echo(f"# attempt {status.get('attempt')}, {submission}", err=True)
            file = f"{LOG_DIRECTORY}/{names.driver_log(submission)}"
            try:
                job = await _stream(connection, job, pod, count, file)
            except NotPossible as error:
                raise CliError(str(error)) from None
            shown, count, waiting = submission, "+1", False
            continue
        if phase in FINAL:
            if shown is None:
                _print_saved(job, tail, f"the job has ended ({phase})")
            else:
                typer.echo(f"# {phase}: {clean(status.get('message', ''))}", err=True)
            return 0
        if not waiting:
            waiting = True
            said = clean(status.get("message") or phase or "not seen by the operator yet")
            typer.echo(f"# waiting for the driver: {said}", err=True)
        await asyncio.sleep(_POLL_SECONDS)
        job = await _get(connection, job["metadata"]["name"])


async def _stream(
    connection: Connection, job: Object, pod: Object, count: str, file: str
) -> Object:
    """Shows the log until its attempt has ended; returns the job as it is then."""
    before = job["status"].get("submissionId")
    command = ["sh", "-c", _FOLLOW, "sh", count, file]
    lines = _Lines()
    reading = asyncio.create_task(run_in_pod(connection, pod, command, lines.feed, stdin=True))
    try:
        while not reading.done():
            await asyncio.wait({reading}, timeout=_POLL_SECONDS)
            job = await _get(connection, job["metadata"]["name"])
            status = job.get("status", {})
            attempts = status.get("attempts", [])
            over = attempts and attempts[-1].get("endTime")
            if status.get("submissionId") != before or status.get("phase") in FINAL or over:
                await asyncio.wait({reading}, timeout=_FILE_SECONDS)
                break
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        lines.end()
    return job


class _Lines:
    """Prints what comes in pieces, a line at a time, clean."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Takes a piece."""
        *lines, self._rest = (self._rest + self._decode.decode(data)).split("\n")
        for line in lines:
            typer.echo(clean_block(line.rstrip("\r").rpartition("\r")[2]))

    def end(self) -> None:
        """Prints a last line that has no end."""
        if self._rest:
            typer.echo(clean_block(self._rest))
        self._rest = ""


async def run_in_pod(
    connection: Connection,
    pod: Object,
    command: list[str],
    show: Callable[[bytes], None],
    *,
    stdin: bool = False,
) -> None:
    """Runs a command in the pod's first container and shows its output.

    Raises:
        NotPossible: it cannot be run, or it failed.
    """
    from urllib.parse import urlencode

    import aiohttp
    from kubernetes.aio import config
    from kubernetes.aio.client.configuration import Configuration
    from kubernetes.aio.stream import WsApiClient

    from trainingjob.kube.resources import PODS

    configuration = Configuration()
    try:
        await config.load_kube_config(
            context=connection.context, client_configuration=configuration
        )
    except (config.ConfigException, OSError):
        config.load_incluster_config(client_configuration=configuration)
    query = [("container", pod["spec"]["containers"][0]["name"]), ("stdout", "1"), ("stderr", "1")]
    query += [("stdin", "1")] if stdin else []
    query += [("command", word) for word in command]
    name = pod["metadata"]["name"]
    path = PODS.path(connection.namespace, name, "exec") + "?" + urlencode(query)
    errors = b""
    client = WsApiClient(configuration, heartbeat=30)
    try:
        _, url, headers, _, _ = await client.param_serialize(
            "GET", path, header_params={}, auth_settings=["BearerToken"]
        )
        socket = await client.request("GET", url, headers=headers, _preload_content=False)
        async with socket as stream:
            async for message in stream:
                data = message.data.encode() if isinstance(message.data, str) else message.data
                if not data:
                    continue
                channel, data = data[0], data[1:]
                if channel == _STDOUT:
                    show(data)
                elif channel == _STDERR:
                    errors += data
                elif channel == _ERROR:
                    _check(data, errors)
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 403:
            raise NotPossible(
                f"you may not run commands in pod {name} (create on pods/exec in namespace "
                f"{connection.namespace})"
            ) from None
        raise NotPossible(f"pod {name} cannot be reached: {error.status} {error.message}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise NotPossible(f"pod {name} cannot be reached: {error}") from None
    finally:
        await client.close()


def _check(data: bytes, errors: bytes) -> None:
    try:
        told: Any = json.loads(data)
    except ValueError:
        return
    if told.get("status") != "Success":
        said = errors.decode("utf-8", "replace").strip() or told.get("message", "")
        if "No such file" in said:
            said = "the driver has not written a log yet"
        raise NotPossible(clean(said))
