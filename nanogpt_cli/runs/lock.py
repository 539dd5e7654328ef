"""One writer a run: a lock the kernel releases where it works, else a file naming host, process and its start."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nanogpt_cli.errors import UserError

LOCK_NAME = ".lock"
_TRIES, _PAUSE = 5, 0.1  # `holder` takes the lock for an instant; nobody should fail over that
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


@dataclass(frozen=True)
class Holder:
    """The process that writes a run."""

    host: str
    pid: int
    started: str  # as the operating system tells it, so that a reused process number is not taken for the holder

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else "another process"

    @property
    def here(self) -> bool:
        """Whether it ran on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it still runs; of another machine's processes nothing is known, so they count as alive."""
        return not self.here or _started(self.pid) == self.started


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run in `folder` against other writers.

    Raises:
        UserError: another live process holds it (named), or the folder cannot be written.
    """
    path = folder / LOCK_NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{folder}: the run directory cannot be written: {error.strerror}.") from None
    try:
        _acquire(file, path, folder)
        _write(file, json.dumps(asdict(_me())).encode())
        try:
            yield
        finally:
            _write(file, b"")
    finally:
        os.close(file)  # releases the kernel's lock


def _acquire(file: int, path: Path, folder: Path) -> None:
    for attempt in range(_TRIES):
        held = _kernel_lock(file, exclusive=True)
        if held is None:  # this file system has no such locks
            other = _read(path)
            held = other is not None and other.alive
        if not held:
            return
        if attempt + 1 < _TRIES:
            time.sleep(_PAUSE)
    other = _read(path) or Holder("", 0, "")
    hint = "" if other.here or not other.host else f" If that process is gone for certain, delete {path}."
    raise UserError(f"{folder} is in use by {other}. Wait for it, stop it, or start another run.{hint}")


def holder(folder: Path) -> Holder | None:
    """The live process that writes the run in `folder`, or None. Changes nothing."""
    path = folder / LOCK_NAME
    other = _read(path)
    if other is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return other if other.alive else None
    try:
        held = _kernel_lock(file, exclusive=False)
    finally:
        os.close(file)
    if held is None:
        held = other.alive
    return other if held else None


if sys.platform == "win32":

    def _kernel_lock(file: int, exclusive: bool) -> bool | None:
        """Whether somebody else holds the lock; else it is now ours."""
        import msvcrt

        os.lseek(file, 1 << 20, os.SEEK_SET)  # locked bytes cannot be read: take one beyond the text
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return True
        return False

else:

    def _kernel_lock(file: int, exclusive: bool) -> bool | None:
        """Whether somebody else holds the lock; else it is now ours. None where locks do not work."""
        import fcntl

        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno in _HELD else None
        return False


def _me() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), _started(os.getpid()))


def _started(pid: int) -> str:
    """When process `pid` of this machine began; empty if there is none."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[19]  # field 22: clock ticks since boot
        except OSError:
            return ""
    if sys.platform == "win32":
        return "unknown"  # the kernel's lock is all there is
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # absent, released (empty) or damaged
        return None


def _write(file: int, text: bytes) -> None:
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text)
