import json
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from trainingjob.api.job import TrainingJob, parse
from trainingjob.api.status import Phase, TrainingJobStatus, TrainingStatus
from trainingjob.cli import guard
from trainingjob.engine.local import BadState, Busy, LocalJobStore, LogFollower, RunDirectory
from trainingjob.engine.reconciler import utc_now


def job(**config: Any) -> TrainingJob:
    return parse(
        {
            "apiVersion": "raytraining.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {
                "image": "i",
                "rayVersion": "2.60.0",
                "entrypoint": "e",
                "workers": {"replicas": 1},
                "config": config,
            },
        }
    )


async def test_a_second_command_finds_identity_status_and_first_loss(tmp_path: Path) -> None:
    first = LocalJobStore(tmp_path, job())
    for loss in (5.5, 2.1):
        training = TrainingStatus(step=1, validation_loss=loss)
        status = TrainingJobStatus(phase=Phase.SUSPENDED, attempt=3, training=training)
        await first.write_status(first.job.with_status(status))
    second = LocalJobStore(tmp_path, job())
    assert second.job.metadata.uid == first.job.metadata.uid
    assert second.job.status.attempt == 3
    assert second.first_validation_loss == 5.5
    assert not second.spec_changed
    third = LocalJobStore(tmp_path, job(steps=2))
    assert third.spec_changed
    assert third.job.metadata.generation == 2
    assert third.job.spec.config == {"steps": 2}


async def test_suspension_is_for_this_run_only(tmp_path: Path) -> None:
    store = LocalJobStore(tmp_path, job())
    store.suspend()
    await store.write_status(store.job.with_status(TrainingJobStatus(attempt=1)))
    assert store.job.spec.suspend
    assert not LocalJobStore(tmp_path, job()).job.spec.suspend


async def test_time_between_commands_is_not_active(tmp_path: Path) -> None:
    store = LocalJobStore(tmp_path, job())
    status = TrainingJobStatus(phase=Phase.RUNNING, active_since=utc_now() - timedelta(seconds=9))
    await store.write_status(store.job.with_status(status))
    content = json.loads((tmp_path / "job.json").read_text())
    assert LocalJobStore(tmp_path, job()).job.status.active_seconds in (9, 10)
    content["local"]["saved"] = "2001-01-01T00:00:00Z"
    (tmp_path / "job.json").write_text(json.dumps(content))
    assert LocalJobStore(tmp_path, job()).job.status.active_seconds == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"metadata": 1, "local": {}, "spec": {}}'])
def test_a_damaged_state_is_told_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(BadState, match="--fresh"):
        LocalJobStore(tmp_path, job())


def test_one_command_at_a_time(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path, "a"), RunDirectory(tmp_path, "a")
    first.take()
    with pytest.raises(Busy, match="is being run by process"):
        second.take()
    second.release()
    first.release()
    second.take()
    second.release()


def test_set_aside_deletes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    directory.take()
    assert directory.set_aside() is None
    asides = []
    for text in ("1", "2"):
        (directory.path / "job.json").write_text(text)
        aside = directory.set_aside()
        assert aside
        asides.append((aside / "job.json").read_text())
    assert asides == ["1", "2"]
    directory.release()


def test_token_is_private_and_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    directory.take()
    token = directory.token()
    assert len(token) >= 32
    assert (directory.path / "token").stat().st_mode & 0o777 == 0o600
    assert directory.token() == token
    directory.release()


def test_log_lines_are_shown_once_each(tmp_path: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(lambda name: tmp_path / name, shown.append, known="old")
    (tmp_path / "old").write_text("shown by an earlier command\n")
    follower.pump("old")
    follower.pump("s1")
    log = (tmp_path / "s1").open("wb", buffering=0)
    log.write(b"2026 INFO job_manager.py:581 -- Runtime env is setting up.\none\ntw")
    follower.pump("s1")
    log.write(b"o\n 1%\r 50%\r100%\n\xc3")
    follower.pump("s1")
    log.write(b"\xa9 end")
    follower.pump("s2")
    (tmp_path / "s2").write_text("three\n")
    follower.pump("s2")
    follower.finish()
    assert shown == ["one", "two", "100%", "é end", "three"]


GUARDED = """
    import os, subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("ready", flush=True)
            time.sleep(60)
        os._exit(0)
    time.sleep(float(sys.argv[1]))
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the guard adopts orphans on Linux only")
@pytest.mark.parametrize("by_itself", [True, False])
def test_guard_leaves_nothing(tmp_path: Path, by_itself: bool) -> None:
    directory = tmp_path / "ray"
    directory.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", guard.__file__, str(directory)),
            *(sys.executable, "-c", textwrap.dedent(GUARDED), "0.3" if by_itself else "60"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    if not by_itself:
        process.stdin.close()
    # Everything that was started holds the other end: it is closed when all have ended.
    assert process.stdout.read() == b""
    assert process.wait(10) == (7 if by_itself else 0)
    assert directory.exists() == by_itself
    process.stdin.close()
    process.stdout.close()
