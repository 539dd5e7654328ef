"""Files that are whole or absent, and are checked before they are trusted."""

import os
import pickle
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli import files
from nanogpt_cli.errors import UserError
from nanogpt_cli.files import DiskFullError
from nanogpt_cli.runs import checkpoint as checkpoints
from nanogpt_cli.runs.checkpoint import (
    RunProgress,
    link_or_copy,
    load_checkpoint,
    load_training_state,
    non_finite,
    save_checkpoint,
    tensor_bytes,
)
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.recovery import newest_state
from tests.models import checkpoint


def state(step: int = 1) -> dict[str, Any]:
    """A training state before its first update, whatever its step says."""
    return {
        **checkpoint(seed=step),
        "optimizer": {"adamw": {}, "muon": {}},
        "scaler": {},
        "step": step,
        "rows": 4 * step,
        "progress": asdict(RunProgress(step=step)),
        "eval_windows": 1,
        "layout": {},
    }


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """ckpt.pt of step 2 and ckpt-previous.pt of step 1."""
    last, previous = tmp_path / "ckpt.pt", tmp_path / "ckpt-previous.pt"
    save_checkpoint(state(1), last, previous=previous)
    save_checkpoint(state(2), last, previous=previous)
    return last, previous


def test_round_trip_and_previous(pair: tuple[Path, Path]) -> None:
    last, previous = pair
    assert load_training_state(last)["step"] == 2
    assert load_training_state(previous)["step"] == 1
    assert sorted(p.name for p in last.parent.iterdir()) == ["ckpt-previous.pt", "ckpt.pt"]


def test_order_of_the_calls_that_make_it_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(state(1), tmp_path / "ckpt.pt", previous=tmp_path / "ckpt-previous.pt")
    calls: list[str] = []

    def record(module: Any, name: str, label: str) -> None:
        original = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    record(torch, "save", "write")
    record(os, "fsync", "fsync")
    record(os, "link", "link")
    record(Path, "replace", "rename")
    save_checkpoint(state(2), tmp_path / "ckpt.pt", previous=tmp_path / "ckpt-previous.pt")
    # the new file is durable before any name moves; each renamed name is synced with its folder
    assert calls == ["write", "fsync", "link", "rename", "fsync", "rename", "fsync"]


def test_without_hard_links_the_previous_one_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: Any) -> None:
        raise OSError(1, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    source = tmp_path / "a"
    source.write_bytes(b"content")
    link_or_copy(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"content"
    assert (tmp_path / "b").stat().st_ino != source.stat().st_ino


def test_free_space_is_checked_first(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    last, _ = pair
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(DiskFullError, match="MB needed"):
        save_checkpoint(state(3), last)
    assert load_training_state(last)["step"] == 2


def test_disk_full_in_the_middle_leaves_the_old_one(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    last, previous = pair

    class Full(files.OwnFile):
        left = 5000

        def write(self, data: Any, /) -> int:
            self.left -= len(data)
            if self.left < 0:
                self.error = OSError(28, "No space left on device")
                raise self.error
            return super().write(data)

    monkeypatch.setattr(files, "OwnFile", Full)
    with pytest.raises(DiskFullError):
        save_checkpoint(state(3), last, previous=previous)
    monkeypatch.undo()
    assert load_training_state(last)["step"] == 2
    assert load_training_state(previous)["step"] == 1
    assert not list(last.parent.glob(f"{files.TEMPORARY_PREFIX}*"))
    save_checkpoint(state(3), last, previous=previous)  # room again
    assert load_training_state(last)["step"] == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-500]),
    "empty": lambda p: p.write_bytes(b""),
    "flipped bit": flip,
    "text": lambda p: p.write_text("hello"),
    "a list": lambda p: torch.save([1, 2], p),
    "weights only": lambda p: torch.save({k: v for k, v in state().items() if k not in ("optimizer", "layout")}, p),
    "later format": lambda p: torch.save({**state(), "format": 99}, p),
    "nanoGPT": lambda p: torch.save({"model": {}, "model_args": {}, "optimizer": {}}, p),
    "a zip": lambda p: zipfile.ZipFile(p, "w").writestr("x", "y"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_one_used(pair: tuple[Path, Path], kind: str) -> None:
    last, previous = pair
    DAMAGE[kind](last)
    with pytest.raises(UserError, match=r"ckpt\.pt"):
        load_training_state(last)
    found = newest_state(RunDirectory(last.parent))
    assert found.checkpoint is not None
    assert (found.checkpoint["step"], found.path) == (1, previous)
    assert "ckpt.pt" in found.problems[0]


def test_both_damaged_is_an_error_naming_both(pair: tuple[Path, Path]) -> None:
    for path in pair:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"(?s)ckpt\.pt: the file is empty.*ckpt-previous\.pt: the file is empty"):
        newest_state(RunDirectory(pair[0].parent))


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    files.write_toml(run.config, state()["config"])
    assert (newest_state(run).checkpoint, newest_state(run).problems) == (None, ())


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_crafted_pickle_never_runs(tmp_path: Path) -> None:
    evidence = tmp_path / "it-ran"
    torch.save({**state(), "progress": Touch(evidence)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Touch(evidence)))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(UserError):
            load_checkpoint(tmp_path / name)
    assert not evidence.exists()


def test_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "ckpt.pt")


def test_sizes_and_finiteness() -> None:
    assert tensor_bytes({"a": torch.zeros(10), "b": [torch.zeros(2, dtype=torch.float64)], "c": 1}) == 56
    assert non_finite({"a": torch.zeros(3), "b": torch.tensor([1.0, float("nan")])}) == "b"
    assert non_finite({"a": torch.zeros(3), "b": torch.tensor([1])}) is None
