"""One writer a run: a live holder is named, a dead one is no obstacle, with and without the kernel's help."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs import lock as locking
from nanogpt_cli.runs.lock import Holder, holder, lock


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


HOLD = """
import errno, fcntl, sys
from pathlib import Path
from nanogpt_cli.runs import lock as locking
def refuse(*_): raise OSError(errno.ENOLCK, 'No locks available')
if {without_kernel}:
    fcntl.flock = refuse
with locking.lock(Path({folder!r})):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(folder: Path, without_kernel: bool) -> Iterator["subprocess.Popen[str]"]:
    code = HOLD.format(folder=str(folder), without_kernel=without_kernel)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(params=[False, True], ids=["flock", "no flock"])
def without_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(locking, "PAUSE", 0.01)
    if request.param:
        monkeypatch.setattr(fcntl, "flock", refuse)
    return bool(request.param)


def test_a_live_holder_is_named(tmp_path: Path, without_kernel: bool) -> None:
    with another_process(tmp_path, without_kernel) as other:
        with pytest.raises(UserError) as caught, lock(tmp_path):
            pass
        assert f"in use by process {other.pid} on {socket.gethostname()}" in str(caught.value)
        assert caught.value.exit_code == 2
        found = holder(tmp_path)
        assert found is not None
        assert found.pid == other.pid


def test_a_killed_holder_is_no_obstacle(tmp_path: Path, without_kernel: bool) -> None:
    with another_process(tmp_path, without_kernel) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert holder(tmp_path) is None
        with lock(tmp_path):
            found = holder(tmp_path)
            assert found is not None
            assert found.pid == os.getpid()


def test_released_at_the_end_also_of_an_error(tmp_path: Path, without_kernel: bool) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), lock(tmp_path):
            raise KeyError
        assert holder(tmp_path) is None


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    old = Holder(socket.gethostname(), os.getpid(), "long ago")
    (tmp_path / locking.LOCK).write_text(json.dumps(asdict(old)))
    assert holder(tmp_path) is None
    with lock(tmp_path):
        pass


def test_of_another_machine_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locking, "PAUSE", 0.0)
    file = tmp_path / locking.LOCK
    file.write_text(json.dumps(asdict(Holder("node7", 1, "1"))))
    with pytest.raises(UserError, match=f"process 1 on node7.*delete {file}"), lock(tmp_path):
        pass
    file.unlink()
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"host": 1, "pid": "x", "started": null}'])
def test_a_damaged_lock_file_is_no_obstacle(tmp_path: Path, text: bytes) -> None:
    (tmp_path / locking.LOCK).write_bytes(text)
    assert holder(tmp_path) is None
    with lock(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UserError, match=f"{tmp_path / 'gone'}: .*cannot be written: No such file"),
        lock(tmp_path / "gone"),
    ):
        pass

    def refuse(*args: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="cannot be written: Read-only file system"), lock(tmp_path):
        pass


def test_a_full_disk_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_nothing_is_written_through_a_link(tmp_path: Path, how: str) -> None:
    (tmp_path / "precious").write_text("all I have")
    (tmp_path / "run").mkdir()
    getattr(tmp_path / "run" / locking.LOCK, how)(tmp_path / "precious")
    if how == "symlink_to":
        with pytest.raises(UserError, match=r"\.lock is a link to .*precious.*Remove it"), lock(tmp_path / "run"):
            pass
    else:
        with lock(tmp_path / "run"):
            assert holder(tmp_path / "run") is not None
    assert (tmp_path / "precious").read_text() == "all I have"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / locking.LOCK)
    assert holder(tmp_path) is None
    with pytest.raises(UserError, match="no regular file"), lock(tmp_path):
        pass


def test_a_killed_holder_that_nobody_has_buried_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with another_process(tmp_path, without_kernel=True) as other:
        monkeypatch.setattr(fcntl, "flock", refuse)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
        assert holder(tmp_path) is None


def test_looking_does_not_disturb_who_takes_it(tmp_path: Path) -> None:
    """`nanogpt runs` in a loop beside a start: the start never fails, and the look changes nothing."""
    code = f"""
from pathlib import Path
from nanogpt_cli.runs.lock import holder
print("looking", flush=True)
while True: holder(Path({str(tmp_path)!r}))
"""
    with lock(tmp_path):
        pass
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(100):
            with lock(tmp_path):
                pass
    finally:
        process.kill()
        process.communicate()
