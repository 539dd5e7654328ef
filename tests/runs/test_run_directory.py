"""The run directory: whole or absent, found by what people type, and its state told from its files alone."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanogpt_cli import files
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.runs import lock as locking
from nanogpt_cli.runs.directory import (
    RunDirectory,
    create_run,
    list_runs,
    new_run_path,
    saved_step,
    status,
)
from nanogpt_cli.runs.metrics import MetricsLog

CONFIG: dict[str, Any] = {"train": {"max_iters": 30}, "derived": {"min_lr": 1e-4}}


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def make(path: Path, **more: Any) -> RunDirectory:
    return create_run(path, **{"config": CONFIG, "tokenizer": None, "environment": {"host": "here"}, **more})


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != locking.LOCK)


def save(run: RunDirectory, step: int = 30) -> None:
    torch.save({"step": step, "model": {"w": torch.ones(2)}}, run.checkpoint)


class TestCreate:
    def test_a_run_is_complete_with_its_toml_files(self, tmp_path: Path) -> None:
        run = make(tmp_path / "deep" / "runs" / "x", tokenizer={"kind": "bytes"})
        assert contents(run.path) == ["config.toml", "logs", "logs/environment.toml", "tokenizer.toml"]
        assert read_toml(run.config) == CONFIG
        assert run.tokenizer.read_text() == 'kind = "bytes"\n'
        assert contents(run.path.parent)[0] == "x", "nothing temporary is left"

    def test_it_appears_by_one_rename_of_the_complete_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        real = Path.rename

        def rename(self: Path, target: Path) -> Path:
            seen.append((contents(self), target.exists()))
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        make(tmp_path / "x", fill=lambda run: save(run))
        assert seen == [(["ckpt.pt", "config.toml", "logs", "logs/environment.toml"], False)]

    def test_an_existing_run_is_never_touched_and_the_message_says_what_to_type(self, tmp_path: Path) -> None:
        run = make(tmp_path / "x")
        before = run.config.read_bytes()
        with pytest.raises(UserError) as caught:
            make(tmp_path / "x", config={"train": {"max_iters": 1}})
        for words in (f"nanogpt resume {run.path}", "--or-resume", "another --run"):
            assert words in str(caught.value)
        assert run.config.read_bytes() == before

    @pytest.mark.parametrize("kind", ["file", "folder with something in it", "link to nowhere"])
    def test_other_things_in_the_way_stay(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "x"
        if kind == "file":
            path.write_text("mine")
        elif kind == "link to nowhere":
            path.symlink_to(tmp_path / "nowhere")
        else:
            path.mkdir()
            (path / "thesis.tex").write_text("mine")
        with pytest.raises(UserError, match="is no run; nothing is ever overwritten"):
            make(path)
        assert os.path.lexists(path)
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_empty_folder_is_taken_over(self, tmp_path: Path) -> None:
        (tmp_path / "x").mkdir()
        assert make(tmp_path / "x").config.exists()

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"file/x: .*cannot make the run directory|exists"):
            make(tmp_path / "file" / "x")

        def refuse(*args: Any, **more: Any) -> None:
            raise PermissionError(13, "Permission denied", "somewhere")

        monkeypatch.setattr(files, "write_toml", refuse)
        with pytest.raises(UserError, match="cannot make the run directory: Permission denied"):
            make(tmp_path / "x")
        assert contents(tmp_path) == ["file"]

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path, table: dict[str, Any]) -> None:
            raise files.DiskFullError(28, "no space", str(path))

        monkeypatch.setattr(files, "write_toml", full)
        with pytest.raises(NanogptError, match="the disk is full") as caught:
            make(tmp_path / "x")
        assert caught.value.exit_code == 1
        assert contents(tmp_path) == []

    def test_what_fill_cannot_write_leaves_nothing(self, tmp_path: Path) -> None:
        def fill(run: RunDirectory) -> None:
            run.checkpoint.write_bytes(b"half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "x", fill=fill)
        assert contents(tmp_path) == []

    def test_leavings_of_a_killed_maker_are_swept_and_those_of_a_live_one_are_not(self, tmp_path: Path) -> None:
        code = f"""
import os, signal
from pathlib import Path
from nanogpt_cli import files
files.write_toml = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
from nanogpt_cli.runs.directory import create_run
create_run(Path({str(tmp_path / "x")!r}), config={{}}, tokenizer=None, environment={{}})
"""
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(files.TEMPORARY_PREFIX)
        assert list_runs(tmp_path) == []
        with files.temporary_folder(tmp_path / "x-b") as live:
            make(tmp_path / "x")
            assert not left.exists()
            assert live.exists()


class TestNames:
    def test_the_first_free_name(self, tmp_path: Path) -> None:
        assert new_run_path(tmp_path, "gpt2") == tmp_path / "gpt2"
        make(tmp_path / "gpt2")
        (tmp_path / "gpt2-2").write_text("in the way")
        assert new_run_path(tmp_path, "gpt2") == tmp_path / "gpt2-3"

    def test_runs_are_listed_with_numbers_in_their_order(self, tmp_path: Path) -> None:
        for name in ("gpt2-10", "gpt2", "gpt2-9", "abc"):
            make(tmp_path / name)
        (tmp_path / "notes").mkdir()
        (tmp_path / ".hidden").mkdir()
        (tmp_path / ".hidden" / "config.toml").write_text("")
        assert [run.name for run in list_runs(tmp_path)] == ["abc", "gpt2", "gpt2-9", "gpt2-10"]
        assert list_runs(tmp_path / "nowhere") == []


def put_lines(run: RunDirectory, *lines: dict[str, Any]) -> None:
    metrics = MetricsLog(run.metrics)
    for line in lines:
        metrics.append(line)
    metrics.close()


class TestStatus:
    def test_a_new_run_is_stopped_at_step_0(self, tmp_path: Path) -> None:
        found = status(make(tmp_path / "x"))
        assert (found.state, found.step, found.max_iters, found.best_val_loss) == ("stopped", 0, 30, None)

    def test_best_loss_step_and_end(self, tmp_path: Path) -> None:
        run = make(tmp_path / "x")
        save(run, 25)
        put_lines(run, {"step": 10, "val_loss": 2.0, "train_loss": 2.0}, {"step": 20, "val_loss": 1.5, "train_loss": 1})
        put_lines(run, {"step": 25, "loss": 1.0})
        found = status(run)
        assert (found.state, found.step, found.best_val_loss, found.best_step) == ("stopped", 25, 1.5, 20)
        save(run, 30)
        put_lines(run, {"step": 30, "val_loss": 2.5, "train_loss": 1.0})
        found = status(run)
        assert (found.state, found.step, found.best_val_loss) == ("finished", 30, 1.5)
        with locking.lock(run.path):
            assert status(run).state == "running"
        assert status(run).state == "finished"

    def test_losses_without_a_checkpoint_are_no_finished_run(self, tmp_path: Path) -> None:
        run = make(tmp_path / "x")
        put_lines(run, {"step": 30, "val_loss": 1.0, "train_loss": 1.0})
        assert status(run).state == "stopped"

    @pytest.mark.parametrize("damage", ["empty", "truncated", "folder"])
    def test_a_checkpoint_that_is_none_is_damage(self, tmp_path: Path, damage: str) -> None:
        run = make(tmp_path / "x")
        save(run)
        whole = run.checkpoint.read_bytes()
        run.checkpoint.unlink()
        if damage == "folder":
            run.checkpoint.mkdir()
        else:
            run.checkpoint.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
        assert status(run).state == "damaged"

    def test_the_step_is_the_one_that_resume_would_go_on_from(self, tmp_path: Path) -> None:
        run = make(tmp_path / "x")
        save(run)
        saved = torch.load(run.checkpoint, weights_only=True)["step"]
        put_lines(run, {"step": saved + 7, "loss": 1.0})
        assert status(run).step == saved
        with locking.lock(run.path):
            assert status(run).step == saved + 7
        run.checkpoint.rename(run.previous)
        run.checkpoint.write_bytes(b"")
        assert (status(run).state, status(run).step) == ("damaged", saved)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
    @given(place=st.floats(0, 0.999), bit=st.integers(0, 7))
    def test_a_flipped_bit_is_no_step(self, tmp_path: Path, place: float, bit: int) -> None:
        path = tmp_path / "ckpt.pt"
        torch.save({"step": 5, "model": {"w": torch.ones(50)}}, path)
        assert saved_step(path) == 5
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 1 << bit
        path.write_bytes(content)
        assert saved_step(path) in (None, 5)  # some bits of an archive mean nothing

    def test_nothing_that_a_pickle_names_is_called(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        torch.save({"step": 5, "made": Touch(tmp_path / "made")}, path)
        saved_step(path)
        assert not (tmp_path / "made").exists()

    def test_a_run_without_its_config_is_listed_as_damaged(self, tmp_path: Path) -> None:
        run = make(tmp_path / "x")
        save(run)
        run.config.unlink()
        assert [status(found).state for found in list_runs(tmp_path)] == ["damaged"]

    def test_a_vanished_run_is_damaged_and_no_error(self, tmp_path: Path) -> None:
        assert status(RunDirectory(tmp_path / "gone")).state == "damaged"

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
    @given(
        config=st.binary(max_size=60)
        | st.sampled_from([b"train = 3", b"[train]\nmax_iters = 'x'", b"a=" + b"[" * 5000, b"[train]\nmax_iters=1e3"]),
        lines=st.binary(max_size=80)
        | st.sampled_from([b'{"step": 1e400}\n', b'{"step": 3, "val_loss": "low"}\n', b'{"step": true}\n[1]\n{"st']),
    )
    def test_no_damage_is_a_traceback(self, tmp_path: Path, config: bytes, lines: bytes) -> None:
        run = RunDirectory(tmp_path / "x")
        run.logs.mkdir(parents=True, exist_ok=True)
        run.config.write_bytes(config)
        run.metrics.write_bytes(lines)
        assert status(run).state in ("stopped", "damaged")
        with contextlib.suppress(UserError):
            assert isinstance(read_toml(run.config), dict)
