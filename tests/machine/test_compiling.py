"""torch.compile sees what training calls: all of it before the first step, and nothing again afterwards."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.machine.compiling import compile_model
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.model.gpt import GPT
from tests.ranks import ranks, train

MODERN = {"activation": "relu2", "position": "rotary", "norm": "rmsnorm", "qk_norm": True, "tie_weights": False}


def counted(settings: dict[str, Any], run: Path) -> tuple[int, int, dict[str, int]]:
    """Train; how many graphs were compiled before the first step and in all, and what broke a graph."""
    from nanogpt_cli.training import start

    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    before = 0

    def watched(*args: Any) -> str:
        nonlocal before
        problem = compile_model(*args)
        before = counters["stats"]["unique_graphs"]
        return problem

    start.compile_model = watched
    train({"compile": "on", **settings}, run)
    return before, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {"dropout": 0.1}),
        (1, {**MODERN, "activation_checkpointing": True}),
        (2, {"dropout": 0.1, "activation_checkpointing": True}),
        (2, MODERN),
        (2, {**MODERN, "parallel": "fsdp"}),
        (2, {"dropout": 0.1, "activation_checkpointing": True, "parallel": "fsdp"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_nothing_is_compiled_after_the_first_step(
    tiny_settings: Callable[..., dict[str, Any]], tmp_path: Path, count: int, changes: dict[str, Any]
) -> None:
    """Over updates of several micro-steps and evaluations whose windows do not fill a batch."""
    settings = tiny_settings(
        batch_size=4, gradient_accumulation_steps=4, max_iters=5, eval_interval=2, eval_iters=1, device="cpu"
    )
    for before, in_all, breaks in ranks(count, counted, {**settings, "dtype": "bfloat16", **changes}, tmp_path / "run"):
        assert before == in_all > 0
        assert not breaks


def test_a_compilation_that_fails_is_named_and_leaves_an_eager_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(ModelSettings(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=5))
    cpu = Compute(torch.device("cpu"), torch.float32, True, True, {})
    ids = torch.zeros(2, 8, dtype=torch.long)
    for error in (RuntimeError("no compiler for you\nand much more"), FileNotFoundError("no compiler for you")):

        def call(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(torch, "compile", lambda forward, call=call: call)
        assert compile_model(model, cpu, 2, 8) == f"{type(error).__name__}: no compiler for you"
        assert model(ids, ids).isfinite()
        assert all(p.grad is None for p in model.parameters())
