"""TensorBoard and W&B: what they are told, and that no failure of theirs ends a training."""

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanogpt_cli.config.schema import Config
from nanogpt_cli.runs import environment as environments
from nanogpt_cli.runs.directory import RunDirectory, create_run
from nanogpt_cli.runs.environment import environment
from nanogpt_cli.view.trackers import Trackers, open_trackers


class Recorder:
    """Keeps what it is told; fails at a chosen step."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.fail_at, self.closed = fail_at, False

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("no\n route  to host.")
        self.lines.append((step, values))

    def close(self) -> None:
        self.closed = True
        if self.fail_at == -1:
            raise RuntimeError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "x", config={}, tokenizer=None, environment=environment("cpu"))


def test_the_numbers_of_a_line_are_passed_on() -> None:
    one, two = Recorder(), Recorder()
    trackers = Trackers([("one", one), ("two", two)])
    trackers.log({"step": 3, "loss": 1.5, "mfu": None})
    trackers.close()
    assert one.lines == two.lines == [(3, {"loss": 1.5})]
    assert one.closed


def test_one_that_fails_is_named_once_and_the_others_go_on() -> None:
    told: list[str] = []
    bad, good = Recorder(fail_at=2), Recorder()
    trackers = Trackers([("bad", bad), ("good", good)], told.append)
    for step in range(5):
        trackers.log({"step": step, "loss": 1.0})
    trackers.close()
    assert told == ["bad is left out: no route to host. Training goes on; metrics.jsonl has it all."]
    assert [len(bad.lines), len(good.lines)] == [2, 5]
    assert not bad.closed


def test_a_failing_end_is_only_said() -> None:
    told: list[str] = []
    Trackers([("bad", Recorder(fail_at=-1))], told.append).close()
    assert told == ["bad is left out: RuntimeError. Training goes on; metrics.jsonl has it all."]


def test_none_is_the_default(run: RunDirectory) -> None:
    told: list[str] = []
    open_trackers(Config(), run, 0, told.append).log({"step": 1, "loss": 1.0})
    assert told == []
    assert not list(run.logs.glob("*/"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_with_the_line_to_type(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    told: list[str] = []
    trackers = open_trackers(Config().replace("log", **{name: True}), run, 0, told.append)
    trackers.log({"step": 1, "loss": 1.0})
    assert len(told) == 1
    assert told[0].startswith(f"{name} is left out: ")
    assert f"pip install {name}" in told[0]


def test_wandb_continues_one_run_under_one_id(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []

    def init(**settings: Any) -> SimpleNamespace:
        started.append(settings)
        return SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    config = Config().replace("log", wandb=True, wandb_project="p")
    for first_step in (0, 10):
        trackers = open_trackers(config, run, first_step, pytest.fail)
        trackers.log({"step": first_step + 1, "loss": 1.0})
        trackers.close()
    assert started[0] == started[1]
    assert started[0]["id"] == tomllib.loads(run.environment.read_text())["run_id"]
    assert (started[0]["resume"], started[0]["project"], started[0]["name"]) == ("allow", "p", "x")
    assert started[0]["config"]["model"]["n_layer"] == 4
    assert logged == [{"step": 1, "loss": 1.0}, {"step": 11, "loss": 1.0}]


def test_wandb_without_its_id_is_left_out(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=pytest.fail, Settings=dict))
    run.environment.unlink()
    told: list[str] = []
    open_trackers(Config().replace("log", wandb=True), run, 0, told.append)
    assert "environment.toml" in told[0]


def test_tensorboard_forgets_what_lies_after_the_checkpoint(run: RunDirectory) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config().replace("log", tensorboard=True)
    for first, last, loss in ((0, 8, 1.0), (5, 10, 2.0)):
        trackers = open_trackers(config, run, first, pytest.fail)
        for step in range(first + 1, last + 1):
            trackers.log({"step": step, "loss": loss})
        trackers.close()
    events = EventAccumulator(str(run.logs / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(step, 1.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 11)]


class TestEnvironment:
    def test_it_names_versions_machine_and_command(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/nanogpt", "train", "--dataset", "my text.txt"])
        monkeypatch.chdir(tmp_path)
        found = environment("cpu (2 threads)")
        assert found["command"] == "nanogpt train --dataset 'my text.txt'"
        assert found["device"] == "cpu (2 threads)"
        assert found["folder"] == str(tmp_path)
        assert set(found["versions"]) >= {"nanogpt-cli", "python", "torch", "numpy"}
        assert all(value is not None for value in found.values()), "TOML has no null"
        assert "git_sha" not in found

    def test_a_commit_and_whether_it_was_changed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "a").write_text("1")
        for words in (["init", "-q"], ["add", "a"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
            environments._git_says(*words)
        found = environment("cpu")
        assert len(found["git_sha"]) == 40
        assert found["git_changed"] is False
        (tmp_path / "a").write_text("2")
        assert environment("cpu")["git_changed"] is True

    def test_no_git_no_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert "git_sha" not in environment("cpu")

    def test_two_runs_have_two_ids(self) -> None:
        assert environment("cpu")["run_id"] != environment("cpu")["run_id"]
