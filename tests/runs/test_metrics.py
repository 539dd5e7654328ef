"""metrics.jsonl has each step once of each kind, whatever was killed, and whatever the disk did."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanogpt_cli.files import DiskFullError, OwnFile
from nanogpt_cli.runs.metrics import MetricsLog, read_metrics


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_a_line_is_whole_json_with_full_floats_and_without_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    log.append({"step": 1, "loss": 0.1 + 0.2, "mfu": None, "grad_norm": math.inf, "lr": math.nan, "skipped": 0})
    assert (tmp_path / "m").read_text() == '{"step": 1, "loss": 0.30000000000000004, "skipped": 0}\n', "written at once"
    log.close()


def test_resume_drops_what_lies_after_its_step_by_a_rename(tmp_path: Path) -> None:
    path = tmp_path / "m"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.append({"step": step, "loss": 1.0})
    log.append({"step": 5, "val_loss": 1.0, "train_loss": 1.0})
    with path.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    old = tmp_path / "old"
    old.hardlink_to(path)
    before = old.read_bytes()
    log.keep_through(5, 5)
    assert steps(path) == [1, 2, 3, 4, 5, 5]
    log.keep_through(4, 4)
    log.append({"step": 5, "loss": 2.0})
    log.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    assert path.read_bytes().endswith(b'{"step": 5, "loss": 2.0}\n')
    assert old.read_bytes() == before, "the file was replaced, not changed"
    assert sorted(tmp_path.iterdir()) == [path, old]


def test_a_start_without_a_file_or_a_folder(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "logs" / "m")
    log.keep_through(0, 0)
    assert list(read_metrics(log.path)) == []
    log.append({"step": 1})
    log.close()
    assert steps(log.path) == [1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_each_step_stands_once_after_any_kills(tmp_path: Path, data: st.DataObject) -> None:
    """A run of 12 steps, evaluated and saved at every third, killed and resumed up to five times."""
    path = tmp_path / "m"
    path.unlink(missing_ok=True)
    saved = 0
    for _ in range(data.draw(st.integers(0, 5))):
        step, log = saved, MetricsLog(path)
        log.keep_through(saved, saved)
        for step in range(saved + 1, data.draw(st.integers(saved, 12)) + 1):
            log.append({"step": step, "loss": step / 10})
            if step % 3 == 0:
                log.append({"step": step, "val_loss": step / 10, "train_loss": 0.0})
                log.sync()
                saved = step
        log.close()
        if path.exists():  # a kill may tear what was not synced for the checkpoint
            durable = len(b"".join(_durable(path, saved)))
            os.truncate(path, data.draw(st.integers(durable, path.stat().st_size)))
    log = MetricsLog(path)
    log.keep_through(saved, saved)
    for step in range(saved + 1, 13):
        log.append({"step": step, "loss": step / 10})
        if step % 3 == 0:
            log.append({"step": step, "val_loss": step / 10, "train_loss": 0.0})
    log.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6, 9, 12]


def _durable(path: Path, saved: int) -> list[bytes]:
    return [text for text in path.read_bytes().splitlines(True) if json.loads(text)["step"] <= saved]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(junk=st.lists(st.binary(max_size=30) | st.sampled_from([b"\0" * 9, b'{"step": "3"}', b"[[" * 3000]), max_size=8))
def test_junk_between_lines_is_skipped_and_swept(tmp_path: Path, junk: list[bytes]) -> None:
    path = tmp_path / "m"
    pieces = [b'{"step": 1, "loss": 1.0}', *junk, b'{"step": 900, "loss": 1.0}']
    path.write_bytes(b"\n".join(pieces) + b"\n")
    assert steps(path)[0] == 1
    assert steps(path)[-1] == 900
    MetricsLog(path).keep_through(10**9, 10**9)
    assert all(isinstance(json.loads(text)["step"], int) for text in path.read_bytes().splitlines())


class TestFullDisk:
    def test_lines_wait_for_room_and_sync_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_room(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        full = tmp_path / "m"
        log = MetricsLog(full)
        monkeypatch.setattr(OwnFile, "write", no_room)
        for step in (1, 2):
            log.append({"step": step})
        with pytest.raises(DiskFullError):
            log.sync()
        monkeypatch.undo()  # room again
        log.append({"step": 3})
        log.sync()
        assert steps(full) == [1, 2, 3]

    def test_half_a_line_is_completed(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path / "m")
        log.append({"step": 1})

        class Short:
            """A file that takes five bytes and then no more."""

            def __init__(self, file: Any) -> None:
                self.file, self.room = file, 5

            def write(self, text: bytes) -> int:
                if not self.room:
                    raise OSError(28, "No space left on device")
                written = self.file.write(text[: self.room])
                self.room -= written
                return int(written)

            def close(self) -> None:
                self.file.close()

        log._file = Short(log._file)  # type: ignore[assignment]
        log.append({"step": 2, "loss": 0.5})
        assert steps(log.path) == [1]
        log.append({"step": 3})
        log.close()
        assert log.path.read_text() == '{"step": 1}\n{"step": 2, "loss": 0.5}\n{"step": 3}\n'

    def test_a_vanished_folder_stops_nobody_until_it_counts(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path / "gone" / "logs" / "m")
        log.append({"step": 1})
        with pytest.raises(OSError, match="No such file"):
            log.sync()
        log.close()
