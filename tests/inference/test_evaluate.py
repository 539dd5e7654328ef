"""The loss of a whole split: what it is by hand, and that the batch size does not matter."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.config.schema import ModelSettings, SystemSettings
from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.errors import UserError
from nanogpt_cli.inference.evaluate import default_batch_size, evaluate_split
from nanogpt_cli.machine.device import choose_compute
from tests.heard import Heard
from tests.models import SETTINGS, random_model

COMPUTE = choose_compute(SystemSettings(device="cpu", dtype="float32"), SETTINGS)


def tokens_of(path: Path, ids: np.ndarray) -> Tokens:
    ids.astype("<u2").tofile(path)
    return Tokens([TokenFile(path, len(ids))], "uint16")


def random_tokens(path: Path, count: int, seed: int = 0) -> Tokens:
    return tokens_of(path, np.random.Generator(np.random.PCG64(seed)).integers(0, 18, count))


def by_hand(tokens: Tokens) -> np.ndarray:
    """The loss of every token but the first, one window at a time, in float64."""
    model = random_model(SETTINGS).double()
    losses = []
    for start in range(0, tokens.count - 1, SETTINGS.block_size):
        length = min(SETTINGS.block_size, tokens.count - 1 - start)
        window = torch.from_numpy(tokens.read(np.array([start]), length + 1))
        logits = model(window[:, :-1]).detach()
        losses.append(-torch.log_softmax(logits, -1).gather(-1, window[:, 1:, None]).flatten().numpy())
    return np.concatenate(losses)


@pytest.mark.parametrize("count", [2, 16, 17, 18, 33, 500])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 1000])
def test_every_token_but_the_first_counts_once_at_any_batch_size(tmp_path: Path, count: int, batch_size: int) -> None:
    tokens = random_tokens(tmp_path / "val.bin", count)
    result = evaluate_split(random_model(SETTINGS), tokens, batch_size=batch_size, compute=COMPUTE)
    losses = by_hand(tokens)
    assert result.tokens == len(losses) == count - 1
    assert result.loss == pytest.approx(losses.mean(), abs=1e-6)
    assert result.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert (result.bits_per_byte, result.text_bytes) == (None, None)


def test_a_uniform_model_has_the_loss_ln_65(tmp_path: Path) -> None:
    model = random_model(ModelSettings(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=65))
    with torch.no_grad():
        model.wte.weight.zero_()
    result = evaluate_split(model, random_tokens(tmp_path / "a", 65), batch_size=2, compute=COMPUTE)
    assert result.loss == pytest.approx(math.log(65), abs=1e-6)
    assert result.standard_error == pytest.approx(0, abs=1e-7)


def test_bits_per_byte_leave_end_of_text_and_unknown_ids_out_of_both_sums(tmp_path: Path) -> None:
    tokens = random_tokens(tmp_path / "a", 300)
    lengths = np.array([1, 2, 3, 4] * 4, np.int32)  # 16 of the model's 18 ids
    lengths[5] = 0  # end of text
    result = evaluate_split(random_model(SETTINGS), tokens, batch_size=3, compute=COMPUTE, byte_lengths=lengths)
    targets = tokens.read(np.array([1]), 299)[0]
    text_bytes = np.append(lengths, [0, 0])[targets]
    expected = by_hand(tokens)[text_bytes > 0].sum() / math.log(2) / text_bytes.sum()
    assert result.bits_per_byte == pytest.approx(expected, abs=1e-6)
    assert result.text_bytes == text_bytes.sum()


def test_the_standard_error_is_that_of_windows(tmp_path: Path) -> None:
    tokens = random_tokens(tmp_path / "a", 16 * 40 + 1)
    result = evaluate_split(random_model(SETTINGS), tokens, batch_size=7, compute=COMPUTE)
    means = by_hand(tokens).reshape(40, 16).mean(axis=1)
    assert result.standard_error == pytest.approx(means.std() / math.sqrt(40), rel=1e-4)


@given(st.integers(2, 120), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_two_batch_sizes_give_one_number(tmp_path_factory: pytest.TempPathFactory, count: int, a: int, b: int) -> None:
    tokens = random_tokens(tmp_path_factory.mktemp("t") / "a", count, seed=count)
    first, second = (evaluate_split(random_model(SETTINGS), tokens, batch_size=n, compute=COMPUTE) for n in (a, b))
    assert first.loss == pytest.approx(second.loss, abs=1e-6)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = random_model(SETTINGS).train()
    heard = Heard()
    tokens = random_tokens(tmp_path / "a", 100)
    evaluate_split(model, tokens, batch_size=2, compute=COMPUTE, progress=heard)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert heard.steps[-1][1:] == (99, 99)


def test_splits_and_ids_that_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 2"):
        evaluate_split(random_model(SETTINGS), random_tokens(tmp_path / "a", 1), batch_size=1, compute=COMPUTE)
    tokens = tokens_of(tmp_path / "b", np.array([1] * 40 + [18]))
    with pytest.raises(UserError, match="id 18 at token 40"):
        evaluate_split(random_model(SETTINGS), tokens, batch_size=1, compute=COMPUTE)


def test_the_batch_follows_from_the_context() -> None:
    assert default_batch_size(random_model(SETTINGS)) == 1024
    assert default_batch_size(random_model(replace(SETTINGS, block_size=1024))) == 16
    assert default_batch_size(random_model(replace(SETTINGS, block_size=100_000))) == 1
