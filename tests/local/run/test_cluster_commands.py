"""Commands on a cluster, against a small server that speaks as much of the API as they use."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from kubernetes.aio.config import kube_config
from typer.testing import CliRunner

from trainingjob.cli import cluster, logs
from trainingjob.cli.main import app

GROUP = "/apis/raytraining.dev/v1alpha1"
NAMESPACED = GROUP + "/namespaces/{namespace}/trainingjobs"


def job(name: str = "a", phase: str = "Running", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "raytraining.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "image": "i",
            "rayVersion": "2.60.0",
            "entrypoint": "e",
            "workers": {"gpus": 16, "gpuTypes": ["h100"]},
            "checkpoint": {"persistentVolumeClaim": {"claimName": "c", "subPath": "s"}},
        },
        "status": {"observedGeneration": 1, "phase": phase, "message": "m\x1b[31m", **status},
    }


class Api:
    """The server's state, for a test to change."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.exec_status = 101
        self.files: dict[str, bytes] = {}
        self.commands: list[list[str]] = []
        self.stdin_closed = threading.Event()
        self.reads = 0
        self.on_read: Any = None

    def application(self) -> web.Application:
        made = web.Application()
        made.router.add_get(GROUP + "/trainingjobs", self.list)
        made.router.add_get(NAMESPACED, self.list)
        made.router.add_get(NAMESPACED + "/{name}", self.get)
        made.router.add_patch(NAMESPACED + "/{name}", self.patch)
        made.router.add_get("/api/v1/namespaces/{namespace}/events", self.list_events)
        made.router.add_get("/api/v1/namespaces/{namespace}/pods", self.list_pods)
        made.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/exec", self.exec)
        return made

    @staticmethod
    def answer(items: list[dict[str, Any]]) -> web.Response:
        return web.json_response({"metadata": {}, "items": items})

    async def list(self, request: web.Request) -> web.Response:
        namespace = request.match_info.get("namespace", "team")
        return self.answer(
            [j for j in self.jobs.values() if j["metadata"]["namespace"] == namespace]
        )

    def absent(self, name: str) -> web.Response:
        message = f'trainingjobs.raytraining.dev "{name}" not found'
        return web.json_response({"message": message, "reason": "NotFound"}, status=404)

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.reads += 1
        if self.on_read:
            self.on_read(self.reads)
        return web.json_response(self.jobs[name]) if name in self.jobs else self.absent(name)

    async def patch(self, request: web.Request) -> web.Response:
        found = self.jobs[request.match_info["name"]]
        found["spec"].update((await request.json())["spec"])
        return web.json_response(found)

    async def list_events(self, request: web.Request) -> web.Response:
        assert request.query["fieldSelector"].startswith("involvedObject.uid=uid-")
        return self.answer(self.events)

    async def list_pods(self, request: web.Request) -> web.Response:
        assert "ray.io/node-type=head" in request.query["labelSelector"]
        return self.answer(self.pods)

    async def exec(self, request: web.Request) -> web.StreamResponse:
        if self.exec_status != 101:
            return web.Response(status=self.exec_status)
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.query["container"] == "ray-head"
        command = request.query.getall("command")
        self.commands.append(command)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        content = self.files.get(command[-1])
        if content is None:
            await socket.send_bytes(b"\x02tail: cannot open: No such file or directory\n")
            failure = {"status": "Failure", "message": "exit code 1"}
            await socket.send_bytes(b"\x03" + json.dumps(failure).encode())
        else:
            for start in range(0, len(content), 5):
                await socket.send_bytes(b"\x01" + content[start : start + 5])
            if command[0] == "sh":  # follows until it is left alone
                assert request.query["stdin"] == "1"
                async for message in socket:
                    assert message.type is WSMsgType.BINARY
                self.stdin_closed.set()
                return socket
            await socket.send_bytes(b'\x03{"status": "Success"}')
        await socket.close()
        return socket


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(made.application(), shutdown_timeout=0.1)
    ports: list[int] = []

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    kubeconfig = tmp_path / "kubeconfig"
    server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{ports[0]}"}}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [server],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "two", "context": {"cluster": "c", "user": "u"}},
        ],
        "current-context": "one",
    }
    kubeconfig.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    # Read at import, which in the command's own process comes after the option.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(logs, "_FILE_SECONDS", 0.1)
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "\x1b" not in result.stdout
    return result.exit_code, result.stdout, result.stderr


def head(name: str = "a-12345-head") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": {"containers": [{"name": "ray-head"}, {"name": "sidecar"}]},
        "status": {"phase": "Running"},
    }


LOGS = "/tmp/ray/session_latest/logs/job-driver-"


def test_list(api: Api) -> None:
    assert call("list") == (0, "", "No resources found in team namespace.\n")
    api.jobs["b"] = job("b", "Pending")
    api.jobs["a"] = job(progress="5/10 (50%)", workerSummary="2/2", attempt=1)
    code, out, _ = call("list")
    assert code == 0
    header, first, second = out.splitlines()
    assert header.split() == ["NAME", "PHASE", "PROGRESS", "WORKERS", "ATTEMPT", "AGE"]
    assert first.split()[:5] == ["a", "Running", "5/10", "(50%)", "2/2"]
    assert second.split()[:2] == ["b", "Pending"]
    assert call("list", "-A")[1].startswith("NAMESPACE   NAME")
    assert call("list", "-n", "other")[2] == "No resources found in other namespace.\n"
    assert call("list", "--context", "two")[2] == "No resources found in default namespace.\n"
    assert "MESSAGE" in call("list", "-o", "wide")[1]
    assert call("list", "-o", "name")[1].splitlines()[0] == "trainingjob.raytraining.dev/a"
    assert len(json.loads(call("list", "-o", "json")[1])["items"]) == 2
    assert len(yaml.safe_load(call("list", "-o", "yaml")[1])["items"]) == 2


def test_describe(api: Api) -> None:
    api.jobs["a"] = job(
        progress="5/10 (50%)",
        training={"loss": 2.5, "checkpointStep": 4},
        failures={"user": 1, "infrastructure": 0},
        conditions=[{"type": "Ready", "status": "True", "reason": "Running", "message": ""}],
        attempts=[
            {
                "attempt": 1,
                "startTime": "2026-01-01T00:00:00Z",
                "endTime": "2026-01-01T00:01:00Z",
                "outcome": "UserFailure",
                "reason": "TrainingError",
                "message": "see the log",
                "exitCode": 70,
                "log": "one\n\x1b]0;two\x07",
            },
            {"attempt": 2, "startTime": "2026-01-01T00:01:01Z"},
        ],
    )
    api.events = [{"type": "Normal", "reason": "Running", "message": "attempt 2", "count": 3}]
    code, out, _ = call("describe", "a")
    assert code == 0
    for line in (
        "Name:         a",
        "Workers:      16 GPUs (h100)",
        "Checkpoint:   persistentVolumeClaim c/s",
        "Training:     step 5/10 (50%), loss 2.50, checkpoint at step 4",
        "Failures:     1 user",
        "  1. 2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z: UserFailure (TrainingError), "
        "exit code 70",
        "     see the log",
        "     | ]0;two",
        "  2. 2026-01-01T00:01:01Z to now: under way",
    ):
        assert line in out.splitlines()
    assert "(x3)" in out


def test_absent_and_silent(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = call("describe", "none")
    assert (code, out) == (1, "")
    assert err == 'error: trainingjobs.raytraining.dev "none" not found\n'
    code, _, err = call("list", "--kubeconfig", str(tmp_path / "none"))
    assert code == 1
    assert err.startswith("error: no kubeconfig at ")


@pytest.mark.parametrize(
    ("goal", "phases", "code", "said"),
    [
        ("Complete", ["Pending", "Running", "Succeeded"], 0, ""),
        ("complete", ["Running", "Failed"], 1, "error: Complete can no longer be reached: Failed"),
        ("Running", ["Pending", "Running"], 0, ""),
        ("Suspended", ["Running", "Succeeded"], 1, "error: Suspended can no longer be reached"),
        ("Failed", ["Failed"], 0, ""),
    ],
)
def test_wait(api: Api, goal: str, phases: list[str], code: int, said: str) -> None:
    api.jobs["a"] = job()

    def turn(reads: int) -> None:
        api.jobs["a"]["status"]["phase"] = phases[min((reads - 1) // 2, len(phases) - 1)]

    api.on_read = turn
    got, out, err = call("wait", "a", "--for", goal)
    assert got == code
    assert [line.split()[1].rstrip(":") for line in out.splitlines()] == phases
    assert err.startswith(said)


def test_wait_runs_out_of_time_and_believes_no_old_status(api: Api) -> None:
    api.jobs["a"] = job()
    api.jobs["a"]["metadata"]["generation"] = 2
    code, _, err = call("wait", "a", "--for", "Running", "--timeout", "0.3")
    assert code == 124
    assert err.startswith("error: a is not Running after")


def test_wait_for_a_job_that_is_deleted(api: Api) -> None:
    api.jobs["a"] = job()
    api.on_read = lambda reads: api.jobs.clear() if reads == 3 else None
    code, _, err = call("wait", "a")
    assert (code, err) == (1, "error: TrainingJob a was deleted\n")


def test_suspend_and_resume(api: Api) -> None:
    api.jobs["a"] = job()
    assert call("suspend", "a") == (0, "trainingjob.raytraining.dev/a suspended\n", "")
    assert api.jobs["a"]["spec"]["suspend"] is True
    assert "already" in call("suspend", "a")[1]
    assert call("resume", "a")[0] == 0
    assert api.jobs["a"]["spec"]["suspend"] is False
    api.jobs["a"]["status"]["phase"] = "Failed"
    assert call("suspend", "a")[0] == 1


def running(api: Api) -> None:
    attempts = [{"attempt": 1, "log": "the\nsaved\ntail", "endTime": "x"}, {"attempt": 2}]
    api.jobs["a"] = job(
        submissionId="a-uid-2", attempt=2, cluster={"name": "a-12345"}, attempts=attempts
    )
    api.pods = [head()]


def test_logs_from_the_head_pod(api: Api) -> None:
    running(api)
    api.files[f"{LOGS}a-uid-2.log"] = "one\ntwo é\n 1%\r99%\n\x1b[2Jthree\n".encode()
    assert call("logs", "a", "--tail", "5") == (0, "one\ntwo é\n99%\n[2Jthree\n", "")
    assert api.commands == [["tail", "-n", "5", f"{LOGS}a-uid-2.log"]]


@pytest.mark.parametrize("why", ["no pod", "forbidden", "no file"])
def test_logs_from_the_status(api: Api, why: str) -> None:
    running(api)
    if why == "no pod":
        api.pods = []
    if why == "forbidden":
        api.exec_status = 403
    code, out, err = call("logs", "a", "--tail", "2")
    assert (code, out) == (0, "saved\ntail\n")
    assert err.startswith("# ")
    assert err.endswith(": last lines of attempt 1 from the status\n")
    api.jobs["a"]["status"]["attempts"] = []
    code, out, err = call("logs", "a")
    assert (code, out) == (1, "")
    assert err.startswith("error: there is no log: ")


def test_logs_followed_over_a_retry(api: Api) -> None:
    running(api)
    api.files = {f"{LOGS}a-uid-2.log": b"first\n", f"{LOGS}a-uid-3.log": b"second\nlast"}
    status = api.jobs["a"]["status"]

    def turn(reads: int) -> None:
        if reads == 4:
            status["submissionId"] = "a-uid-3"
            status["attempts"].append({"attempt": 3})
        if reads == 8:
            status["phase"] = "Succeeded"

    api.on_read = turn
    code, out, err = call("logs", "a", "-f", "--tail", "1")
    assert code == 0
    assert out == "first\nsecond\nlast\n"
    assert "# Succeeded: m" in err
    assert [c[-2:] for c in api.commands] == [
        ["1", f"{LOGS}a-uid-2.log"],
        ["+1", f"{LOGS}a-uid-3.log"],
    ]
    assert api.stdin_closed.wait(5), "the follower in the pod is told to end"
