"""Models of a user, named by `model.factory` in the tests."""

import time
from typing import Any

import torch
from torch import nn


class Bigram(nn.Module):
    def __init__(self, vocab_size: int, seconds: float = 0.0, good_calls: int = 10**9) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.seconds, self.good_calls = seconds, good_calls

    def forward(self, input_ids: torch.Tensor) -> Any:
        if self.training:
            self.good_calls -= 1
            time.sleep(self.seconds)
        if self.good_calls < 0:
            raise ValueError("a bug of the user")

        class Output:
            logits = self.table(input_ids)

        return Output


def slow(vocab_size: int, sequence_length: int) -> nn.Module:
    """Takes 50 ms a step, so that a test can interrupt it where it likes."""
    return Bigram(vocab_size, seconds=0.05)


def broken(vocab_size: int, sequence_length: int) -> nn.Module:
    """Raises in the fourth step."""
    return Bigram(vocab_size, good_calls=3)
