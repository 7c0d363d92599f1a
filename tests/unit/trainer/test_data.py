"""Files, tokens, samples and above all their order."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainingjob_trainer import data
from trainingjob_trainer.config import Data
from trainingjob_trainer.contract import ExitCode
from trainingjob_trainer.errors import TrainingError


def section(**fields: object) -> Data:
    return Data.model_validate({"train": ["/unused"], **fields})


# --- order ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 3000), st.integers(0, 5))
def test_each_epoch_is_a_permutation(seed: int, samples: int, epoch: int):
    ids = data.sample_ids(seed, epoch * samples, samples, samples)
    assert sorted(ids.tolist()) == list(range(samples))


@given(
    seed=st.integers(0, 100),
    samples=st.integers(1, 500),
    batch=st.sampled_from([1, 2, 4, 6, 12, 24]),
    worlds=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    steps=st.lists(st.integers(1, 6), min_size=5, max_size=5),
)
def test_a_run_resumed_on_any_number_of_workers_repeats_and_skips_nothing(
    seed: int, samples: int, batch: int, worlds: list[int], steps: list[int]
):
    consumed, seen = 0, []
    for world, count in zip(worlds, steps, strict=False):
        if batch % world:
            continue
        for _ in range(count):
            ids = data.sample_ids(seed, consumed, batch, samples)
            for rank in range(world):
                own = data.rank_share(ids, rank, world)
                assert len(own) == batch // world
                seen += [i for micro in data.micro_batches(own, 5) for i in micro.tolist()]
            consumed += batch
    assert seen == data.sample_ids(seed, 0, consumed, samples).tolist()


def test_the_order_is_mixed_and_depends_on_seed_and_epoch():
    first = data.sample_ids(1, 0, 1000, 1000)
    assert not np.array_equal(first, data.sample_ids(2, 0, 1000, 1000))
    assert not np.array_equal(first, data.sample_ids(1, 1000, 1000, 1000))
    # Neighbours in the order are far apart in the text: a third of the range in the mean.
    assert 250 < np.abs(np.diff(first)).mean() < 420
    assert np.abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1


def test_the_order_never_changes_between_releases():
    """A checkpoint holds the counter only: another order after an upgrade would repeat samples."""
    assert data.sample_ids(7, 0, 8, 100).tolist() == [58, 56, 84, 83, 7, 32, 39, 30]


# --- samples --------------------------------------------------------------------------------------


@given(tokens=st.integers(2, 400), length=st.integers(2, 40))
@settings(max_examples=60)
def test_blocks_cover_every_token_once_as_a_target(tokens: int, length: int):
    array = np.arange(tokens, dtype=np.uint16)
    samples, _ = data.split(array, length, 0.0)
    ids = np.arange(len(samples))
    inputs, targets = samples.batch(ids)
    assert inputs.shape == targets.shape == (len(samples), length)
    counted = targets[targets != data.IGNORE]
    assert counted.tolist() == list(range(1, tokens))
    assert samples.valid(ids) == len(counted)
    assert (targets[targets != data.IGNORE] - inputs[targets != data.IGNORE] == 1).all()


@given(blocks=st.integers(2, 300), fraction=st.floats(0.001, 0.5))
def test_the_split_is_disjoint_complete_and_spread(blocks: int, fraction: float):
    array = np.arange(blocks * 4 + 1, dtype=np.uint32)
    training, held_out = data.split(array, 4, fraction)
    assert len(held_out) == max(1, round(blocks * fraction))
    assert len(training) + len(held_out) == blocks
    starts = [s.batch(np.arange(len(s)))[0][:, 0].tolist() for s in (training, held_out)]
    assert sorted(starts[0] + starts[1]) == list(range(0, blocks * 4, 4))


def test_too_little_text_is_refused():
    with pytest.raises(TrainingError) as caught:
        data.split(np.arange(5, dtype=np.uint16), 8, 0.02)
    assert caught.value.code is ExitCode.DATA
    assert "5 tokens" in caught.value.cause


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, text in {"b.txt": "bb", "a.txt": "aaaa", "deep/c.txt": "c"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_globs_recurse_sort_and_respect_the_caps(corpus: Path):
    pattern = f"{corpus}/**/*.txt"
    assert names(data.files([pattern, pattern], section())) == ["a.txt", "b.txt", "c.txt"]
    assert names(data.files([pattern], section(maxFiles=2))) == ["a.txt", "b.txt"]
    assert names(data.files([pattern], section(maxBytes=3))) == ["a.txt"]


def test_a_glob_that_matches_nothing_is_named(corpus: Path):
    with pytest.raises(TrainingError) as caught:
        data.files([f"{corpus}/*.txt", f"{corpus}/*.md"], section())
    assert caught.value.code is ExitCode.DATA
    assert f"'{corpus}/*.md' matches no file on {os.uname().nodename}" in caught.value.cause


def test_the_standard_library_is_found_without_site_packages():
    found = data.files(["${PYTHON_STDLIB}/**/*.py"], section())
    stdlib = sysconfig.get_path("stdlib")
    assert len(found) > 100
    assert all(str(path).startswith(stdlib) for path in found)
    assert not any("site-packages" in path.parts for path in found)


# --- tokens ---------------------------------------------------------------------------------------


def test_bytes_become_tokens_with_an_end_after_each_file(corpus: Path):
    paths = [corpus / "a.txt", corpus / "b.txt"]
    tokens = data.cached_tokens(paths, data.tokenizer("bytes"), str(corpus / "cache"))
    assert tokens.array.tolist() == [97, 97, 97, 97, 256, 98, 98, 256]
    assert tokens.array.dtype == np.uint16
    assert isinstance(tokens.array, np.memmap)


def test_tokens_are_made_once_and_again_when_a_file_changes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    paths, cache = [corpus / "a.txt"], str(corpus / "cache")
    first = data.cached_tokens(paths, data.tokenizer("bytes"), cache)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_tokenize", None)
        again = data.cached_tokens(paths, data.tokenizer("bytes"), cache)
    assert again.digest == first.digest
    (corpus / "a.txt").write_text("other")
    assert data.cached_tokens(paths, data.tokenizer("bytes"), cache).digest != first.digest


def test_the_digest_is_of_the_tokens_and_not_of_the_place(corpus: Path):
    (corpus / "copy.txt").write_text("aaaa")
    digests = {
        data.cached_tokens([corpus / name], data.tokenizer("bytes"), str(corpus / "cache")).digest
        for name in ("a.txt", "copy.txt")
    }
    assert len(digests) == 1


def test_an_unwritable_cache_is_explained(corpus: Path):
    (corpus / "file").write_text("")
    with pytest.raises(TrainingError) as caught:
        data.cached_tokens([corpus / "a.txt"], data.tokenizer("bytes"), str(corpus / "file"))
    assert caught.value.code is ExitCode.DATA
    assert "cacheDirectory" in caught.value.remedy


def test_validation_files_replace_the_held_out_part(corpus: Path):
    config = section(train=[f"{corpus}/a.txt"], validation=[f"{corpus}/b.txt"], sequenceLength=2)

    def tokens(patterns: object) -> data.Tokens:
        paths = data.files(patterns, config)  # type: ignore[arg-type]
        return data.cached_tokens(paths, data.tokenizer("bytes"), str(corpus / "cache"))

    training, held_out, digest = data.sample_sets(config, tokens)
    assert training.valid(np.arange(len(training))) == 4
    assert held_out.valid(np.arange(len(held_out))) == 2
    assert digest == tokens(config.train).digest
