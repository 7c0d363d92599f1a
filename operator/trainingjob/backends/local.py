"""A Ray cluster of one node on this machine."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from trainingjob.api.job import TrainingJob
from trainingjob.backends import driver as driver_view
from trainingjob.planning import actions as act
from trainingjob.planning import contract, local, names
from trainingjob.planning.lifecycle import STOP_GRACE_SECONDS
from trainingjob.planning.observed import Cluster, Head, Observed
from trainingjob.planning.sizing import Sizing, size
from trainingjob.planning.text import tail
from trainingjob.rayapi.client import Dashboard, RayRefused

_OURS = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray takes the loopback address only where it is told not to make a cluster of many machines.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_CONFIG_JSON_ENV_VAR")
_STARTS = 2
"""Heads that may end before their dashboard answered: one may have met a port just taken."""
_LONGEST_TEMPORARY = 30
"""Ray's sockets lie some 70 characters deeper, and a socket's path has at most 107."""


class LocalError(Exception):
    """The job cannot be run on this machine. The message says why and what to do."""


@dataclass
class _RunningHead:
    """A head, as a process that ends with this one."""

    name: str
    uid: str
    process: "subprocess.Popen[bytes]"
    directory: Path
    address: str
    answered: bool = False

    @property
    def logs(self) -> Path:
        return self.directory / "session_latest" / "logs"

    def start_log(self) -> str:
        try:
            text = (self.directory / "start.log").read_text(errors="replace")
        except OSError:
            return ""
        return tail(text, 2000)


class LocalBackend:
    """See `trainingjob.backends.Backend`.

    `directory` is the job's run directory. `guard` is a command that runs another one and leaves
    no process of it behind, once its own standard input is closed: `guard DIRECTORY COMMAND…`.
    `held` are file descriptors that stay open until everything has ended.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        directory: Path,
        host: local.Host,
        token: str,
        guard: Sequence[str],
        *,
        held: Sequence[int] = (),
    ) -> None:
        self._session, self._directory, self._host = session, directory, host
        self._token, self._guard, self._held = token, list(guard), tuple(held)
        self._catalogue = local.catalogue(host)
        self._head: _RunningHead | None = None
        self._failed_starts = 0

    @property
    def temporary(self) -> Path | None:
        """Ray's temporary directory, while there is a head."""
        return self._head.directory if self._head else None

    def driver_log(self, submission_id: str) -> Path:
        """The driver's log: Ray's file while the head runs, its copy in the run directory after."""
        name = names.driver_log(submission_id)
        live = self._head.logs / name if self._head else None
        return live if live and live.exists() else self._directory / "logs" / name

    # -- observing -----------------------------------------------------------------------------

    async def observe(self, job: TrainingJob) -> Observed:
        """What is there of the job's cluster and driver.

        Raises:
            LocalError: Ray does not start.
        """
        head, known = self._head, job.status.cluster
        if head is None:
            return Observed()
        if known is None or known.name != head.name:
            return Observed(others=(head.name,))
        if head.process.poll() is not None:
            return Observed(cluster=self._ended(head))
        ray, training, log = await driver_view.look(self._dashboard(head), job)
        if ray.reachable:
            head.answered = True
        cluster = Cluster(
            name=head.name,
            head=Head(uid=head.uid, node=socket.gethostname(), ready=head.answered),
            workers_ready=self._size(job).pods if head.answered else 0,
            address=head.address,
        )
        return Observed(cluster=cluster, ray=ray, training=training, log=log)

    def _ended(self, head: _RunningHead) -> Cluster:
        said = head.start_log()
        if not head.answered:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise LocalError(
                    f"Ray does not start on this machine (exit code {head.process.returncode}); "
                    f"it said:\n{said}"
                )
        last = said.strip().splitlines()[-1:] or [f"exit code {head.process.returncode}"]
        return Cluster(
            name=head.name,
            head=Head(uid=head.uid, ended=True, reason=last[0]),
            address=head.address,
        )

    def _size(self, job: TrainingJob) -> Sizing:
        return size(job.spec.workers, self._catalogue, job.spec.spot.policy)

    # -- acting ------------------------------------------------------------------------------------

    async def execute(self, job: TrainingJob, action: act.Action) -> None:
        """Carries out one action.

        Raises:
            RayError: it could not be done now. LocalError: it cannot be done.
        """
        match action:
            case act.EnsureCluster(name, _):
                if self._head is None or self._head.name != name:
                    await self.close()
                    self._start(job, name)
            case act.DeleteCluster(name):
                if self._head and self._head.name == name:
                    await self.close()
            case act.Submit(submission_id, attempt):
                await self._submit(job, submission_id, attempt)
            case act.StopDriver(submission_id):
                if self._head:
                    await self._dashboard(self._head).stop(submission_id)
            case act.DeletePod() | act.FallBackToOnDemand():
                pass
            case _:
                raise AssertionError(f"not an action on clusters: {action}")

    def _start(self, job: TrainingJob, name: str) -> None:
        ray = Path(sys.executable).parent / "ray"
        if not ray.exists():
            raise LocalError(
                f"Ray is not installed beside {sys.executable}: install this package with its "
                "trainer extra, pip install 'trainingjob-operator[trainer]'"
            )
        root = tempfile.gettempdir()
        short = root if len(root) <= _LONGEST_TEMPORARY else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="tj-", dir=short))
        (self._directory / "config.json").write_text(contract.config_file(job))
        sizing = self._size(job)
        ports = _free_ports(4)
        command = [
            *self._guard,
            str(directory),
            str(ray),
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            "--log-color=false",
            "--port=0",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={ports[0]}",
            f"--dashboard-agent-listen-port={ports[1]}",
            f"--dashboard-agent-grpc-port={ports[2]}",
            f"--ray-client-server-port={ports[3]}",
            # The default range is shared by every Ray on the machine.
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--num-cpus={sizing.pods * sizing.ray_cpus}",
            f"--num-gpus={sizing.pods * sizing.gpus_per_pod}",
            f"--object-store-memory={self._object_store(sizing)}",
            f"--temp-dir={directory}",
        ]
        with open(directory / "start.log", "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(job),
                start_new_session=True,
                pass_fds=self._held,
            )
        self._head = _RunningHead(
            name=name,
            uid=str(uuid.uuid4()),
            process=process,
            directory=directory,
            address=f"http://127.0.0.1:{ports[0]}",
        )

    def _object_store(self, sizing: Sizing) -> int:
        return min(sizing.object_store_memory * sizing.pods, self._host.memory * 3 // 10)

    def _environment(self, job: TrainingJob) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        own = {e.name: e.value or "" for e in job.spec.env}
        # `python` in the entrypoint is the Python that has Ray.
        programs = str(Path(sys.executable).parent)
        path = own.get("PATH", inherited.get("PATH", os.defpath))
        return {
            **inherited,
            **own,
            "PATH": f"{programs}{os.pathsep}{path}",
            **_OURS,
            "RAY_AUTH_TOKEN": self._token,
        }

    async def _submit(self, job: TrainingJob, submission_id: str, attempt: int) -> None:
        head = self._head
        if head is None:
            return
        environment = contract.driver_environment(
            job,
            self._size(job),
            attempt=attempt,
            storage=self._storage(job),
            config=str(self._directory / "config.json"),
            progress=str(head.logs / names.progress_file(submission_id)),
        )
        try:
            await self._dashboard(head).submit(
                submission_id,
                job.spec.entrypoint,
                contract.runtime_env(job, environment, STOP_GRACE_SECONDS),
                contract.submission_metadata(job, attempt),
            )
        except RayRefused as error:
            raise LocalError(f"Ray does not take the job: {error}") from error

    def _storage(self, job: TrainingJob) -> str:
        place = local.storage(job, self._directory)
        if "://" not in place:
            Path(place).mkdir(parents=True, exist_ok=True)  # a mounted volume would be there too
        return place

    def _dashboard(self, head: _RunningHead) -> Dashboard:
        return Dashboard(self._session, head.address, self._token)

    async def close(self) -> None:
        """Ends everything that runs; returns when it is gone. The drivers' logs are kept."""
        head, self._head = self._head, None
        if head is None:
            return
        self._keep_logs(head)
        assert head.process.stdin is not None
        head.process.stdin.close()
        try:
            await asyncio.to_thread(head.process.wait, 15)
        except subprocess.TimeoutExpired:
            head.process.kill()
        shutil.rmtree(head.directory, ignore_errors=True)

    def _keep_logs(self, head: _RunningHead) -> None:
        kept = self._directory / "logs"
        kept.mkdir(exist_ok=True)
        for log in head.logs.glob("job-driver-*.log"):
            shutil.copy(log, kept / log.name)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. Held together, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
