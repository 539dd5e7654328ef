"""`nanogpt runs`: the table, the document, and folders that are none."""

import json
import math
import statistics
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
        "tokenizer_id": found[1]["tokenizer_id"],
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
    assert "gone: no such run" in capsys.readouterr().err


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


@pytest.fixture
def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs that differ only in their seed, and one of another rate."""
    monkeypatch.chdir(tmp_path)
    for number, (start, rate) in enumerate(((4.0, 1e-3), (4.4, 1e-3), (4.8, 1e-3), (5.0, 3e-3)), start=1):
        config = {"optim": {"learning_rate": rate}, "train": {"seed": number, "max_iters": 40}}
        derived = {"bytes_per_token": 2.0, "min_lr": rate / 10}
        make_run(Path(f"runs/r{number}"), start=start, config={**config, "derived": derived})


def test_runs_that_differ_only_in_their_seed_are_one_row(alike: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["runs", "r1", "r2", "runs/r3", "r4", "runs/r1", "--json"]) == 0
    three, one = json.loads(capsys.readouterr().out)
    assert (three["runs"], three["seeds"]) == (["r1", "r2", "r3"], [1, 2, 3])
    assert (three["settings"], one["settings"]) == ({"learning_rate": "0.001"}, {"learning_rate": "0.003"})
    losses = [1.6 + (start - 1.5) / 40 for start in (4.0, 4.4, 4.8)]
    assert three["best_val_loss"] == pytest.approx(statistics.mean(losses))
    assert three["best_val_loss_deviation"] == pytest.approx(statistics.stdev(losses))
    assert three["bits_per_byte_deviation"] == pytest.approx(statistics.stdev(losses) / 2 / math.log(2))
    assert (one["best_val_loss_deviation"], one["bits_per_byte_deviation"]) == (None, None)
    assert (one["time_s"], one["tokens_per_s"]) == (20.0, 1536.0)


def test_side_by_side_in_words(alike: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["runs", "r4", "r1", "r2", "--sort", "best-val-loss"]) == 0
    shown = capsys.readouterr()
    head, first, second = shown.out.splitlines()
    assert head.split() == ["run", "learning_rate", "step", "best", "val", "loss", "bits/byte", "time", "tokens/s"]
    assert first.startswith("r1, r2 ")
    assert first.split()[2:] == ["0.001", "0", "1.6675", "±", "0.0071", "1.2028", "±", "0.0051", "20s", "1.54k"]
    assert second.split() == ["r4", "0.003", "0", "1.6875", "±", "n/a", "1.2173", "±", "n/a", "20s", "1.54k"]
    assert "with one seed the spread between seeds is unknown" in shown.err


def test_one_run_is_no_folder_of_runs(alike: None, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("runs/r1", "r1"):
        assert nanogpt(["runs", word]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("r1 ")
    assert nanogpt(["runs", "runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    for words, message in (
        (["r9"], "r9: no such run. Runs in runs/: r1"),
        (["r1", "runs"], "no run directory"),
        (["--sort=x"], "no such key"),
    ):
        assert nanogpt(["runs", *words]) == 2
        assert message in capsys.readouterr().err


def test_losses_a_token_of_other_tokenizers_are_not_side_by_side(
    alike: None, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(Path("runs/b"), bytes_per_token=4.0, tokenizer={"kind": "gpt2", "size": 50257})
    assert nanogpt(["runs", "r1", "b"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert "bits/byte" in head
    assert "best val loss" not in head
