"""The run directory: ownership, whole and broken checkpoints, the doctor, markers."""

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainingjob_trainer import storage
from trainingjob_trainer.contract import ExitCode, Job
from trainingjob_trainer.errors import TrainingError
from trainingjob_trainer.storage import Done, Manifest, RunDirectory

JOB = Job(name="run", namespace="team", uid="u1", attempt=2)


@pytest.fixture(params=["directory", "object store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    run = RunDirectory(f"file://{tmp_path}/store", "run")
    run.is_local = request.param == "directory"
    run.preflight()
    return run


def add_checkpoint(run: RunDirectory, step: int, *, manifest: bool = True) -> Path:
    name = storage.checkpoint_name(step)
    directory = Path(run.join(name))
    directory.mkdir()
    (directory / "__0_0.distcp").write_bytes(b"x" * step)
    (directory / ".metadata").write_bytes(b"m")
    files = {file: run.checksum(name, file) for file in ("__0_0.distcp", ".metadata")}
    if manifest:
        run.write_manifest(
            name,
            Manifest(
                step=step,
                consumed_samples=step * 8,
                world_size=2,
                global_batch_size=8,
                state_digest="s",
                data_digest="d",
                start_validation_loss=5.5,
                validation_loss=2.5,
                loss=None,
                time="2026-01-01T00:00:00Z",
                uid="u1",
                attempt=1,
                files=files,
            ),
        )
    return directory


def snapshot(run: RunDirectory) -> dict[str, object]:
    value = run.read_json(storage.SNAPSHOT)
    assert value is not None
    return value


# --- preflight ------------------------------------------------------------------------------------


def test_preflight_leaves_nothing_behind(run: RunDirectory):
    assert list(Path(run.path).iterdir()) == []


def test_a_file_in_the_way_is_explained(tmp_path: Path):
    (tmp_path / "store").write_text("")
    with pytest.raises(TrainingError) as caught:
        RunDirectory(str(tmp_path / "store"), "run").preflight()
    assert caught.value.code is ExitCode.STORAGE
    assert "cannot write to the storage" in caught.value.cause
    assert caught.value.remedy == "name a directory: a file stands in the way"


def test_a_read_only_place_is_explained():
    with pytest.raises(TrainingError) as caught:
        RunDirectory("/proc/nowhere", "run").preflight()
    assert caught.value.code is ExitCode.STORAGE


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_missing_permission_is_explained(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(TrainingError) as caught:
        RunDirectory(str(tmp_path), "run").preflight()
    assert "write access" in caught.value.remedy


def test_an_unknown_scheme_is_explained():
    with pytest.raises(TrainingError) as caught:
        RunDirectory("ftp://host/path", "run")
    assert caught.value.code is ExitCode.STORAGE
    assert "pyarrow knows" in caught.value.remedy


# --- ownership ------------------------------------------------------------------------------------


def test_each_attempt_takes_the_mark(run: RunDirectory):
    assert run.claim(JOB) == ""
    assert run.claim(replace(JOB, attempt=3)) == ""
    mark = run.read_json(storage.OWNER)
    assert mark is not None
    assert (mark["namespace"], mark["name"], mark["uid"], mark["attempt"]) == (
        "team", "run", "u1", 3,
    )  # fmt: skip


def test_a_later_attempt_stops_an_earlier_one(run: RunDirectory):
    run.claim(JOB)
    run.check_owner(JOB)
    run.claim(replace(JOB, attempt=3))
    for act in (run.check_owner, run.claim):
        with pytest.raises(TrainingError, match="superseded") as caught:
            act(JOB)
        assert caught.value.code is ExitCode.INFRASTRUCTURE


def test_a_recreated_job_takes_over_and_says_so(run: RunDirectory):
    run.claim(replace(JOB, attempt=7))
    note = run.claim(replace(JOB, uid="u2", attempt=1))
    assert "taking over" in note
    run.check_owner(replace(JOB, uid="u2", attempt=1))


@pytest.mark.parametrize("other", [{"namespace": "theirs"}, {"name": "another"}])
def test_another_job_is_kept_out(run: RunDirectory, other: dict[str, str]):
    run.claim(replace(JOB, **other))  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="belongs to the job") as caught:
        run.claim(JOB)
    assert caught.value.code is ExitCode.STORAGE


def test_a_node_without_the_shared_storage_is_named(run: RunDirectory):
    with pytest.raises(TrainingError, match="rank 1 on host-b does not see") as caught:
        run.check_visible(JOB, "rank 1 on host-b", patience_seconds=0)
    assert caught.value.code is ExitCode.STORAGE
    assert "ReadWriteMany" in caught.value.remedy
    run.claim(JOB)
    run.check_visible(JOB, "rank 1 on host-b", patience_seconds=0)


# --- checkpoints and the doctor -------------------------------------------------------------------


def test_a_manifest_survives_the_round_trip(run: RunDirectory):
    add_checkpoint(run, 5)
    (name,), (manifest,) = zip(*run.checkpoints().items(), strict=True)
    assert name == "checkpoint_step_00000005"
    assert manifest.consumed_samples == 40
    assert manifest.files["__0_0.distcp"] == run.checksum(name, "__0_0.distcp")


def test_an_empty_directory_needs_no_doctor(run: RunDirectory):
    assert run.doctor() == []
    assert run.read(storage.SNAPSHOT) is None


def test_the_doctor_records_whole_checkpoints_and_removes_the_others(run: RunDirectory):
    whole = [add_checkpoint(run, step) for step in (10, 20)]
    cut = add_checkpoint(run, 30)
    (cut / "__0_0.distcp").write_bytes(b"x")
    unfinished = add_checkpoint(run, 40, manifest=False)
    without_shard = add_checkpoint(run, 50)
    (without_shard / "__0_0.distcp").unlink()
    notes = run.doctor()
    assert len([note for note in notes if "not complete" in note]) == 3
    assert all(path.exists() for path in whole)
    assert not any(path.exists() for path in (cut, unfinished, without_shard))
    record = snapshot(run)
    assert record["ray_version"] == metadata.version("ray")
    assert record["latest_checkpoint_result"] == {
        "version": 0,
        "checkpoint_dir_name": "checkpoint_step_00000020",
        "metrics": {"step": 20},
    }
    assert run.doctor() == []


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"null", b"[]", b'{"checkpoint_results": []}', b"\xff\xfe"]
)
def test_the_doctor_rebuilds_a_broken_record_and_keeps_it(run: RunDirectory, broken: bytes):
    add_checkpoint(run, 10)
    run.write(broken, storage.SNAPSHOT)
    assert run.doctor() == ["rebuilt the record of checkpoints, which did not match them"]
    assert snapshot(run)["current_report_index"] == 1
    kept = [path for path in Path(run.path).iterdir() if ".corrupt-" in path.name]
    assert [path.read_bytes() for path in kept] == [broken]


@pytest.mark.parametrize(
    "change",
    [
        {"ray_version": "2.9.0"},
        {"latest_checkpoint_result": None},
        {"checkpoint_report_indices": []},
        {"pending_training_results": [{"checkpoint_dir_name": "gone"}]},
        {
            "checkpoint_results": [
                {"version": 0, "checkpoint_dir_name": "checkpoint_step_00000099", "metrics": {}}
            ]
        },
    ],
)
def test_the_doctor_rebuilds_a_record_that_ray_would_refuse(
    run: RunDirectory, change: dict[str, object]
):
    add_checkpoint(run, 10)
    run.doctor()
    good = snapshot(run)
    run.write_json({**good, **change}, storage.SNAPSHOT)
    assert len(run.doctor()) == 1
    assert snapshot(run) == good


def test_ray_accepts_the_record(run: RunDirectory):
    """Against the real class: its fields change between releases."""
    manager = pytest.importorskip("ray.train.v2._internal.execution.checkpoint.checkpoint_manager")
    add_checkpoint(run, 10)
    run.doctor()
    state = manager._CheckpointManagerState.parse_obj(snapshot(run))
    assert state.latest_checkpoint_result.checkpoint_dir_name == "checkpoint_step_00000010"


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda s: json.dumps(s).encode()))
@settings(max_examples=30)
def test_no_content_of_a_manifest_or_record_is_fatal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
):
    run = RunDirectory(str(tmp_path_factory.mktemp("r")), "run")
    run.preflight()
    add_checkpoint(run, 10)
    directory = add_checkpoint(run, 20)
    (directory / storage.MANIFEST).write_bytes(content)
    run.write(content, storage.SNAPSHOT)
    run.write(content, storage.DONE)
    run.write(content, storage.OWNER)
    run.doctor()
    assert list(run.checkpoints()) == ["checkpoint_step_00000010"]
    assert run.done() is None


def test_a_damaged_checkpoint_is_set_aside(run: RunDirectory):
    add_checkpoint(run, 10)
    run.set_aside("checkpoint_step_00000010")
    run.set_aside("checkpoint_step_00000010")
    assert run.checkpoints() == {}


def test_checksums_see_a_changed_byte(run: RunDirectory):
    directory = add_checkpoint(run, 10)
    name = directory.name
    before = run.checksum(name, "__0_0.distcp")
    (directory / "__0_0.distcp").write_bytes(b"x" * 9 + b"y")
    after = run.checksum(name, "__0_0.distcp")
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_the_end_marker_survives_the_round_trip(run: RunDirectory):
    assert run.done() is None
    done = Done("u1", 10, 10, 5.5, None, "somewhere")
    run.write_done(done)
    assert run.done() == done
