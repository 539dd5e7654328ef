"""`nanogpt plot`: runs by name or path in, the name of a picture out."""

import json
import sys
from pathlib import Path

import pytest

from nanogpt_cli.cli.main import run as nanogpt
from nanogpt_cli.runs.directory import create_run
from nanogpt_cli.runs.metrics import MetricsLog


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name in ("one-run", "two-run"):
        log = MetricsLog(create_run(Path("runs") / name, config={}, tokenizer=None, environment={}).metrics)
        for step in range(1, 20):
            log.append(
                {"step": step, "loss": 4 / step, "lr": 1e-3, "tokens_per_s": 1e4, "tokens": step, "time_s": step}
            )
        log.close()
    return tmp_path


def test_the_picture_is_named_on_stdout(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["plot", "one_run", "runs/two-run", "--over=tokens"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "curves.png\n"
    assert "2 runs over tokens" in shown.err
    assert (two_runs / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert nanogpt(["plot", "one-run", "--out", "a.svg", "--over", "time"]) == 0
    assert capsys.readouterr().out == "a.svg\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot"], "--help"),
        (["plot", "one-rum"], "Did you mean one-run?"),
        (["plot", "one-run", "--over", "epochs"], "'steps', 'tokens', 'time'"),
        (["plot", "one-run", "--out", "a.gif"], "--out a.png"),
        (["plot", "one-run", "--oout", "a.png"], "Did you mean --out?"),
    ],
)
def test_mistakes_are_answered_and_nothing_is_made(
    two_runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert nanogpt(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert sorted(path.name for path in two_runs.iterdir()) == ["runs"]


def test_without_matplotlib_or_by_wish_it_is_drawn_in_the_terminal(
    two_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nanogpt(["plot", "one-run", "--out", "-"]) == 0
    wished = capsys.readouterr().out
    assert "loss (nats a token)" in wished
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert nanogpt(["plot", "one-run"]) == 0
    assert capsys.readouterr().out == wished
    assert nanogpt(["plot", "one-run", "--out", "a.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert sorted(path.name for path in two_runs.iterdir()) == ["runs"]


def test_programs_get_one_document(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["plot", "one-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "curves.png", "runs": ["runs/one-run"]}
