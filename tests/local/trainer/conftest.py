"""A Ray head of our own on this machine, and drivers that run against it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
TRAINER = HERE.parents[2] / "trainer"
PYTHONPATH = os.pathsep.join([str(TRAINER), str(HERE / "support")])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRAININGJOB_"))}
    return {**kept, "PYTHONPATH": PYTHONPATH}


@dataclass
class Head:
    """A running Ray head."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    # Short: Ray puts sockets below, and a socket's path has 107 bytes at most.
    directory = tempfile.mkdtemp(prefix="tjr", dir="/tmp")
    address = f"127.0.0.1:{free_port()}"
    environment = clean_environment()
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={address.split(':')[1]}", "--num-cpus=2",
        "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={directory}",
        "--object-store-memory=100000000", f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}",
        "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats",
    ]  # fmt: skip
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    log = Path(directory, "start.log")
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Head(address, environment)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Run:
    """One driver process."""

    process: subprocess.Popen[bytes]
    log: Path
    progress_file: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def progress(self) -> list[dict[str, Any]]:
        if not self.progress_file.exists():
            return []
        lines = self.progress_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, timeout: float = 90) -> int:
        return self.process.wait(timeout)

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while not any(reached(line) for line in self.progress):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def error(self) -> str:
        return "\n".join(self.output.splitlines()[-2:])


@pytest.fixture
def start(head: Head, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts drivers; a run directory is shared by those of one name."""
    runs: list[Run] = []

    def start(config: dict[str, Any], *, workers: int, attempt: int = 1, name: str = "j") -> Run:
        number = len(runs)
        config_file = tmp_path / f"config-{number}.yaml"
        config_file.write_text(yaml.safe_dump(config))
        log, progress = tmp_path / f"log-{number}", tmp_path / f"progress-{number}.jsonl"
        environment = {
            **clean_environment(),
            "RAY_ADDRESS": head.address,
            "TRAININGJOB_NAME": name,
            "TRAININGJOB_NAMESPACE": "test",
            "TRAININGJOB_UID": f"uid-{name}",
            "TRAININGJOB_ATTEMPT": str(attempt),
            "TRAININGJOB_NUM_WORKERS": str(workers),
            "TRAININGJOB_STORAGE": str(tmp_path / "storage"),
            "TRAININGJOB_CONFIG": str(config_file),
            "TRAININGJOB_PROGRESS": str(progress),
        }
        with open(log, "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainingjob_trainer"],
                env=environment,
                cwd=tmp_path,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        runs.append(Run(process, log, progress))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()


def sample_log(directory: Path, attempts: dict[int, range]) -> list[list[int]]:
    """The sample ids of each step in order, each step taken from the attempt that counts."""
    steps: dict[int, dict[int, list[int]]] = {}
    for attempt, counted in attempts.items():
        for file in directory.glob(f"attempt-{attempt}-rank-*.jsonl"):
            rank = int(file.stem.rsplit("-", 1)[1])
            for line in map(json.loads, file.read_text().splitlines()):
                if line["step"] in counted:
                    steps.setdefault(line["step"], {})[rank] = line["ids"]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [
        [i for rank in sorted(ranks) for i in ranks[rank]] for _, ranks in sorted(steps.items())
    ]
