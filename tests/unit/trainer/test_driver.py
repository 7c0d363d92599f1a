"""What the driver finds out before it needs a cluster, and how it says so."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from trainingjob_trainer import contract, storage
from trainingjob_trainer.__main__ import main
from trainingjob_trainer.storage import Done, RunDirectory


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The driver catches signals for the rest of its process, which here is pytest."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A config to change; `run` writes it and starts the driver."""
    (tmp_path / "text.txt").write_text("some text " * 100)
    for key, value in {
        "NAME": "unit",
        "NAMESPACE": "team",
        "UID": "u1",
        "STORAGE": str(tmp_path / "storage"),
        "CONFIG": str(tmp_path / "config.json"),
        "PROGRESS": str(tmp_path / "progress.jsonl"),
    }.items():
        monkeypatch.setenv(f"TRAININGJOB_{key}", value)
    for key in ("NUM_WORKERS", "ATTEMPT", "PLACEMENT", "GPUS_PER_WORKER", "CPUS_PER_WORKER"):
        monkeypatch.delenv(f"TRAININGJOB_{key}", raising=False)
    return {"data": {"train": [f"{tmp_path}/*.txt"]}, "training": {"steps": 10}}


def run(config: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output, and the last two lines of standard error."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = main([])
    out, err = capsys.readouterr()
    return code, out, "\n".join(err.splitlines()[-2:])


def test_a_misspelt_key_is_64(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job["model"] = {"config": {"hidenSize": 64}}
    code, _, err = run(job, tmp_path, capsys)
    assert code == 64
    assert err == (
        "error: unknown key `model.config.hidenSize`; did you mean `hiddenSize`?\n"
        "remedy: correct spec.config of the TrainingJob"
    )


def test_a_broken_environment_is_64(
    job: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TRAININGJOB_ATTEMPT", "first")
    code, _, err = run(job, tmp_path, capsys)
    assert code == 64
    assert "TRAININGJOB_ATTEMPT='first'" in err


def test_a_glob_without_files_is_65(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job["data"] = {"train": [f"{tmp_path}/*.txt", f"{tmp_path}/none/*.txt"]}
    code, _, err = run(job, tmp_path, capsys)
    assert code == 65
    assert f"error: the glob '{tmp_path}/none/*.txt' matches no file on" in err
    assert "\nremedy: " in err


def test_unusable_storage_is_66(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "storage").write_text("a file")
    code, _, err = run(job, tmp_path, capsys)
    assert code == 66
    assert f"error: cannot write to the storage {tmp_path}/storage/unit on" in err
    assert "\nremedy: name a directory" in err


def test_a_directory_of_another_namespace_is_66(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    directory = RunDirectory(str(tmp_path / "storage"), "unit")
    directory.preflight()
    directory.claim(contract.Job(name="unit", namespace="others"))
    code, _, err = run(job, tmp_path, capsys)
    assert code == 66
    assert "belongs to the job others/unit" in err


def test_a_superseded_attempt_is_74(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    directory = RunDirectory(str(tmp_path / "storage"), "unit")
    directory.preflight()
    directory.claim(contract.Job(name="unit", namespace="team", uid="u1", attempt=2))
    code, _, err = run(job, tmp_path, capsys)
    assert code == 74
    assert "attempt 1 is superseded: attempt 2 owns" in err


def test_finished_training_ends_at_once_with_0(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    directory = RunDirectory(str(tmp_path / "storage"), "unit")
    directory.preflight()
    directory.write_done(Done("an earlier one", 10, 10, 5.0, 2.0, "x"))
    code, out, _ = run(job, tmp_path, capsys)
    assert code == 0
    assert "training is complete already: step 10 of 10" in out
    last = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["totalSteps"], last["percent"]) == (10, 10, 100.0)
    assert json.loads(Path(directory.join(storage.DONE)).read_text()) == asdict(
        Done("an earlier one", 10, 10, 5.0, 2.0, "x")
    )


def test_the_resolved_config_is_printed(
    job: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(job))
    assert main(["--print-config"]) == 0
    out = capsys.readouterr().out
    assert "job team/unit, attempt 1, 1 worker(s)" in out
    assert "  microBatchSize: 16\n" in out


def test_the_driver_needs_neither_torch_nor_ray_to_refuse(job: dict[str, object], tmp_path: Path):
    """Seconds count: an error in the config must not wait for imports."""
    (tmp_path / "config.json").write_text(json.dumps({**job, "dta": 1}))
    code = (
        "import sys; from trainingjob_trainer.__main__ import main; code = main([]); "
        "heavy = {'ray', 'torch', 'transformers', 'pyarrow'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 64
