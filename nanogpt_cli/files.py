"""Files that are complete or absent: written beside their target, synced, then renamed."""

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanogpt_cli.errors import NanogptError

TEMPORARY_PREFIX = ".nanogpt-tmp-"


class DiskFullError(OSError):
    """The file system had no room for the file; whatever stood under its name before is untouched."""


def atomic_write(
    path: Path, write: Callable[[BinaryIO], object], *, before_rename: Callable[[], object] | None = None
) -> None:
    """Call `write(file)` on a new file beside `path`, sync it, rename it to `path` and sync the folder.

    A reader, also one after a crash at any instant, sees the old file or the whole new one. `before_rename` is called
    when the new file is durable and the old one still stands under its name.

    Raises:
        DiskFullError: no room; `path` is untouched.
        OSError: anything else the file system reports; `path` is untouched.
    """
    with disk_full_named(path), temporary_beside(path) as temporary:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if before_rename:
            before_rename()
        temporary.replace(path)
        sync_folder(path.parent)


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A temporary file name in the folder of `path`, with the user's usual mode, removed if it is still there."""
    try:
        handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{path.name}-", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    os.close(handle)
    temporary = Path(name)
    give_usual_mode(temporary)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def give_usual_mode(path: Path) -> None:
    """Let `path` be read by whom the user's umask allows: tempfile and safetensors make private files and folders."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


@contextlib.contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Raise what a write failed of, however deep torch or safetensors buried it; "no space" as `DiskFullError`.

    The error of the operating system comes out as itself, and so does a signal that stopped the write.
    """
    handled = sys.exception()  # what is dealt with already is no cause
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        causes = [cause for cause in map(_own_kind, _causes(error, handled)) if cause is not None]
        if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
            raise DiskFullError(errno.ENOSPC, "no space left on the disk", str(path)) from error
        if not causes or causes[0] is error:
            raise
        raise causes[0] from None


def _own_kind(error: BaseException) -> OSError | NanogptError | None:
    """An error of the operating system or of ours; libraries in Rust, such as safetensors, only tell its number."""
    if isinstance(error, OSError | NanogptError):
        return error
    told = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(told[1]), os.strerror(int(told[1]))) if told else None


def _causes(error: BaseException | None, last: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not last:
        yield error
        error = error.__cause__ or error.__context__


def make_folder(folder: Path) -> None:
    """Make `folder` and what is missing above it, durably; it may be there already.

    Raises:
        OSError: it cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. A no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def user_cache() -> Path:
    """The user's cache folder for this program, created: downloads, tokenizers, results of long checks.

    NANOGPT_CACHE, else `nanogpt` in XDG_CACHE_HOME or the platform's own place.

    Raises:
        OSError: it cannot be made; says how to name another.
    """
    if own := os.environ.get("NANOGPT_CACHE"):
        folder = Path(own).expanduser()
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(xdg) / "nanogpt"
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local")).expanduser() / "nanogpt" / "Cache"
    elif sys.platform == "darwin":
        folder = Path("~/Library/Caches/nanogpt").expanduser()
    else:
        folder = Path("~/.cache/nanogpt").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        words = f"{error.strerror}: no place to keep downloads. NANOGPT_CACHE=DIR in front of the command names another"
        raise OSError(error.errno, words, str(folder)) from None
    return folder


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed process of ours left in `folder`."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink(missing_ok=True)


def write_toml(path: Path, table: dict[str, Any]) -> None:
    """Write `table` as TOML, atomically."""
    import tomli_w

    atomic_write(path, lambda file: file.write(tomli_w.dumps(table).encode()))
