"""Text to tokens to batches.

Files are tokenised once a node into one flat array on disk that all ranks map into memory. Which
sample stands where in training is a pure function of (seed, global sample counter): nothing but the
counter needs to be in a checkpoint, and a resume on another number of workers repeats and skips
nothing.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainingjob_trainer import errors
from trainingjob_trainer.config import STDLIB, Data, stdlib_directory

Ids = npt.NDArray[np.int64]

IGNORE = -100
"""Target of a position that does not count; torch's cross entropy skips it by default."""

# --- files ---------------------------------------------------------------------------------------


def files(patterns: Sequence[str], data: Data) -> list[Path]:
    """The text files that `patterns` name on this node, in order of their paths, within the caps.

    Raises TrainingError (exit 65) where a glob matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        here = pattern.replace(STDLIB, stdlib_directory())
        matches = [path for path in glob.glob(here, recursive=True) if os.path.isfile(path)]
        if pattern.startswith(STDLIB):
            skip = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
            matches = [path for path in matches if not any(part in path for part in skip)]
        if not matches:
            raise errors.data(
                f"the glob {pattern!r} matches no file on {socket.gethostname()}"
                + (f" ({here})" if here != pattern else ""),
                "correct the glob, or mount the data at that path (spec.volumeMounts)",
            )
        found.update(matches)
    kept, total = [], 0
    for path in sorted(found)[: data.max_files]:
        if data.max_bytes is not None and total >= data.max_bytes:
            break
        kept.append(Path(path))
        total += os.path.getsize(path)
    return kept


# --- tokenizers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """From a file's bytes to token ids; `end` is appended to each file."""

    name: str
    vocab_size: int
    end: int
    encode: Callable[[bytes], npt.NDArray[np.integer]]


def tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the Hugging Face tokenizer in the directory `name`.

    Raises TrainingError (exit 65) where the directory holds no usable tokenizer.
    """
    if name == "bytes":
        return Tokenizer("bytes", 257, 256, lambda content: np.frombuffer(content, np.uint8))
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(name, local_files_only=True)
        end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
        if end is None:
            raise ValueError("it has neither an end-of-text nor a separator token")
    except (OSError, ValueError, KeyError) as error:
        raise errors.data(
            f"no tokenizer in {name!r} on {socket.gethostname()}: {error}",
            "give a directory with tokenizer.json, or `data.tokenizer: bytes`",
        ) from error

    def encode(content: bytes) -> npt.NDArray[np.integer]:
        text = content.decode("utf-8", errors="replace")
        return np.asarray(loaded(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    return Tokenizer(name, len(loaded), int(end), encode)


# --- tokens on disk ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """A flat array of token ids, mapped from disk, and its digest."""

    array: npt.NDArray[np.integer]
    digest: str


def cached_tokens(paths: Sequence[Path], tokenizer: Tokenizer, cache: str | None) -> Tokens:
    """The tokens of `paths`, from the node's cache or made now.

    The cache key covers the tokenizer and each file's path, size and modification time; the digest
    covers the tokens themselves and is equal on all nodes that hold the same data. Several
    processes may call this at once: a finished array appears by a rename.
    Raises TrainingError (exit 65) where a file cannot be read or holds nothing.
    """
    key = hashlib.blake2b(repr((tokenizer.name, tokenizer.vocab_size)).encode(), digest_size=16)
    for path in paths:
        stat = path.stat()
        key.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    # Per user: another user's directory under a shared /tmp could not be written.
    root = Path(cache or Path(tempfile.gettempdir()) / f"trainingjob-tokens-{os.getuid()}")
    tokens_file, note_file = (root / f"{key.hexdigest()}{end}" for end in (".tokens", ".json"))
    if not note_file.exists():
        _tokenize(paths, tokenizer, tokens_file, note_file)
    note = json.loads(note_file.read_text())
    return Tokens(np.memmap(tokens_file, dtype=note["dtype"], mode="r"), note["digest"])


def _tokenize(
    paths: Sequence[Path], tokenizer: Tokenizer, tokens_file: Path, note_file: Path
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    temporary = tokens_file.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for path in paths:
                ids = np.append(tokenizer.encode(_content(path)), tokenizer.end).astype(dtype)
                digest.update(ids.tobytes())
                file.write(ids.tobytes())
        os.replace(temporary, tokens_file)
        temporary.write_text(json.dumps({"dtype": dtype.name, "digest": digest.hexdigest()}))
        os.replace(temporary, note_file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        full = error.errno == errno.ENOSPC
        raise errors.data(
            f"cannot keep the tokens in {tokens_file.parent} on {socket.gethostname()}: {error}",
            "free space there" if full else "set data.cacheDirectory to a writable directory",
        ) from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise errors.data(
            f"cannot read {path} on {socket.gethostname()}: {error}",
            "make the file readable, or leave it out of the globs",
        ) from error


# --- samples -------------------------------------------------------------------------------------


class Samples:
    """Some blocks of a token array, numbered from 0.

    Block `b` is tokens [b*L, (b+1)*L] with the next token as target; the last block of the array is
    filled up with positions that do not count.
    """

    def __init__(self, tokens: npt.NDArray[np.integer], length: int, blocks: Ids) -> None:
        self._tokens = tokens
        self._length = length
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def valid(self, ids: Ids) -> int:
        """Number of target positions that count in the samples `ids`."""
        ends = (self._blocks[ids] + 1) * self._length
        return int(np.sum(self._length - np.maximum(ends - (len(self._tokens) - 1), 0)))

    def batch(self, ids: Ids) -> tuple[Ids, Ids]:
        """Inputs and targets of the samples `ids`, each [len(ids), L]."""
        inputs = np.zeros((len(ids), self._length), np.int64)
        targets = np.full((len(ids), self._length), IGNORE, np.int64)
        for row, block in enumerate(self._blocks[ids]):
            window = self._tokens[block * self._length : (block + 1) * self._length + 1]
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        return inputs, targets


def split(tokens: npt.NDArray[np.integer], length: int, fraction: float) -> tuple[Samples, Samples]:
    """Training and held-out samples of one array: every (1/fraction)-th block is held out.

    With `fraction` 0, all blocks are training samples. Raises TrainingError (exit 65) where there
    is too little text.
    """
    blocks = np.arange(max(0, -(-(len(tokens) - 1) // length)), dtype=np.int64)
    held_out = max(1, round(len(blocks) * fraction)) if fraction else 0
    if len(blocks) <= held_out:
        raise errors.data(
            f"the text has {len(tokens)} tokens, too few for sequences of {length}",
            "give more text, or lower data.sequenceLength",
        )
    chosen = ((np.arange(held_out) + 0.5) * len(blocks) / max(held_out, 1)).astype(np.int64)
    rest = np.setdiff1d(blocks, chosen, assume_unique=True)
    return Samples(tokens, length, rest), Samples(tokens, length, blocks[chosen])


def sample_sets(
    data: Data, tokens: Callable[[Sequence[str]], Tokens]
) -> tuple[Samples, Samples, str]:
    """Training samples, validation samples and the digest of the training text."""
    train = tokens(data.train)
    fraction = 0.0 if data.validation else data.validation_fraction
    training, held_out = split(train.array, data.sequence_length, fraction)
    if data.validation:
        held_out, _ = split(tokens(data.validation).array, data.sequence_length, 0.0)
    return training, held_out, train.digest


# --- order ---------------------------------------------------------------------------------------


def sample_ids(seed: int, first: int, count: int, samples: int) -> Ids:
    """Which samples stand at the positions [first, first + count) of training.

    Position p is in epoch p // samples; each epoch is a permutation of all samples of its own,
    computed for the asked positions alone (a Feistel network with cycle walking: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002).
    """
    positions = np.arange(first, first + count, dtype=np.int64)
    result = np.empty(count, np.int64)
    epochs = positions // samples
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        offset = (positions[chosen] - epoch * samples).astype(np.uint64)
        result[chosen] = _permute(offset, samples, (seed, int(epoch))).astype(np.int64)
    return result


def _permute(
    values: npt.NDArray[np.uint64], size: int, key: tuple[int, int]
) -> npt.NDArray[np.uint64]:
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()
    rounds = np.frombuffer(digest, np.uint64)

    def once(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for round_key in rounds:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half) | right

    result = once(values)
    while (outside := result >= size).any():
        result[outside] = once(result[outside])
    return result


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood, 2014): each input bit reaches each output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def rank_share(ids: Ids, rank: int, world: int) -> Ids:
    """A rank's part of a global batch, whose size `world` divides."""
    share = len(ids) // world
    return ids[rank * share : (rank + 1) * share]


def micro_batches(ids: Ids, size: int) -> Iterator[Ids]:
    """`ids` in pieces of `size`; the last may be shorter."""
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


if sys.byteorder != "little":
    raise ImportError("the sample order is defined on little-endian machines")
