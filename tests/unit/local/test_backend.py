"""The backend with something else in the place of Ray."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from trainingjob.api.job import TrainingJob, parse
from trainingjob.api.status import Phase, TrainingJobStatus
from trainingjob.backends.local import LocalError
from trainingjob.engine.local import LocalJobStore, Run, RunDirectory
from trainingjob.planning.local import Host, localise

HOST = Host(2, 0, 4 * 2**30)


def job(**workers: Any) -> TrainingJob:
    manifest = {
        "apiVersion": "raytraining.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "a"},
        "spec": {
            "image": "i",
            "rayVersion": "2.60.0",
            "entrypoint": "e",
            "workers": {"replicas": 1, **workers},
        },
    }
    return localise(parse(manifest), HOST)[0]


@pytest.fixture
def directory(tmp_path: Path) -> Any:
    made = RunDirectory(tmp_path, "a")
    made.take()
    yield made
    made.release()


def run(directory: RunDirectory, script: str, statuses: list[TrainingJobStatus]) -> Run:
    return Run(
        job(),
        directory,
        LocalJobStore(directory.path, job()),
        HOST,
        ["sh", "-c", script, "guard"],
        on_status=statuses.append,
        on_log=lambda line: None,
    )


async def test_a_ray_that_does_not_start_is_told_in_its_own_words(directory: RunDirectory) -> None:
    statuses: list[TrainingJobStatus] = []
    with pytest.raises(LocalError, match=r"(?s)exit code 3.*no room for a socket"):
        await run(directory, "echo no room for a socket; exit 3", statuses).run()
    assert statuses[-1].clusters == 2, "it may have met a port that was just taken"


async def test_suspended_before_ray_is_up(directory: RunDirectory, tmp_path: Path) -> None:
    statuses: list[TrainingJobStatus] = []
    made = run(directory, f"echo $* > {tmp_path}/command; cat; rm -r $1", statuses)
    task = asyncio.create_task(made.run())
    while not (tmp_path / "command").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    temporary, *command = (tmp_path / "command").read_text().split()
    assert os.path.isdir(temporary)  # noqa: ASYNC240
    assert "--num-cpus=1" in command
    assert "--dashboard-host=127.0.0.1" in command
    made.suspend()
    status = await asyncio.wait_for(task, 10)
    assert status.phase is Phase.SUSPENDED
    assert status.attempts == []
    assert not os.path.exists(temporary)  # noqa: ASYNC240
