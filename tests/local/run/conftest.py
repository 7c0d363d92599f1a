"""`trainingjob run` as a user calls it: a process, a file, a directory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


class Command:
    """One `trainingjob run` under way."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.output = directory / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainingjob.cli.main", "run", "job.yaml", *arguments],
                cwd=directory,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}/operator:{ROOT}/trainer",
                    "MARK": str(directory),
                },
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], object], seconds: float = 45) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended:\n{self.text}"
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def shows(self, words: str, seconds: float = 45) -> None:
        self.until(lambda: words in self.text, seconds)

    def end(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)


class Place:
    """A directory with a job in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commands: list[Command] = []

    def job(self, entrypoint: str, **spec: Any) -> None:
        manifest = {
            "apiVersion": "raytraining.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "job"},
            "spec": {
                "image": "unused",
                "rayVersion": "2.60.0",
                "entrypoint": entrypoint,
                "workers": {"replicas": 1},
                "failurePolicy": {"backoffSeconds": 0},
                **spec,
            },
        }
        (self.directory / "job.yaml").write_text(json.dumps(manifest))

    def run(self, *arguments: str) -> Command:
        self.commands.append(Command(self.directory, *arguments))
        return self.commands[-1]

    @property
    def stored(self) -> dict[str, Any]:
        file = self.directory / "trainingjob-runs" / "job" / "job.json"
        stored: dict[str, Any] = json.loads(file.read_text())
        return stored

    def processes(self) -> list[str]:
        """Everything that still carries the mark of this test in its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    environment = (entry / "environ").read_bytes()
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                except OSError:
                    continue
                if f"MARK={self.directory}".encode() in environment:
                    found.append(f"{entry.name} {line.decode(errors='replace')}")
        return found

    def empties(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, "\n".join(left)
            time.sleep(0.1)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for command in made.commands:
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGKILL)
            command.process.wait()
    made.empties(15)
