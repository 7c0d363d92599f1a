"""Settings: what is refused and how it is said."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainingjob_trainer import config as configuration
from trainingjob_trainer.contract import ExitCode
from trainingjob_trainer.errors import TrainingError

DATA = {"train": ["/data/*.txt"]}


def load(raw: object, workers: int = 1) -> configuration.Config:
    return configuration.resolve(configuration.parse(raw), workers)


def refusal(raw: object, workers: int = 1) -> TrainingError:
    with pytest.raises(TrainingError) as caught:
        load(raw, workers)
    assert caught.value.code is ExitCode.CONFIGURATION
    assert caught.value.remedy
    return caught.value


def test_the_least_config_is_the_data():
    config = load({"data": DATA})
    assert config.model.config is not None
    assert config.model.config.key_value_heads == config.model.config.heads
    assert config.model.config.max_positions == config.data.sequence_length
    assert config.training.micro_batch_size == 16
    printed = yaml.safe_load(config.yaml())
    assert printed["training"]["globalBatchSize"] == 32
    assert load(printed) == config


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (
            {"model": {"config": {"hidenSize": 8}}, "data": DATA},
            "unknown key `model.config.hidenSize`; did you mean `hiddenSize`?",
        ),
        ({"dta": DATA}, "`data` is missing; unknown key `dta`; did you mean `data`?"),
        ({"data": DATA, "training": {"global_batch_size": 1}}, "did you mean `globalBatchSize`?"),
        ({"data": DATA, "training": {"zzz": 1}}, "unknown key `training.zzz`"),
        ({"data": {"train": []}}, "`data.train`"),
        ({"data": {}}, "`data.train` is missing"),
        ({"data": DATA, "training": {"steps": 0}}, "`training.steps`: input should be greater"),
        ({"data": DATA, "training": {"learningRate": ".nan"}}, "`training.learningRate`"),
        ({"data": DATA, "training": {"precision": "fp8"}}, "'auto', 'fp32' or 'bf16'"),
        ({"data": DATA, "model": {"path": "/m", "factory": "a:b"}}, "exclude each other"),
        ({"data": DATA, "training": {"steps": 5, "warmupSteps": 6}}, "`training.warmupSteps` (6)"),
        (
            {"data": {**DATA, "sequenceLength": 64}, "model": {"config": {"maxPositions": 32}}},
            "`data.sequenceLength` (64) is more than `model.config.maxPositions` (32)",
        ),
        (
            {"data": DATA, "model": {"config": {"hiddenSize": 100, "heads": 8}}},
            "`model.config.hiddenSize` (100) is not a multiple of twice `model.config.heads` (8)",
        ),
        (
            {"data": DATA, "model": {"config": {"heads": 4, "keyValueHeads": 3}}},
            "`model.config.heads` (4) is not a multiple of `model.config.keyValueHeads` (3)",
        ),
        ("nonsense", "`spec.config`"),
    ],
)
def test_every_mistake_is_named(raw: Any, cause: str):
    assert cause in refusal(raw).cause


def test_numbers_written_as_text_are_numbers():
    """PyYAML reads 1e-3 as text."""
    config = load(yaml.safe_load("data: {train: [/x]}\ntraining: {learningRate: 1e-3}"))
    assert config.training.learning_rate == 0.001


def test_missing_and_unreadable_files_are_explained():
    for path in ("", "/no/such/file"):
        with pytest.raises(TrainingError) as caught:
            configuration.load(path, 1)
        assert caught.value.code is ExitCode.CONFIGURATION


def test_a_batch_that_cannot_be_shared_names_the_nearest_that_can():
    error = refusal({"data": DATA, "training": {"globalBatchSize": 32}}, workers=3)
    assert "`training.globalBatchSize` (32) cannot be shared by 3 workers" in error.cause
    assert error.remedy == "set globalBatchSize to 30 or 33, or run on 2 or 4 workers"
    error = refusal({"data": DATA, "training": {"globalBatchSize": 2}}, workers=4)
    assert "set globalBatchSize to 4" in error.remedy
    error = refusal({"data": DATA, "training": {"globalBatchSize": 24, "microBatchSize": 5}}, 2)
    assert error.remedy == "set microBatchSize to 4 or 6"


@given(st.integers(1, 300), st.integers(1, 12), st.none() | st.integers(1, 64))
def test_accumulation_makes_up_the_global_batch_or_is_refused(
    batch: int, world: int, micro: int | None
):
    if batch % world or (batch // world) % (micro or 1):
        with pytest.raises(TrainingError):
            configuration.micro_batch_size(batch, micro, world)
        return
    size = configuration.micro_batch_size(batch, micro, world)
    assert batch % (size * world) == 0
    assert size == micro or (micro is None and size <= 16)


def test_globs_expand_variables_and_leave_the_standard_library_to_each_node(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CORPUS", "/mnt/corpus")
    config = load({"data": {"train": ["${CORPUS}/*.txt", "${PYTHON_STDLIB}/**/*.py", "rel/*"]}})
    first, second, third = config.data.train
    assert first == "/mnt/corpus/*.txt"
    assert second == "${PYTHON_STDLIB}/**/*.py"
    assert third.startswith("/")
    assert "NO_SUCH_VARIABLE" in refusal({"data": {"train": ["${NO_SUCH_VARIABLE}/x"]}}).cause
