"""Dropout and the CPU's own attention: frequencies, means, gradients, reproducibility."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.model.kernels import attention
from nanogpt_cli.model.kernels.attention import attend
from nanogpt_cli.model.kernels.dropout import dropout, keep_mask, keep_probability


@pytest.mark.parametrize("p", [0.001, 0.1, 0.2, 0.5, 0.99])
def test_as_many_are_dropped_as_asked_for(p: float) -> None:
    torch.manual_seed(0)
    mask = keep_mask((1000, 1000), p)
    kept = float(mask.double().mean())
    assert set(mask.unique().tolist()) <= {0, 1}
    assert abs(keep_probability(p) - (1 - p)) <= 1 / 131072
    assert abs(kept - keep_probability(p)) < 5 * math.sqrt(p * (1 - p) / 1e6)


def test_every_lane_of_a_word_has_its_own_bits() -> None:
    torch.manual_seed(0)
    lanes = keep_mask((100_000, 4), 0.5).double()
    assert (lanes.mean(0) - 0.5).abs().max() < 0.01
    assert (torch.corrcoef(lanes.T) - torch.eye(4, dtype=torch.float64)).abs().max() < 0.02


def test_something_is_always_kept() -> None:
    torch.manual_seed(0)
    assert keep_probability(1 - 1e-9) == 1 / 65536
    assert torch.isfinite(dropout(torch.ones(100), 1 - 1e-9)).all()


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), p=st.floats(0, 0.99))
@settings(max_examples=50, deadline=None)
def test_masks_of_any_shape(shape: list[int], p: float) -> None:
    mask = keep_mask(tuple(shape), p)
    assert list(mask.shape) == shape
    assert ((mask == 0) | (mask == 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_are_zero_or_scaled_and_so_are_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.rand(64, 33) + 1).to(dtype).requires_grad_()
    y = dropout(x, 0.25)
    y.sum().backward()
    kept = y != 0
    scale = 1 / keep_probability(0.25)
    assert 0.7 < kept.double().mean() < 0.8
    assert torch.equal(y[kept], x[kept] * scale)
    assert x.grad is not None
    assert torch.equal(x.grad, kept.to(dtype) * scale)


def test_reseeding_the_default_generator_repeats_the_masks() -> None:
    x = torch.ones(50, 50)
    torch.default_generator.manual_seed(7)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.default_generator.manual_seed(7)
    assert torch.equal(first, dropout(x, 0.5))
    assert not torch.equal(first, second)


def test_nothing_is_done_without_dropout() -> None:
    x = torch.ones(3, 3)
    state = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("T", "dtype", "near"), [(1, torch.float32, 1e-6), (63, torch.float32, 1e-6),
                                                  (64, torch.float32, 1e-6), (200, torch.float32, 1e-6),
                                                  (200, torch.bfloat16, 3e-2)])  # fmt: skip
def test_attention_on_the_cpu_is_torchs(T: int, dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, T, 8).to(dtype).requires_grad_() for _ in range(3))
    assert len(attention.query_blocks(200)) > 1, "the longest has several blocks"
    out = attend(q, k, v, 0.4)
    out.square().sum().backward()
    ours = [out.detach(), q.grad, k.grad, v.grad]
    q.grad = k.grad = v.grad = None
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.4, is_causal=True)
    expected.square().sum().backward()
    for mine, theirs in zip(ours, [expected.detach(), q.grad, k.grad, v.grad], strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine.float() - theirs.float()).abs().max() <= near * (1 + theirs.abs().max())


@pytest.mark.parametrize("T", [1, 150])
def test_dropped_attention_has_the_gradients_of_its_own_function(T: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, 4, dtype=torch.float64).requires_grad_() for _ in range(3))

    def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return attend(q, k, v, 0.5, 0.3)

    assert torch.autograd.gradcheck(seeded, (q, k, v), fast_mode=True)


def test_dropped_attention_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 80, 4).requires_grad_() for _ in range(3))
    mean = torch.stack([attend(q, k, v, 0.5, 0.4).detach() for _ in range(2000)]).mean(0)
    assert (mean - attend(q, k, v, 0.5)).abs().max() < 0.25
    assert (mean - attend(q, k, v, 0.5)).abs().mean() < 0.02
