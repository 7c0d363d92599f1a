"""Models: architecture and initial weights only; parallelism is applied from outside.

Imports torch and Transformers inside its functions, so the driver can import this module without.
"""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

from trainingjob_trainer import errors
from trainingjob_trainer.config import Config, Llama

if TYPE_CHECKING:
    from torch import nn


def build(config: Config, vocab_size: int) -> nn.Module:
    """The model on CPU in fp32, equal on all ranks for one `training.seed`.

    Maps input ids [batch, sequence] to an object with `.logits` [batch, sequence, vocab].
    Raises TrainingError: exit 64 where a path or factory cannot be loaded.
    """
    import torch

    torch.manual_seed(config.training.seed)
    if config.model.factory is not None:
        model = _from_factory(config.model.factory, vocab_size, config.data.sequence_length)
    elif config.model.path is not None:
        model = _from_path(config.model.path, vocab_size, config.data.sequence_length)
    else:
        model = _llama(config.model.config or Llama(), vocab_size)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return model


def _llama(shape: Llama, vocab_size: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            max_position_embeddings=shape.max_positions,
            rms_norm_eps=shape.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=shape.tie_weights,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=vocab_size - 1,
        )
    )
    return model


def _from_path(path: str, vocab_size: int, sequence_length: int) -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM

    where = f"`model.path` {path!r} on {socket.gethostname()}"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        raise errors.configuration(
            f"cannot load {where}: {error}",
            "give a directory with config.json and weights of a causal language model",
        ) from error
    loaded.config.use_cache = False
    rows = loaded.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise errors.configuration(
            f"the tokenizer has {vocab_size} tokens, {where} embeds {rows}",
            "set data.tokenizer to the model's own tokenizer",
        )
    positions = getattr(loaded.config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise errors.configuration(
            f"`data.sequenceLength` ({sequence_length}) is more than the {positions} of {where}",
            f"set sequenceLength to {positions} or less",
        )
    model: nn.Module = loaded.train()
    return model


def _from_factory(factory: str, vocab_size: int, sequence_length: int) -> nn.Module:
    module, _, function = factory.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.configuration(
            f"cannot import `model.factory` {factory!r} on {socket.gethostname()}: {error}",
            "write package.module:function and put the package into the image",
        ) from error
    model: nn.Module = build(vocab_size=vocab_size, sequence_length=sequence_length)
    return model
