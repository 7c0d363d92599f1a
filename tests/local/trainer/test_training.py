"""The trainer on a real Ray cluster of this machine: it learns, stops, dies, resumes."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.trainer.conftest import Run, sample_log
from trainingjob_trainer.storage import RunDirectory

STEPS, BATCH = 60, 8


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "and",
        "dogs",
        "ran",
        "to",
        "trees",
        "in",
        "rain",
    ]
    for number in range(4):
        text = " ".join(words[(i * i + number) % len(words)] for i in range(1500))
        (tmp_path / f"{number}.txt").write_text(text)
    return f"{tmp_path}/*.txt"


@pytest.fixture
def config(corpus: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"config": {"hiddenSize": 32, "layers": 1, "heads": 2}},
        "data": {"train": [corpus], "sequenceLength": 32, "cacheDirectory": f"{tmp_path}/cache"},
        "training": {
            "steps": STEPS,
            "globalBatchSize": BATCH,
            "microBatchSize": 2,
            "learningRate": 0.01,
            "warmupSteps": 5,
            "evalEvery": 30,
            "logEvery": 5,
        },
        "checkpoint": {"everySteps": 20, "keep": 2},
        "debug": {"sampleLog": f"{tmp_path}/samples"},
    }


def slow(config: dict[str, Any]) -> dict[str, Any]:
    """The same with a model of 0.1 s a step and one rank's micro-batch."""
    training = {**config["training"], "microBatchSize": None}
    return {**config, "model": {"factory": "usermodels:slow"}, "training": training}


def losses(output: str) -> dict[int, list[float]]:
    """Step -> the losses of its line, training before validation."""
    found = re.findall(r"^step (\d+)/\d+  (.*)$", output, re.MULTILINE)
    return {
        int(step): [float(x) for x in re.findall(r"(?:loss|val) ([\d.]+)", rest)]
        for step, rest in found
    }


def test_it_learns_and_the_curve_does_not_depend_on_the_workers(
    start: Callable[..., Run], config: dict[str, Any], tmp_path: Path
):
    two = start(config, workers=2, name="two")
    assert two.wait() == 0, two.output
    assert re.search(
        r"^validation loss 5\.\d+ -> \d\.\d+ \(0\.\d+ of its start\)$", two.output, re.M
    )
    assert (
        two.output.splitlines()[-1]
        == f"checkpoint: {tmp_path}/storage/two/checkpoint_step_00000060"
    )
    curve = losses(two.output)
    assert curve[0][0] == pytest.approx(5.5, abs=0.3)  # ln 257
    assert curve[60][-1] < 0.6 * curve[0][0]

    lines = two.progress
    assert lines[-1]["step"] == lines[-1]["totalSteps"] == lines[-1]["checkpointStep"] == 60
    assert lines[-1]["percent"] == 100.0
    assert lines[-1]["validationLoss"] == pytest.approx(curve[60][-1], abs=0.01)
    assert {"loss", "tokensPerSecond", "etaSeconds", "checkpointTime", "startedAt"} <= lines[
        -1
    ].keys()
    assert len(two.progress_file.read_text().splitlines()[-1]) < 2048

    directory = RunDirectory(f"{tmp_path}/storage", "two")
    assert [m.step for m in directory.checkpoints().values()] == [40, 60]
    done = directory.done()
    assert done is not None
    assert (done.step, done.total_steps, done.uid) == (60, 60, "uid-two")

    one = start(config, workers=1, name="one", attempt=2)
    assert one.wait() == 0, one.output
    assert losses(one.output).keys() == curve.keys()
    for step, values in losses(one.output).items():
        assert values == pytest.approx(curve[step], abs=2e-3), step  # four digits are printed
    first, second = (RunDirectory(f"{tmp_path}/storage", n).done() for n in ("one", "two"))
    assert first is not None
    assert second is not None
    assert first.validation_loss == pytest.approx(second.validation_loss, rel=1e-4)
    samples = [sample_log(tmp_path / "samples", {n: range(1, 61)}) for n in (1, 2)]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 60

    again = start(config, workers=2, name="two")
    assert again.wait() == 0
    assert "training is complete already: step 60 of 60" in again.output


def test_a_stop_saves_and_the_next_attempt_goes_on_with_fewer_workers(
    start: Callable[..., Run], config: dict[str, Any], tmp_path: Path
):
    config = slow(config)
    stopped = start(config, workers=2)
    stopped.wait_for(lambda line: line.get("step", 0) >= 6)
    stopped.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert stopped.wait(30) == 75, stopped.output
    assert time.monotonic() - asked < 10
    (found,) = re.findall(r"^stopped at step (\d+) of 60: as asked$", stopped.output, re.MULTILINE)
    step = int(found)
    assert 6 <= step < STEPS
    assert stopped.progress[-1]["checkpointStep"] == step

    resumed = start(config, workers=1, attempt=2)
    assert resumed.wait() == 0, resumed.output
    assert f"resumed from step {step} (saved by 2 workers, now 1)" in resumed.output
    assert resumed.progress[-1]["resumedFromStep"] == step

    undisturbed = start(config, workers=2, name="undisturbed", attempt=3)
    assert undisturbed.wait() == 0, undisturbed.output
    samples = tmp_path / "samples"
    assert sample_log(samples, {1: range(1, step + 1), 2: range(step + 1, 61)}) == sample_log(
        samples, {3: range(1, 61)}
    )
    ends = [RunDirectory(f"{tmp_path}/storage", name).done() for name in ("j", "undisturbed")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].validation_loss == pytest.approx(ends[1].validation_loss, rel=1e-4)
    assert ends[0].start_validation_loss == ends[1].start_validation_loss


def workers_of(run: Run) -> list[int]:
    """The worker processes that map the run's tokens: ours, whoever else trains here."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "cmdline").read_bytes()
            if (
                b"RayTrainWorker" in name
                and f"{run.log.parent}/cache/" in (process / "maps").read_text()
            ):
                found.append(int(process.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_a_killed_worker_ends_the_attempt_and_the_next_resumes(
    start: Callable[..., Run], config: dict[str, Any], tmp_path: Path
):
    config = slow(config)
    killed = start(config, workers=2)
    killed.wait_for(lambda line: line.get("checkpointStep", 0) >= 40)
    victims = workers_of(killed)
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    at = time.monotonic()
    assert killed.wait(30) == 74, killed.output
    assert time.monotonic() - at < 12
    cause, remedy = killed.error().splitlines()
    assert re.match(rf"error: rank \d was lost: process {victims[1]} on ", cause)
    assert remedy == "remedy: run the job again: it resumes from the last checkpoint"

    # The newest checkpoint is damaged besides, and Ray's record is cut in the middle.
    directory = RunDirectory(f"{tmp_path}/storage", "j")
    assert [m.step for m in directory.checkpoints().values()] == [20, 40]
    shard = Path(directory.join("checkpoint_step_00000040", "__0_0.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    record = Path(directory.join("checkpoint_manager_snapshot.json"))
    record.write_bytes(record.read_bytes()[:100])

    resumed = start(config, workers=2, attempt=2)
    assert resumed.wait(120) == 0, resumed.output
    assert "rebuilt the record of checkpoints" in resumed.output
    assert "checkpoint_step_00000040 is damaged" in resumed.output
    assert "resumed from step 20" in resumed.output
    assert len(sample_log(tmp_path / "samples", {1: range(1, 21), 2: range(21, 61)})) == 60


def test_an_exception_of_the_user_is_70_with_its_traceback(
    start: Callable[..., Run], config: dict[str, Any]
):
    config["model"] = {"factory": "usermodels:broken"}
    run = start(config, workers=1)
    assert run.wait() == 70, run.output
    assert re.fullmatch(
        r"error: rank 0 on \S+: ValueError: a bug of the user\n"
        r"remedy: fix the code: the traceback stands above",
        run.error(),
    )
    assert 'usermodels.py", line' in run.output
