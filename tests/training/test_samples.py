"""Samples over time: the weights do not know of them, they cost little, and a resume keeps their order."""

import json
import time
from typing import Any

import pytest

from nanogpt_cli.training import validation
from tests.runner import Runner, same_weights


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a run is, there is time for every sample."""
    monkeypatch.setattr(validation, "SHARE", 1e6)


def lines(runs: Runner, name: str) -> list[dict[str, Any]]:
    text = (runs.root / name / "logs" / "samples.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_weights_with_and_without_samples_are_the_same_bits(runs: Runner, generous: None, dropout: float) -> None:
    runs.train("with", dropout=dropout)
    runs.train("without", sample=False, dropout=dropout)
    assert [line["step"] for line in lines(runs, "with")] == [4, 8]
    assert all(line["text"] for line in lines(runs, "with"))
    assert not (runs.root / "without" / "logs" / "samples.jsonl").exists()
    assert same_weights(runs.root / "with" / "ckpt.pt", runs.root / "without" / "ckpt.pt")


def test_a_resumed_run_has_each_sample_once(runs: Runner, generous: None) -> None:
    runs.train("whole", max_iters=12)
    runs.train("cut", max_iters=8, lr_decay_iters=12, warmup_iters=0)
    runs.resume("cut", max_iters=12)
    assert [line["step"] for line in lines(runs, "cut")] == [4, 8, 12]


def test_time_is_what_decides(monkeypatch: pytest.MonkeyPatch, runs: Runner) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logged: list[dict[str, Any]] = []
    shown: list[int] = []

    class Log:
        append = staticmethod(logged.append)

    class Watching:
        @staticmethod
        def sampled(step: int, text: str) -> None:
            shown.append(step)

    def tokens(*_: Any, **__: Any) -> Any:
        for _token in range(validation.TOKENS):
            now[0] += 0.01  # a sample takes a second
            yield [0]

    monkeypatch.setattr(validation, "generate", tokens)
    plan = runs.plan("x")
    from nanogpt_cli.machine.distributed import ALONE
    from nanogpt_cli.training.state import build_state

    state = build_state(plan.config, plan.compute, ALONE, lasting={})
    assert plan.data_set.tokenizer is not None
    writer = validation.Samples(state.model, plan.data_set.tokenizer, 1, Log(), Watching())  # type: ignore[arg-type]
    writer.write(1)
    assert logged == [], "there is no time yet"
    now[0] = 50.0
    writer.write(2)
    assert 40 <= len(logged[0]["text"]) <= 60, "half a second is allowed: the first one is cut there"
    for step in range(3, 400):
        now[0] += 1.0
        writer.write(step)
    assert len(logged) > 3
    assert 0.01 * sum(len(line["text"]) for line in logged) <= validation.SHARE * now[0] + 0.02
    assert shown == [line["step"] for line in logged]
