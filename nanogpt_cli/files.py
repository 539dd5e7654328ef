"""The gate for files: everything this program writes is opened, named, made durable and cleaned up here.

A file is complete or absent: written beside its target, synced, then renamed. Files that grow are opened by `open_own`,
which follows no link and truncates nothing. What a file system cannot do (sync folders, change modes) is done without.
"""

import contextlib
import errno
import io
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanogpt_cli.errors import UserError

TEMPORARY_PREFIX = ".nanogpt-tmp-"
MAKER = re.compile(r"-([0-9a-f]{8})\.(\d+)\.(\d+)-[0-9a-f]{8}")  # machine, process, its start; of a temporary name
LONG_AGO = 86400.0  # seconds: nobody on another machine still writes a file that has not changed for so long
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF)
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe under the name must not be waited for
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class DiskFullError(OSError):
    """The file system had no room for the file; whatever stood under its name before is untouched."""


def atomic_write(
    path: Path, write: Callable[[BinaryIO], object], *, before_rename: Callable[[], object] | None = None
) -> None:
    """Call `write(file)` on a new file beside `path`, sync it, rename it to `path` and sync the folder.

    A reader, also one after a crash at any instant, sees the old file or the whole new one. `before_rename` is called
    when the new file is durable and the old one still stands under its name.

    Raises:
        OSError: what the file system reports, no room as DiskFullError; `path` is untouched and named.
    """
    with disk_full_named(path), temporary_beside(path) as temporary:
        raw = OwnFile(_open(temporary, os.O_WRONLY), "w")
        try:
            with io.BufferedWriter(raw) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            raise raw.error or error from None
        if before_rename:
            before_rename()
        temporary.replace(path)
        sync_folder(path.parent)


class OwnFile(io.FileIO):
    """What every byte is written through. Keeps why a write failed: torch makes another error of it in its C++."""

    error: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:
            self.error = self.error or error
            raise


def open_own(path: Path, *, append: bool = False) -> OwnFile:
    """Open a file that grows, made if it is not there, unbuffered, at its start or for appending; nothing is truncated.

    A file that has a second name elsewhere is copied first, so that only this one changes.

    Raises:
        UserError: it is a link, or no regular file: what is written would land elsewhere.
        OSError: the system does not open it.
    """
    handle = _open(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0))
    if os.fstat(handle).st_nlink > 1:
        with os.fdopen(handle, "rb") as shared:
            atomic_write(path, lambda file: shutil.copyfileobj(shared, file, 1 << 20))
        return open_own(path, append=append)
    return OwnFile(handle, "a" if append else "r+")


def _open(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | NO_FOLLOW | NO_WAIT, 0o666)
    except OSError:
        refuse_link(path)
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is no regular file, and nothing is written to anything else. Remove it.")
    return handle


def refuse_link(path: Path) -> None:
    """Raise UserError if `path` is a symbolic link: what is written to it would land elsewhere."""
    if path.is_symlink():
        raise UserError(f"{path} is a link to {path.readlink()}, and nothing is written through links. Remove it.")


def own_folder(folder: Path) -> Path:
    """Make a folder within one of ours, if it is not there; UserError if it is a link."""
    refuse_link(folder)
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A new empty file in the folder of `path`, removed if it is still there at the end."""
    temporary = _temporary(path)
    try:
        # exclusive: it is nobody else's, and has the mode that the user's umask allows
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, removed with all in it if it still has that name at the end."""
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """A name for `path` until it is complete, which tells the process that makes it."""
    maker = f"{_machine()}.{os.getpid()}.{process_started(os.getpid())}"
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name[:40]}-{maker}-{os.urandom(4).hex()}")


def _machine() -> str:
    import socket  # with half of what --help may take
    import zlib

    return f"{zlib.crc32(socket.gethostname().encode(errors='replace')):08x}"


def process_started(pid: int) -> str:
    """When process `pid` of this machine began, in clock ticks; 0 where that cannot be told, empty if it is gone."""
    if Path("/proc/self/stat").exists():
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if state == "Z" else fields[18]  # field 22 of all
    if sys.platform != "win32":  # there, asking would end it
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
    return "0"


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders in `folder` whose makers were killed; those of live processes stay."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):  # what cannot be removed disturbs nobody
            if not _abandoned(leftover):
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _abandoned(leftover: Path) -> bool:
    found = MAKER.search(leftover.name)
    if found is None or found[1] != _machine():
        return time.time() - leftover.lstat().st_mtime > LONG_AGO
    return process_started(int(found[2])) != found[3]


def sync_file(path: Path) -> None:
    """Make durable what a library wrote to `path`, and let it be read by whom the umask allows."""
    with OwnFile(_open(path, os.O_RDWR), "r+") as file:
        os.fsync(file.fileno())
    mask = os.umask(0)
    os.umask(mask)
    with contextlib.suppress(OSError):  # where modes cannot be changed
        path.chmod(0o666 & ~mask)


@contextlib.contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Let every error of the system name a file, `path` if it names none; "no space" is raised as `DiskFullError`."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(errno.ENOSPC, "no space left on the disk", str(path)) from error
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        told = re.search(r"\(os error (\d+)\)", str(error))  # libraries in Rust, such as safetensors, tell no more
        if told is None:
            raise
        with disk_full_named(path):
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from None


def make_folder(folder: Path) -> None:
    """Make `folder` and what is missing above it, durably; it may be there already. OSError if it cannot be made."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def sync_folder(folder: Path) -> bool:
    """Make the names in `folder` durable; False where the file system does not do that for folders."""
    if os.name == "nt":
        return True  # folders cannot be opened there, and their changes are journalled
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        error.filename = str(folder)
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def free_bytes(folder: Path) -> float:
    """Bytes that are free where `folder` lies; infinite where the file system does not tell."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.inf


def user_cache() -> Path:
    """The user's cache folder for this program, created: downloads, tokenizers, results of long checks.

    NANOGPT_CACHE, else `nanogpt` in XDG_CACHE_HOME or the platform's own place.

    Raises:
        OSError: it cannot be made; says how to name another.
    """
    local = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    usual = {"win32": f"{local}/nanogpt/Cache", "darwin": "~/Library/Caches/nanogpt"}.get(
        sys.platform, "~/.cache/nanogpt"
    )
    xdg = os.environ.get("XDG_CACHE_HOME")
    folder = Path(os.environ.get("NANOGPT_CACHE") or (f"{xdg}/nanogpt" if xdg else usual)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        words = f"{error.strerror}: no place to keep downloads. NANOGPT_CACHE=DIR in front of the command names another"
        raise OSError(error.errno, words, str(folder)) from None
    return folder


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file, atomically."""
    atomic_write(path, lambda file: file.write(content))


def write_toml(path: Path, table: dict[str, Any]) -> None:
    """Write `table` as TOML, atomically."""
    import tomli_w

    write_bytes(path, tomli_w.dumps(table).encode())
