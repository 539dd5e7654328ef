"""`nanogpt runs`: the table, the document, and folders that are none."""

import json
from pathlib import Path

import pytest
import torch

from nanogpt_cli.cli.main import run as nanogpt
from nanogpt_cli.runs.directory import create_run
from nanogpt_cli.runs.lock import lock
from nanogpt_cli.runs.metrics import MetricsLog
from tests.view.made import make_run


@pytest.fixture
def four_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of each state; `busy` is held by the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("broken", "busy", "done", "halted"):
        run = create_run(Path("runs") / name, config={"train": {"max_iters": 20}}, tokenizer=None, environment={})
        torch.save({"step": 20 if name == "done" else 10}, run.checkpoint)
        log = MetricsLog(run.metrics)
        for step in (10, 20) if name == "done" else (10,):
            log.append({"step": step, "val_loss": 2.0 + 1 / step, "train_loss": 2.0})
        log.close()
    Path("runs/broken/config.toml").write_text("= 3")
    return tmp_path


def test_the_table(four_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["runs"]) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows == [
        ["run", "state", "step", "best", "val", "loss", "at", "step", "data", "set", "tokenizer"],
        ["broken", "damaged", "10", "/", "n/a", "2.1000", "10", "n/a", "n/a"],
        ["busy", "stopped", "10", "/", "20", "2.1000", "10", "n/a", "n/a"],
        ["done", "finished", "20", "/", "20", "2.0500", "20", "n/a", "n/a"],
        ["halted", "stopped", "10", "/", "20", "2.1000", "10", "n/a", "n/a"],
    ]
    assert shown.err == ""


def test_the_document(four_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:

    with lock(Path("runs/busy")):
        assert nanogpt(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["state"]) for one in found] == [
        ("broken", "damaged"),
        ("busy", "running"),
        ("done", "finished"),
        ("halted", "stopped"),
    ]
    assert found[2] == {
        "name": "done",
        "path": "runs/done",
        "state": "finished",
        "step": 20,
        "max_iters": 20,
        "best_val_loss": 2.05,
        "best_step": 20,
        "data_set": None,
        "tokenizer": None,
        "bits_per_byte": None,
    }
    assert found[0]["max_iters"] is None


def test_no_runs_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert nanogpt(["runs"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nanogpt train" in shown.err
    assert nanogpt(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_another_folder(four_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir("/")
    assert nanogpt(["runs", str(four_runs / "runs"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert nanogpt(["runs", str(four_runs / "gone")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_nothing_is_changed(four_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in four_runs.rglob("*")}
    assert nanogpt(["runs"]) == 0
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in four_runs.rglob("*")} == before


def test_runs_of_different_tokenizers_show_bits_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"))
    assert nanogpt(["runs"]) == 0
    assert "bits/byte" not in capsys.readouterr().out
    make_run(Path("runs/b"), bytes_per_token=4.0, tokenizer={"kind": "gpt2", "size": 50257})
    assert nanogpt(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "bits/byte" in shown
    assert "gpt2 50257" in shown
    assert nanogpt(["runs", "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)
    assert a["bits_per_byte"] == pytest.approx(4 * b["bits_per_byte"])
    assert (a["tokenizer"], b["tokenizer"]) == ("bytes", "gpt2 50257")
