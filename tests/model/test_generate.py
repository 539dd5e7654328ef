"""Generation: cached is uncached, choices follow the settings exactly, samples depend on their own key alone."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import NanogptError
from nanogpt_cli.model.decode import Decoder, FrozenLinear
from nanogpt_cli.model.generate import Sampling, draw, generate
from nanogpt_cli.model.gpt import GPT
from tests.models import LLAMA, MODERN, QWEN3, random_model

SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=40)
KINDS: list[dict[str, Any]] = [
    {},
    {"bias": False, "dropout": 0.5},
    MODERN,
    LLAMA,
    QWEN3,
    {"block_size": 1},
    {"block_size": 7},
]


def texts(model: GPT, prompt: list[int], count: int, sampling: Sampling, **more: Any) -> list[list[int | None]]:
    steps = generate(model, prompt, count, sampling, **{"token_limit": 40, **more})
    return [list(one) for one in zip(*steps, strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 5, 16, 40])
def test_cached_is_uncached_beyond_three_contexts(kind: dict[str, Any], temperature: float, length: int) -> None:
    model = random_model(replace(SETTINGS, **kind)).train()
    sampling = Sampling(3 * model.config.block_size + 10, temperature, top_k=10)
    prompt = [i % 40 for i in range(length)]
    cached, plain = (texts(model, prompt, 3, sampling, cached=c) for c in (True, False))
    assert cached == plain
    assert all(len(text) == sampling.max_new_tokens for text in cached)
    assert model.training, "the model is left as it was"


def test_a_graph_is_recorded_on_the_model_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs belong to the current device, which need not be the one that was asked for."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    decoder = Decoder(random_model(SETTINGS), None)
    decoder.prefill(torch.tensor([[3, 1, 4]]), 1, 8)
    decoder.device = torch.device("cuda", 1)
    monkeypatch.setattr(decoder, "capture", lambda tokens: lambda newest: newest if entered else None)
    assert decoder.step(torch.tensor([[1]])).item() == 1
    assert entered == [torch.device("cuda", 1)]


def test_greedy_takes_the_most_likely_and_drops_the_oldest_half() -> None:
    model = random_model(SETTINGS).eval()
    window, expected = [3, 1, 4], []
    for _ in range(50):
        expected.append(int(model(torch.tensor([window]))[0, -1].argmax()))
        window.append(expected[-1])
        if len(window) > 16:
            window = window[-8:]
    for ignored in ({}, {"top_k": 3, "top_p": 0.1, "seed": 9}):
        assert texts(model, [3, 1, 4], 2, Sampling(50, 0.0, **ignored)) == [expected, expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_i_depends_on_seed_and_i_alone(dtype: torch.dtype) -> None:
    model = random_model(SETTINGS)
    many = texts(model, [1, 2], 6, Sampling(30, 1.0, seed=4), dtype=dtype)
    assert texts(model, [1, 2], 2, Sampling(30, 1.0, seed=4), dtype=dtype) == many[:2]
    assert texts(model, [1, 2], 1, Sampling(12, 1.0, seed=4), dtype=dtype) == [many[0][:12]]
    assert len({tuple(text) for text in many}) == 6
    assert texts(model, [1, 2], 6, Sampling(30, 1.0, seed=5), dtype=dtype) != many


def test_padding_ids_are_never_drawn() -> None:
    model = random_model(SETTINGS)
    drawn = texts(model, [1], 5, Sampling(200, 5.0, top_k=None), token_limit=7)
    assert {token for text in drawn for token in text} == set(range(7))


def test_a_stop_id_ends_its_own_sample_only() -> None:
    model = random_model(SETTINGS)
    free = texts(model, [1, 2], 4, Sampling(40, 1.0))
    stopped = texts(model, [1, 2], 4, Sampling(40, 1.0, stop_ids=frozenset({5, 11})))
    assert any(None in text for text in stopped)
    for text, whole in zip(stopped, free, strict=True):
        ends = [place for place, token in enumerate(whole) if token in {5, 11}]
        shown = [token for token in text if token is not None]
        assert shown == whole[: ends[0] + 1 if ends else None][: len(shown)]
        assert text[len(shown) :] == [None] * (len(text) - len(shown))
        assert bool(ends) == (shown[-1] in {5, 11})


def test_tokens_come_one_by_one() -> None:
    steps: Iterator[list[int | None]] = generate(random_model(SETTINGS), [1], 1, Sampling(10**9), token_limit=40)
    assert len(next(steps)) == len(next(steps)) == 1


def test_no_tokens_asked_for_are_none() -> None:
    assert list(generate(random_model(SETTINGS), [1], 2, Sampling(0), token_limit=40)) == []


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    k=st.integers(1, 15),
    top_p=st.floats(0.01, 1.0),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 10.0]),
)
@settings(max_examples=150, deadline=None)
def test_only_the_likely_are_drawn(logits: list[int], k: int, top_p: float, temperature: float) -> None:
    rows = torch.tensor(logits, dtype=torch.float32).expand(300, -1)
    drawn = set(draw(rows, Sampling(1, temperature, top_k=k, top_p=top_p), 0))
    kept = sorted(logits, reverse=True)[:k]
    assert len(drawn) <= k
    assert min(logits[i] for i in drawn) >= kept[-1]
    shares = np.exp((np.array(kept, dtype=float) - kept[0]) / temperature)
    fewest = int(np.searchsorted(np.cumsum(shares) / shares.sum(), top_p * (1 - 1e-9))) + 1
    assert len(drawn) <= fewest
    assert min(logits[i] for i in drawn) >= kept[min(fewest, len(kept)) - 1]


def test_exactly_k_among_equals() -> None:
    rows = torch.zeros(4000, 50)
    assert len(set(draw(rows, Sampling(1, 1.0, top_k=5), 0))) == 5
    assert len(set(draw(rows, Sampling(1, 1.0, top_k=None), 0))) == 50


@pytest.mark.parametrize("more", [{"top_k": None}, {"top_k": 3}, {"top_k": None, "top_p": 0.8}])
def test_frequencies_are_the_probabilities(more: dict[str, Any]) -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    rows = torch.tensor(np.log(probabilities), dtype=torch.float32).expand(20_000, -1)
    drawn = np.bincount(draw(rows, Sampling(1, 1.0, **more), 0), minlength=5) / 20_000
    kept = 5 if more == {"top_k": None} else 3
    expected = np.where(np.arange(5) < kept, probabilities, 0) / probabilities[:kept].sum()
    assert np.abs(drawn - expected).max() < 0.015
    assert not drawn[kept:].any()


def test_temperature_sharpens() -> None:
    rows = torch.log(torch.tensor([[0.6, 0.4]])).expand(20_000, -1)
    share = np.mean(draw(rows, Sampling(1, 0.5), 0))
    assert share == pytest.approx(0.4**2 / (0.4**2 + 0.6**2), abs=0.015)
    assert set(draw(rows, Sampling(1, 1e-30), 0)) == {0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(1, 0.0), Sampling(1, 1.0), Sampling(1, 1.0, top_k=None)])
def test_broken_logits_are_named(bad: float, sampling: Sampling) -> None:
    rows = torch.zeros(2, 300)
    rows[1, 7] = bad
    with pytest.raises(NanogptError, match="not finite"):
        draw(rows, sampling, 0)


@pytest.mark.parametrize("kind", KINDS[:5], ids=str)
def test_bfloat16_logits_agree_with_float32(kind: dict[str, Any]) -> None:
    model = random_model(replace(SETTINGS, **kind))
    tokens = torch.randint(40, (4, 16))
    exact, rounded = (Decoder(model, dtype).logits(tokens) for dtype in (None, torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().max() < 2e-2 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_matrix_is_the_matrix(rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(24, 40, bias=bias)
    frozen = FrozenLinear(linear.weight, linear.bias, dtype)
    x = torch.randn(2, rows, 24)
    near = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert torch.allclose(frozen(x).float(), linear(x), atol=near)


@pytest.mark.parametrize("kind", KINDS[:5], ids=str)
def test_a_step_of_fixed_shape_is_the_step(kind: dict[str, Any]) -> None:
    """What CUDA records, without recording."""
    model = random_model(replace(SETTINGS, **kind))
    decoder = Decoder(model)
    rows = torch.tensor([[1, 2, 3]] * 4)
    decoder.prefill(rows[:1], 4, 16)
    with torch.inference_mode():
        step = decoder.capture(rows[:, -1:], graph=False)
        for token in range(13):
            newest = torch.full((4, 1), token)
            rows = torch.cat((rows, newest), dim=1)
            assert torch.allclose(step(newest), decoder.logits(rows), atol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cached_is_uncached_on_cuda(kind: dict[str, Any]) -> None:
    model = random_model(replace(SETTINGS, **kind)).cuda()
    sampling = Sampling(3 * model.config.block_size + 10, 1.0, top_k=10)
    cached, plain = (texts(model, [1, 2, 3], 3, sampling, cached=c) for c in (True, False))
    assert cached == plain
