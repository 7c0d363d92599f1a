"""The parts of the loop that need no cluster: schedule, optimizer, model, loss, checkpoints."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainingjob_trainer import checkpoint, config, data, loop, models, storage
from trainingjob_trainer.contract import ExitCode
from trainingjob_trainer.errors import DamagedCheckpoint, TrainingError
from trainingjob_trainer.storage import Manifest, RunDirectory
from trainingjob_trainer.watch import Watch


def settings(**sections: object) -> config.Config:
    raw = {"data": {"train": ["/x"], "sequenceLength": 8}, **sections}
    return config.resolve(config.parse(raw), 1)


# --- schedule -------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.data())
def test_the_rate_rises_then_falls_to_its_minimum(steps: int, drawn: st.DataObject):
    warmup = drawn.draw(st.integers(0, steps))
    training = config.Training(
        steps=steps, warmup_steps=warmup, learning_rate=2.0, min_learning_rate_ratio=0.25
    )
    rates = [loop.learning_rate(step, training) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == 2.0
    if warmup < steps:
        assert rates[-1] == pytest.approx(0.5)


def test_random_numbers_depend_on_seed_step_and_rank():
    seeds = {loop.seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- model ----------------------------------------------------------------------------------------

LLAMA = {"config": {"hiddenSize": 16, "layers": 1, "heads": 2, "keyValueHeads": 1}}


def test_a_llama_is_built_as_asked_and_equal_for_one_seed():
    first, second = (models.build(settings(model=LLAMA), 257) for _ in range(2))
    assert first(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits.shape == (2, 8, 257)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float32
    other = models.build(settings(model=LLAMA, training={"seed": 1}), 257)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_model_directory_is_loaded_and_checked(tmp_path: Path):
    models.build(settings(model=LLAMA), 300).save_pretrained(tmp_path)  # type: ignore[operator]
    model = models.build(settings(model={"path": str(tmp_path)}), 257)
    assert model.training
    assert model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.shape == (1, 8, 300)
    with pytest.raises(TrainingError, match="the tokenizer has 301 tokens"):
        models.build(settings(model={"path": str(tmp_path)}), 301)
    with pytest.raises(TrainingError, match="cannot load `model.path`") as caught:
        models.build(settings(model={"path": str(tmp_path / "none")}), 257)
    assert caught.value.code is ExitCode.CONFIGURATION


class Bigram(nn.Module):
    """The smallest language model."""

    def __init__(self, vocab_size: int, unused: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, input_ids: torch.Tensor) -> Any:
        class Output:
            logits = self.table(input_ids)

        return Output


def bigram(vocab_size: int, sequence_length: int) -> nn.Module:
    assert sequence_length == 8
    return Bigram(vocab_size)


def test_a_factory_is_called_and_a_wrong_one_explained():
    name = f"{__name__}:bigram"
    assert isinstance(models.build(settings(model={"factory": name}), 5), nn.Module)
    for wrong in ("no.such.module:f", f"{__name__}:nothing", "nocolon"):
        with pytest.raises(TrainingError, match=r"cannot import `model.factory`") as caught:
            models.build(settings(model={"factory": wrong}), 5)
        assert caught.value.code is ExitCode.CONFIGURATION


# --- optimizer ------------------------------------------------------------------------------------


def test_state_made_in_advance_changes_no_update():
    model = Bigram(5)
    twin = copy.deepcopy(model)
    training = config.Training(learning_rate=0.1, weight_decay=0.0)
    ours = loop.adamw(model, training, fused=False)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for module, optimizer in ((model, ours), (twin, plain)):
            module(torch.arange(5)).logits.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.table.weight, twin.table.weight)


def test_only_matrices_decay():
    groups = loop.adamw(nn.Linear(2, 2), config.Training(weight_decay=0.5), False).param_groups
    assert [(g["params"][0].dim(), g["weight_decay"]) for g in groups] == [(2, 0.5), (1, 0.0)]


# --- loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_gradient_depends_neither_on_the_ranks_nor_on_the_micro_batch(world: int, micro: int):
    """With a last block that is mostly padding, where a mean of means would be wrong."""
    tokens = np.arange(8 * 15 + 4, dtype=np.uint16) % 5
    samples, _ = data.split(tokens, 8, 0.0)
    ids = np.arange(8, 16)
    torch.manual_seed(0)
    model = Bigram(5)
    whole = copy.deepcopy(model)
    inputs, targets = map(torch.from_numpy, samples.batch(ids))
    logits = whole(inputs).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    trainer = loop.Trainer.__new__(loop.Trainer)
    trainer.device = torch.device("cpu")
    trainer.config = settings()
    means = []
    for rank in range(world):
        replica = copy.deepcopy(model)
        for chosen in data.micro_batches(data.rank_share(ids, rank, world), micro):
            loss = trainer._loss(replica, samples, chosen)
            (loss * (world / samples.valid(ids))).backward()
        means.append(replica.table.weight.grad)
    gradient = torch.stack([g for g in means if g is not None]).mean(0)  # what DDP does
    assert whole.table.weight.grad is not None
    torch.testing.assert_close(gradient, whole.table.weight.grad)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=["directory", "object store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "storage"), "run")
    run.is_local = request.param == "directory"  # else through pyarrow, as an object store is
    run.preflight()
    return run


MANIFEST = Manifest(3, 24, 1, 8, "", "d", None, None, 1.5, "2026-01-01T00:00:00Z", "u", 1)


def trained(unused: bool = False) -> tuple[Bigram, torch.optim.Optimizer]:
    model = Bigram(5, unused)
    optimizer = loop.adamw(model, config.Training(learning_rate=0.1), fused=False)
    model(torch.arange(5)).logits.square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_holds_the_state_at_the_save_and_resumes_exactly(
    run: RunDirectory, group: Any
):
    model, optimizer = trained(unused=True)
    registered: list[Any] = []
    saver = checkpoint.Checkpointer(
        run, model, optimizer, group, lambda name, metrics: registered.append((name, metrics))
    )
    saver.save(replace(MANIFEST, state_digest=saver.state_digest))
    before = {name: tensor.clone() for name, tensor in checkpoint.state(model, optimizer).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # while the save is in flight
    assert run.checkpoints() == {}
    assert saver.busy
    manifest = saver.commit()
    assert not saver.busy
    assert registered == [("checkpoint_step_00000003", {"step": 3, "loss": 1.5})]
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}
    assert run.checkpoints() == {"checkpoint_step_00000003": manifest}

    other, fresh = Bigram(5, unused=True), None
    fresh = loop.adamw(other, config.Training(learning_rate=0.1), fused=False)
    loader = checkpoint.Checkpointer(run, other, fresh, group)
    loader.load("checkpoint_step_00000003", manifest)
    after = checkpoint.state(other, fresh)
    assert after.keys() == before.keys()
    assert "optimizer.unused.weight.exp_avg" in after
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name
    assert float(fresh.state[other.table.weight]["step"]) == 1.0


def saved(run: RunDirectory, group: Any) -> tuple[checkpoint.Checkpointer, Manifest]:
    saver = checkpoint.Checkpointer(run, *trained(), group, lambda name, metrics: None)
    saver.save(replace(MANIFEST, state_digest=saver.state_digest))
    return saver, saver.commit()


def test_a_changed_byte_is_found_and_the_checkpoint_set_aside(run: RunDirectory, group: Any):
    saver, manifest = saved(run, group)
    name = storage.checkpoint_name(3)
    shard = Path(run.join(name, "__0_0.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 16] = bytes(16)
    shard.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp changed since the save"):
        saver.load(name, manifest)
    assert run.checkpoints() == {}
    assert run.doctor() == [f"removed {name}, which is not complete"]


def test_a_checkpoint_of_another_model_is_refused(run: RunDirectory, group: Any):
    _, manifest = saved(run, group)
    model = Bigram(6)
    other = checkpoint.Checkpointer(run, model, loop.adamw(model, config.Training(), False), group)
    with pytest.raises(TrainingError, match="another model") as caught:
        other.load(storage.checkpoint_name(3), manifest)
    assert caught.value.code is ExitCode.CONFIGURATION


def test_a_failed_write_is_raised_where_it_is_asked_for(
    run: RunDirectory, group: Any, monkeypatch: pytest.MonkeyPatch
):
    saver = checkpoint.Checkpointer(run, *trained(), group, lambda name, metrics: None)

    def full(name: str, file: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "checksum", full)
    saver.save(MANIFEST)
    with pytest.raises(OSError, match="No space left"):
        saver.commit()
    assert run.checkpoints() == {}


def test_a_full_disk_is_refused_before_the_write(
    run: RunDirectory, group: Any, monkeypatch: pytest.MonkeyPatch
):
    if not run.is_local:
        pytest.skip("an object store has no free space to ask for")
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    saver = checkpoint.Checkpointer(run, *trained(), group)
    with pytest.raises(TrainingError, match="GB free") as caught:
        saver.save(MANIFEST)
    assert caught.value.code is ExitCode.STORAGE


# --- watch ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Notice:
    preempted_node_to_ranks: dict[str, list[int]] = {"n": [0]}

    def __init__(self, deadline_ms: float | None) -> None:
        self.deadline_ms = deadline_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainingjob_trainer.watch.time.monotonic", clock)
    monkeypatch.setattr("trainingjob_trainer.watch.time.time", lambda: clock.now + 1e9)
    return clock


def test_saves_by_the_clock(clock: Clock):
    watch = Watch(every_seconds=10, reporter=None)
    saves = []
    for _ in range(30):
        clock.now += 1
        save, stop, _ = watch.wishes()
        assert not stop
        if save:
            saves.append(clock.now - 1000)
            watch.saving()
    assert saves == [10, 20, 30]


@pytest.mark.parametrize("deadline", [60.0, None])
def test_a_notice_saves_at_once_and_stops_before_the_deadline(clock: Clock, deadline: float | None):
    watch = Watch(every_seconds=None, reporter=None)
    at = None if deadline is None else (clock.now + 1e9 + deadline) * 1000
    watch.notice(None, 0.0)
    assert watch.wishes()[:2] == (False, False)
    watch.notice(Notice(at), save_seconds=4.0)
    assert watch.wishes()[:2] == (True, False)
    watch.notice(Notice(at), save_seconds=4.0)  # the same notice again
    stopped_after = 0
    while not watch.wishes()[1]:
        clock.now += 1
        stopped_after += 1
    left = (60 if deadline else 30) - stopped_after
    assert 10 <= left <= 12  # two saves and a little
    assert watch.reason == "preempted"
