"""The contract's module, as other people's scripts use it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainingjob_trainer import contract


def test_defaults_are_those_of_a_run_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    job = contract.job({})
    assert (job.name, job.namespace, job.uid, job.attempt) == ("trainingjob", "default", "", 1)
    assert (job.num_workers, job.gpus_per_worker, job.cpus_per_worker) == (1, 0, 1.0)
    assert job.storage == str(tmp_path / "trainingjob-runs")
    assert job.run_directory == str(tmp_path / "trainingjob-runs" / "trainingjob")


def test_reads_what_the_operator_sets():
    job = contract.job(
        {
            "TRAININGJOB_NAME": "llama",
            "TRAININGJOB_NAMESPACE": "team",
            "TRAININGJOB_UID": "u-1",
            "TRAININGJOB_ATTEMPT": "3",
            "TRAININGJOB_NUM_WORKERS": "16",
            "TRAININGJOB_GPUS_PER_WORKER": "1",
            "TRAININGJOB_CPUS_PER_WORKER": "3.5",
            "TRAININGJOB_PLACEMENT": "SPREAD",
            "TRAININGJOB_STORAGE": "s3://bucket/path/",
            "TRAININGJOB_CONFIG": "/etc/c.json",
            "TRAININGJOB_PROGRESS": "/tmp/p.jsonl",
        }
    )
    assert job == contract.Job(
        "llama", "team", "u-1", 3, 16, 1, 3.5, "SPREAD", "s3://bucket/path/", "/etc/c.json",
        "/tmp/p.jsonl",
    )  # fmt: skip
    assert job.run_directory == "s3://bucket/path/llama"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ATTEMPT", "0"),
        ("ATTEMPT", "one"),
        ("NUM_WORKERS", "-1"),
        ("NUM_WORKERS", "2.0"),
        ("CPUS_PER_WORKER", "nan"),
        ("CPUS_PER_WORKER", "many"),
        ("PLACEMENT", "pack"),
    ],
)
def test_refuses_what_is_not_the_contract(key: str, value: str):
    with pytest.raises(ValueError, match=f"TRAININGJOB_{key}"):
        contract.job({f"TRAININGJOB_{key}": value})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_progress_is_one_object_a_line_with_the_keys_of_the_status(tmp_path: Path):
    path = tmp_path / "progress.jsonl"
    file = contract.ProgressFile(str(path))
    file.report(step=1, total_steps=4, loss=2.5)
    file.report(checkpoint_step=1, checkpoint_time="2026-01-01T00:00:00Z")
    first, second = lines(path)
    assert first == {"step": 1, "totalSteps": 4, "percent": 25.0, "loss": 2.5}
    assert second == {**first, "checkpointStep": 1, "checkpointTime": "2026-01-01T00:00:00Z"}
    assert all(len(line) < 2048 for line in path.read_text().splitlines())


def test_progress_is_written_at_most_once_a_second_but_for_the_last_step(tmp_path: Path):
    path = tmp_path / "progress.jsonl"
    file = contract.ProgressFile(str(path))
    for step in range(1, 1001):
        file.report(step=step, total_steps=1000)
    assert [line["step"] for line in lines(path)] == [1, 1000]


def test_progress_never_writes_what_json_does_not_have(tmp_path: Path):
    path = tmp_path / "progress.jsonl"
    contract.ProgressFile(str(path)).report(loss=float("nan"), eta_seconds=float("inf"))
    assert lines(path) == [{"loss": None, "etaSeconds": None}]


def test_progress_refuses_unknown_fields_and_survives_an_unwritable_file(tmp_path: Path):
    file = contract.ProgressFile(str(tmp_path / "no" / "such" / "directory"))
    file.report(step=1)
    with pytest.raises(TypeError, match="unknown progress field 'stpe'"):
        file.report(stpe=1)


SCRIPT = """
import sys, time
from trainingjob_trainer import contract
assert not contract.stop_requested()
for step in range(1, 1000):
    contract.report_progress(step=step, total_steps=1000)
    print(step, flush=True)
    if contract.stop_requested():
        sys.exit(contract.ExitCode.STOPPED)
    time.sleep(0.05)
assert not {"ray", "torch", "numpy", "pydantic"} & set(sys.modules)
"""


def test_a_plain_script_stops_on_sigterm_with_75(tmp_path: Path):
    path = tmp_path / "progress.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        env={**os.environ, "TRAININGJOB_PROGRESS": str(path)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert process.wait(10) == 75
    assert time.monotonic() - started < 5
    assert lines(path)[0] == {"step": 1, "totalSteps": 1000, "percent": 0.1}


def test_contract_imports_nothing_heavy():
    code = (
        "import sys; import trainingjob_trainer.contract; "
        "heavy = {'ray', 'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_config_file_may_be_json_or_yaml(tmp_path: Path):
    (tmp_path / "c.json").write_text('{"a": 1e-3}')
    (tmp_path / "c.yaml").write_text("a: [1, x]\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bad").write_text("a: [")
    assert contract.read_config(str(tmp_path / "c.json")) == {"a": 0.001}
    assert contract.read_config(str(tmp_path / "c.yaml")) == {"a": [1, "x"]}
    assert contract.read_config(str(tmp_path / "empty")) == {}
    with pytest.raises(ValueError, match="neither JSON nor YAML"):
        contract.read_config(str(tmp_path / "bad"))
