"""The gate for files: nothing outside is written, nothing is truncated, every error names a file."""

import ast
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import nanogpt_cli
from nanogpt_cli import files
from nanogpt_cli.errors import StoppedError, UserError
from nanogpt_cli.files import DiskFullError, atomic_write, open_own, own_folder, remove_leftovers, temporary_folder

PACKAGE = Path(nanogpt_cli.__file__).parent
NOT_FILES = ("files.py", "cli/main.py", "terminal.py")  # the last two open /dev/null in place of a stream


def openings(path: Path) -> list[str]:
    """Every call in a module that could open a file for writing, or make one."""
    found = []
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        modes = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
        writes = any(isinstance(mode, str) and set(mode) & set("wax+") and len(mode) <= 3 for mode in modes)
        method = isinstance(call.func, ast.Attribute)
        if (name in ("write_text", "write_bytes", "touch", "mkstemp", "mkdtemp", "symlink_to") and method) or (
            name in ("open", "fdopen", "FileIO", "memmap", "ZipFile") and writes
        ):
            found.append(ast.unparse(call))
        elif name == "open" and isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "os.open":
            found += [ast.unparse(call)] * (not ast.unparse(call.args[1]).startswith("os.O_RDONLY"))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_opened_for_writing_but_here(path: Path) -> None:
    if not str(path.relative_to(PACKAGE)).startswith(NOT_FILES):
        assert openings(path) == []


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("all I have")
    return path


@pytest.mark.parametrize("append", [True, False])
def test_a_link_is_not_followed(tmp_path: Path, precious: Path, append: bool) -> None:
    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(UserError, match=r"log is a link to .*precious"):
        open_own(tmp_path / "log", append=append)
    assert precious.read_text() == "all I have"


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to(tmp_path)
    with pytest.raises(UserError, match="logs is a link"):
        own_folder(tmp_path / "logs")
    assert own_folder(own_folder(tmp_path / "own")).is_dir()


@pytest.mark.parametrize("append", [True, False])
def test_a_file_with_two_names_changes_under_its_own_alone(tmp_path: Path, precious: Path, append: bool) -> None:
    log = tmp_path / "log"
    log.hardlink_to(precious)
    with open_own(log, append=append) as file:
        file.seek(0, os.SEEK_END)
        file.write(b", and more")
    assert precious.read_text() == "all I have"
    assert log.read_text() == "all I have, and more"


def test_what_is_no_file_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is no regular file"):
        open_own(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_own(tmp_path)


def test_new_files_and_folders_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a", lambda file: file.write(b"x"))
        open_own(tmp_path / "b").close()
        with temporary_folder(tmp_path / "c") as folder:
            folder.rename(tmp_path / "c")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"] == [0o640, 0o640, 0o750]


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.ENOTSUP, errno.EPERM])
@pytest.mark.parametrize("what", ["fsync", "open"])
def test_a_file_system_that_syncs_no_folders_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, what: str
) -> None:
    real: Callable[..., Any] = getattr(os, what)

    def refuse(target: Any, *more: Any) -> Any:
        if os.path.isdir(target) or (isinstance(target, int) and stat.S_ISDIR(os.fstat(target).st_mode)):  # noqa: PTH112
            raise OSError(refused, os.strerror(refused))
        return real(target, *more)

    monkeypatch.setattr(os, what, refuse)
    atomic_write(tmp_path / "a", lambda file: file.write(b"x"))
    assert not files.sync_folder(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"x"


def test_a_disk_that_fails_is_not_taken_for_one_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output") as caught:
        files.sync_folder(tmp_path)
    assert caught.value.filename == str(tmp_path)


class WrappedError(Exception):
    """As torch does with what comes from a file object."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), OSError),
        (OSError(errno.ENOSPC, "No space"), DiskFullError),
        (StoppedError("Stopped", 15), StoppedError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_stopped_a_write_comes_out_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: type[BaseException]
) -> None:
    (tmp_path / "a").write_bytes(b"old")

    class Failing(files.OwnFile):
        def write(self, data: Any, /) -> int:
            self.error = error
            raise error

    def write(file: BinaryIO) -> None:
        try:
            file.write(b"x" * 100_000)
        except BaseException as found:
            raise WrappedError from found

    monkeypatch.setattr(files, "OwnFile", Failing)
    with pytest.raises(expected) as caught:
        atomic_write(tmp_path / "a", write)
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from nanogpt_cli import files
with files.temporary_folder(Path({str(tmp_path / "x")!r})) as folder, files.temporary_beside(folder) as file:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    name = f"{files.TEMPORARY_PREFIX}x-00000000.1.1-00000000"  # of another machine
    old, new = tmp_path / name, tmp_path / name.replace("x", "y", 1)
    for path in (old, new):
        path.touch()
    os.utime(old, (0, time.time() - 2 * files.LONG_AGO))
    (tmp_path / f"{files.TEMPORARY_PREFIX}theirs").symlink_to(new)
    with temporary_folder(tmp_path / "x") as live:
        remove_leftovers(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {live.name, new.name, f"{files.TEMPORARY_PREFIX}theirs"}


def test_a_name_as_long_as_can_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    atomic_write(path, lambda file: file.write(b"x"))
    assert path.read_bytes() == b"x"
