"""`spec.config` as the bundled trainer understands it.

Keys are camelCase, as in the TrainingJob. An unknown key is an error: a misspelt `learningRate`
that is silently ignored costs a training run.
"""

import difflib
import os
import re
import sysconfig
import typing
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trainingjob_trainer import contract, errors

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, camelCase, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Llama(Section):
    """Shape of a LLaMA-architecture model; the vocabulary comes from the tokenizer."""

    hidden_size: Count = 256
    layers: Count = 4
    heads: Count = 4
    key_value_heads: Count | None = None
    """Heads that share keys and values (grouped-query attention); default: `heads`."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layers; default: 8/3 of the hidden size, as in LLaMA."""
    max_positions: Count | None = None
    """Longest sequence; default: `data.sequenceLength`."""
    tie_weights: bool = True
    """Whether the input and output embeddings are one matrix."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5


class Model(Section):
    """A new model from `config`, one from a Hugging Face directory, or one from a function."""

    config: Llama | None = None
    path: str | None = None
    factory: str | None = None
    """`package.module:function`, called with `vocab_size` and `sequence_length`; returns a module
    that maps input ids [batch, sequence] to an object with `.logits` [batch, sequence, vocab]."""
    gradient_checkpointing: bool = False


class Data(Section):
    """Text to train on."""

    train: Annotated[list[str], Field(min_length=1)]
    """Globs of text files (`**` recurses). `${NAME}` is the driver's environment variable;
    `${PYTHON_STDLIB}` is the standard library of the trainer's Python, without site-packages."""
    validation: list[str] = []
    """Globs of held-out text files; default: part of the training blocks."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of blocks held out, evenly spread over the text, when `validation` is absent."""
    tokenizer: str = "bytes"
    """`bytes` (256 byte values and one end-of-text token) or a Hugging Face tokenizer directory."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    max_files: Count | None = None
    """Use the first so many files, in order of their paths."""
    max_bytes: Count | None = None
    """Use files until so many bytes are read."""
    cache_directory: str | None = None
    """Where each node keeps its tokens; default: a directory under the system's temporary one."""


class Training(Section):
    """What is optimised, how and for how long."""

    steps: Count = 1000
    global_batch_size: Count = 32
    """Sequences per step over all workers, so the loss curve is the same on any number of them."""
    micro_batch_size: Count | None = None
    """Sequences in one forward pass of a worker; default: the largest divisor up to 16."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    min_learning_rate_ratio: Fraction = 0.1
    warmup_steps: NonNegative = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    gradient_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on CUDA, fp32 elsewhere. Weights and optimizer state are fp32 in any case."""
    seed: NonNegative = 0
    eval_every: NonNegative = 100
    """Steps between validations; 0 validates at the start and at the end only."""
    eval_batches: Count = 4
    """Global batches in one validation."""
    log_every: Count = 10
    communication_timeout_seconds: Count = 600
    """How long a worker waits for the others before it gives up with exit code 73."""


class Checkpoint(Section):
    """When to save; besides, one is saved at the end, at a stop and at a preemption notice."""

    every_steps: Count | None = 100
    every_seconds: Count | None = None
    keep: Count = 2
    """Checkpoints to keep, the latest ones."""


class Debug(Section):
    """For tests and for the curious."""

    sample_log: str | None = None
    """Directory for one file per rank and attempt with the sample ids of each step."""
    worker_logs: bool = False
    """Whether the workers' own output goes to the driver's log."""


class Config(Section):
    """The whole of `spec.config`."""

    model: Model = Model()
    data: Data
    training: Training = Training()
    checkpoint: Checkpoint = Checkpoint()
    debug: Debug = Debug()

    def yaml(self) -> str:
        """Every setting with its value, defaults included, as YAML."""
        return yaml.safe_dump(self.model_dump(by_alias=True), sort_keys=False)


def load(path: str, num_workers: int) -> Config:
    """Read, validate and resolve the config for a job of `num_workers` ranks.

    Raises TrainingError (exit 64) that names every wrong key.
    """
    if not path:
        raise errors.configuration(
            "there is no configuration: TRAININGJOB_CONFIG is not set",
            "put the settings under spec.config of the TrainingJob",
        )
    try:
        raw = contract.read_config(path)
    except (OSError, ValueError) as error:
        raise errors.configuration(
            f"cannot read the configuration {path}: {error}", "give a readable JSON or YAML file"
        ) from error
    return resolve(parse(raw), num_workers)


def parse(raw: object) -> Config:
    """Validate plain values; raises TrainingError (exit 64) that names every wrong key."""
    try:
        return Config.model_validate(raw, by_alias=True, by_name=False)
    except ValidationError as error:
        causes = [_explain(problem) for problem in error.errors(include_url=False)]
        raise errors.configuration(
            "; ".join(causes), "correct spec.config of the TrainingJob"
        ) from None


def resolve(config: Config, num_workers: int) -> Config:
    """Check what depends on several settings, and fill in the defaults that do.

    Raises TrainingError (exit 64).
    """
    model, data, training = config.model, config.data, config.training
    given = [k for k in ("config", "path", "factory") if getattr(model, k) is not None]
    if len(given) > 1:
        raise errors.configuration(
            f"`model.{given[0]}` and `model.{given[1]}` exclude each other", "keep one of them"
        )
    if not given:
        model = model.model_copy(update={"config": Llama()})
    if model.config is not None:
        model = model.model_copy(update={"config": _resolve_llama(model.config, data)})
    data = data.model_copy(
        update={
            "train": [expand(pattern) for pattern in data.train],
            "validation": [expand(pattern) for pattern in data.validation],
        }
    )
    if training.warmup_steps > training.steps:
        raise errors.configuration(
            f"`training.warmupSteps` ({training.warmup_steps}) is more than `training.steps` "
            f"({training.steps})",
            "lower warmupSteps",
        )
    micro = micro_batch_size(training.global_batch_size, training.micro_batch_size, num_workers)
    training = training.model_copy(update={"micro_batch_size": micro})
    return config.model_copy(update={"model": model, "data": data, "training": training})


def _resolve_llama(llama: Llama, data: Data) -> Llama:
    kv_heads = llama.key_value_heads or llama.heads
    if llama.hidden_size % (2 * llama.heads):
        step = 2 * llama.heads
        below = llama.hidden_size // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n)
        raise errors.configuration(
            f"`model.config.hiddenSize` ({llama.hidden_size}) is not a multiple of twice "
            f"`model.config.heads` ({llama.heads})",
            f"set hiddenSize to {near}",
        )
    if llama.heads % kv_heads:
        raise errors.configuration(
            f"`model.config.heads` ({llama.heads}) is not a multiple of "
            f"`model.config.keyValueHeads` ({kv_heads})",
            f"set keyValueHeads to a divisor of {llama.heads}",
        )
    positions = llama.max_positions or data.sequence_length
    if positions < data.sequence_length:
        raise errors.configuration(
            f"`data.sequenceLength` ({data.sequence_length}) is more than "
            f"`model.config.maxPositions` ({positions})",
            "raise maxPositions or leave it out",
        )
    return llama.model_copy(
        update={
            "key_value_heads": kv_heads,
            "intermediate_size": llama.intermediate_size
            or -(-llama.hidden_size * 8 // 3 // 16) * 16,
            "max_positions": positions,
        }
    )


LARGEST_DEFAULT_MICRO_BATCH = 16


def micro_batch_size(global_batch: int, micro_batch: int | None, world: int) -> int:
    """Sequences in one forward pass, such that `micro * world` divides `global_batch`.

    Gradient accumulation makes up the rest, so the update is the same on any number of workers.
    Raises TrainingError (exit 64) with the nearest valid numbers.
    """
    if global_batch % world:
        below = global_batch // world * world
        sizes = " or ".join(str(n) for n in (below, below + world) if n)
        worlds = " or ".join(str(n) for n in _nearest_divisors(global_batch, world))
        raise errors.configuration(
            f"`training.globalBatchSize` ({global_batch}) cannot be shared by {world} workers",
            f"set globalBatchSize to {sizes}, or run on {worlds} workers",
        )
    share = global_batch // world
    if micro_batch is None:
        return max(n for n in range(1, LARGEST_DEFAULT_MICRO_BATCH + 1) if share % n == 0)
    if share % micro_batch:
        near = " or ".join(str(n) for n in _nearest_divisors(share, micro_batch))
        raise errors.configuration(
            f"`training.globalBatchSize` ({global_batch}) is not a multiple of "
            f"`training.microBatchSize` ({micro_batch}) times {world} workers",
            f"set microBatchSize to {near}",
        )
    return micro_batch


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < near][-1:]
    return below + [n for n in divisors if n > near][:1]


STDLIB = "${PYTHON_STDLIB}"


def expand(pattern: str) -> str:
    """Replace `${NAME}` by environment variables; `${PYTHON_STDLIB}` is left to each node.

    Raises TrainingError (exit 64) where a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "PYTHON_STDLIB":
            return STDLIB
        if name not in os.environ:
            raise errors.configuration(
                f"the glob {pattern!r} names the environment variable {name}, which is not set",
                "set it under spec.env, or write the path out",
            )
        return os.environ[name]

    expanded = re.sub(r"\$\{(\w+)\}", value, pattern)
    if expanded.startswith("~"):
        expanded = os.path.expanduser(expanded)
    return expanded if expanded.startswith(STDLIB) else os.path.abspath(expanded)


def stdlib_directory() -> str:
    """What `${PYTHON_STDLIB}` stands for on this node."""
    return sysconfig.get_path("stdlib")


def _explain(problem: Any) -> str:
    location = tuple(problem["loc"])
    where = ".".join(str(part) for part in location) or "spec.config"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _keys_at(location[:-1]), n=1)
        return f"unknown key `{where}`" + (f"; did you mean `{near[0]}`?" if near else "")
    if problem["type"] == "missing":
        return f"`{where}` is missing"
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    given = problem.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    return f"`{where}`: {message}{shown}"


def _keys_at(location: tuple[object, ...]) -> list[str]:
    section: type[BaseModel] = Config
    for part in location:
        by_alias = {field.alias: field for field in section.model_fields.values()}
        field = by_alias.get(str(part))
        if field is None:
            return []
        candidates = (field.annotation, *typing.get_args(field.annotation))
        found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not found:
            return []
        section = found[0]
    return [str(field.alias) for field in section.model_fields.values()]
