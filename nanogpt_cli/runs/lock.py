"""One writer a run: a lock the kernel releases where it works, else a file naming host, process and its start."""

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import NO_FOLLOW, NO_WAIT, open_own, process_started

LOCK = ".lock"
TRIES, PAUSE = 5, 0.1  # `holder` takes the lock for an instant; nobody should fail over that
HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


@dataclass(frozen=True)
class Holder:
    """The process that writes a run."""

    host: str
    pid: int
    started: str  # as `process_started` tells it, so that a reused process number is not taken for the holder

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def alive(self) -> bool:
        """Whether it still runs; of another machine's processes nothing is known, so they count as alive."""
        return self.host != socket.gethostname() or process_started(self.pid) == self.started


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run in `folder` against other writers; UserError names a live holder, or why it cannot be written."""
    path = folder / LOCK
    try:
        file = open_own(path)
    except OSError as error:
        raise UserError(f"{folder}: the run directory cannot be written: {error.strerror}.") from None
    with file:
        for _ in range(TRIES):
            if not _held(file.fileno(), path, exclusive=True):
                break
            time.sleep(PAUSE)
        else:
            other = _read(path)
            gone = other and other.host != socket.gethostname()
            hint = f" If that process is gone for certain, delete {typed(path)}." if gone else ""
            who = other or "another process"
            raise UserError(f"{folder} is in use by {who}. Wait for it, stop it, or start another run.{hint}")
        me = Holder(socket.gethostname(), os.getpid(), process_started(os.getpid()))
        _write(file.fileno(), json.dumps(asdict(me)).encode())
        try:
            yield
        finally:
            _write(file.fileno(), b"")


def holder(folder: Path) -> Holder | None:
    """The live process that writes the run in `folder`, or None. Changes nothing."""
    path = folder / LOCK
    other = _read(path)
    if other is None:
        return None
    with path.open("rb") as file:
        return other if _held(file.fileno(), path, exclusive=False) else None


def kernel_locks(folder: Path) -> bool:
    """Whether the kernel keeps the lock of the run in `folder`."""
    with (folder / LOCK).open("rb") as file:
        return _kernel_lock(file.fileno(), exclusive=False) is not None


def _held(file: int, path: Path, exclusive: bool) -> bool:
    """Whether somebody else holds the lock; where the kernel has such locks and nobody does, it is now ours."""
    held = _kernel_lock(file, exclusive)
    if held is None:
        other = _read(path)
        return other is not None and other.alive
    return held


if sys.platform == "win32":

    def _kernel_lock(file: int, exclusive: bool) -> bool | None:
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
            return True if error.errno in HELD else None
        return False


def _read(path: Path) -> Holder | None:
    try:
        handle = os.open(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT)
        with os.fdopen(handle, "rb") as file:
            return Holder(**json.loads(file.read(1000)))
    except (OSError, ValueError, TypeError, RecursionError):  # absent, released (empty), a link, or damaged
        return None


def _write(file: int, text: bytes) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds, only its holder has no name
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, text)
