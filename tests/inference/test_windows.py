"""Validation while training: one number, whatever the batch and the ranks."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.data.tokens.rows import evaluation_offsets
from nanogpt_cli.inference.evaluate import windows_loss
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.distributed import Processes
from nanogpt_cli.model.gpt import GPT

CPU = Compute(torch.device("cpu"), torch.float32, False, True, {})


def model(vocab_size: int = 23, dropout: float = 0.0) -> GPT:
    settings = ModelSettings(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=vocab_size, dropout=dropout)
    return GPT(settings, generator=torch.Generator().manual_seed(0))


def loss(of: GPT, folder: Path, windows: int, micro_batch: int) -> float:
    tokens = open_data_set(folder).val
    offsets = evaluation_offsets(tokens.count, 16, windows)
    return windows_loss(of, tokens, offsets, block_size=16, micro_batch=micro_batch, compute=CPU, processes=Processes())


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 16, 50])
def test_the_same_for_any_batch(tiny_data: Path, micro_batch: int) -> None:
    gpt = model()
    assert loss(gpt, tiny_data, 11, micro_batch) == pytest.approx(loss(gpt, tiny_data, 11, 11), abs=1e-6)


def test_by_hand(tiny_data: Path) -> None:
    gpt = model(dropout=0.5)  # dropout is off in evaluation
    tokens = open_data_set(tiny_data).val
    losses = []
    with torch.no_grad():
        gpt.eval()
        for offset in evaluation_offsets(tokens.count, 16, 5):
            block = torch.from_numpy(tokens.read(np.array([offset]), 17))
            losses.append(gpt(block[:, :-1], block[:, 1:]).item())
        gpt.train()
    assert loss(gpt, tiny_data, 5, 2) == pytest.approx(sum(losses) / 5, abs=1e-6)
    assert gpt.training


def test_a_uniform_model_scores_the_logarithm_of_its_vocabulary(tiny_data: Path) -> None:
    gpt = model(vocab_size=65)
    with torch.no_grad():
        gpt.wte.weight.zero_()
    assert loss(gpt, tiny_data, 8, 3) == pytest.approx(math.log(65), abs=1e-6)


def test_ranks_share_the_windows(tiny_data: Path) -> None:
    """What three ranks would add up is the same number: each sees its share, repeated windows count nothing."""
    gpt = model()
    tokens = open_data_set(tiny_data).val
    offsets = evaluation_offsets(tokens.count, 16, 10)

    class Share(Processes):
        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    shares = [
        windows_loss(gpt, tokens, offsets, block_size=16, micro_batch=2, compute=CPU, processes=Share(rank, 3))
        for rank in range(3)
    ]
    assert sum(shares) == pytest.approx(loss(gpt, tiny_data, 10, 4), abs=1e-6)
