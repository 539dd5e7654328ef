"""`nanogpt sample -i`: line by line, with settings, mistakes and interrupts that end nothing."""

import io
from typing import Any

import pytest

from nanogpt_cli.cli import sample
from nanogpt_cli.cli.main import run as nanogpt
from tests.runner import Runner


@pytest.fixture
def typed(runs: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `sample -i` answers to lines on stdin."""
    runs.train("a")

    def answers(lines: str) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert nanogpt(["sample", str(runs.root / "a"), "-i", "--max-new-tokens", "8", "--device", "cpu"]) == 0
        return capsys.readouterr()

    return answers


def test_each_line_is_continued_in_its_own_way(typed: Any) -> None:
    out = typed("To be\nTo be\n").out.splitlines()
    assert typed("To be\n").out.splitlines() == out[: len(typed("To be\n").out.splitlines())]
    assert typed("/seed 1338\nTo be\n").out == typed("To be\nTo be\n").out.removeprefix(typed("To be\n").out)


def test_settings_are_shown_and_changed(typed: Any) -> None:
    assert typed("/temperature 0\nTo\n").out == typed("/temperature 0\n/seed 5\nTo\n").out
    shown = typed("/\n/top_k\n/max-new-tokens 3\n/max-new-tokens\n").err
    assert "/temperature 0.8" in shown
    assert shown.count("/top-k 200") == 2
    assert "/max-new-tokens 3" in shown


def test_mistakes_end_nothing(typed: Any) -> None:
    shown = typed("/temperatur 1\n/temperature x\n/temperature -1\n/top-p 7\n/seed -1\n\u20ac\nTo\n")
    for words in ("/temperatur: no such setting", "/temperature x", "temperature", "/top-p 7", "/seed -1", "\u20ac"):
        assert words in shown.err
    assert shown.out == typed("To\n").out, "none of them changed anything"


def test_an_interrupt_ends_the_text_only(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = typed("To\n").out
    encode, count = sample._encode, iter(range(10))

    def interrupted(*given: Any) -> Any:
        if next(count) == 0:
            raise KeyboardInterrupt
        return encode(*given)

    monkeypatch.setattr(sample, "_encode", interrupted)
    assert typed("To\nTo\n").out == "\n" + whole
