"""Faults that a process inflicts on itself: its dealings with files in its working folder are counted and may go wrong.

Nothing of this is known to the program: the functions of `os` and the file objects it gets are replaced around it.
"""

# the functions below pathlib are what is replaced here
# ruff: noqa: PTH100, PTH110, PTH116, PTH118, PTH119, PTH120

import errno
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanogpt_cli.files import OwnFile

When = Literal["before", "half", "after"]
TEMPORARY = re.compile(r"\.nanogpt-tmp-([^/]+)-[0-9a-f]{8}\.\d+\.\d+-[0-9a-f]{8}")

real_write, real_kill = os.write, os.kill


class Event(NamedTuple):
    """One dealing with the disk; a temporary file is called by its target with a ~."""

    kind: str  # create, write, fsync, rename, link, unlink, mkdir, rmdir, truncate
    name: str  # relative to the working folder; of a rename or link the new name
    inode: int = 0


Act = Callable[[Event, When], None]


class Tap:
    """Calls `act` around every event of this process that concerns a file under `folder`."""

    def __init__(self, folder: Path, act: Act) -> None:
        self.folder, self.act = os.path.realpath(folder), act
        self.names: dict[int, str] = {}  # open files and folders by number
        self.failed: dict[int, OSError] = {}  # by inode: what the next write meets
        self._install()

    def name(self, path: Any) -> str | None:
        """What an event calls a path; None outside the folder."""
        full = os.path.abspath(os.fsdecode(path))
        inside = os.path.relpath(
            os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full)), self.folder
        )
        return None if inside.startswith("..") else TEMPORARY.sub(r"\1~", inside)

    @contextmanager
    def around(self, kind: str, name: str | None, inode: int = 0) -> Iterator[None]:
        if name is None:
            yield
            return
        self.act(Event(kind, name, inode), "before")
        yield
        self.act(Event(kind, name, inode), "after")

    def _install(self) -> None:
        for kind, functions in {
            "rename": ("rename", "replace"),
            "link": ("link",),
            "unlink": ("unlink", "remove"),
            "mkdir": ("mkdir",),
            "rmdir": ("rmdir",),
            "truncate": ("truncate",),
        }.items():
            for function in functions:
                setattr(os, function, self._named(kind, getattr(os, function)))
        os.open, os.fsync, os.write, os.ftruncate = (
            self._open(os.open),
            self._fsync(os.fsync),
            self._write(os.write),
            self._ftruncate(os.ftruncate),
        )
        io.open = self._open_file(io.open)

    def _named(self, kind: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if more.get("dir_fd") is not None:  # shutil.rmtree
                name = os.path.join(self.names.get(more["dir_fd"], ".."), os.fsdecode(arguments[0]))
                name = None if name.startswith("..") else TEMPORARY.sub(r"\1~", name)
            else:
                name = self.name(arguments[1 if kind in ("rename", "link") else 0])
            inode = 0
            if name is not None and kind in ("rename", "link", "truncate"):
                inode = os.stat(arguments[0]).st_ino
            with self.around(kind, name, inode):
                return real(*arguments, **more)

        return call

    def _open(self, real: Any) -> Any:
        def call(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
            if more.get("dir_fd") is not None:
                parent = self.names.get(more["dir_fd"], "..")
                name: str | None = os.path.join(parent, os.fsdecode(path))
                name = None if parent.startswith("..") else name
            else:
                name = self.name(path)
            made = flags & os.O_CREAT and not os.path.lexists(path)
            with self.around("create", name if made else None):
                handle: int = real(path, flags, *arguments, **more)
            self.names[handle] = name or ".."
            return handle

        return call

    def _known(self, handle: int) -> tuple[str | None, int]:
        name = self.names.get(handle, "..")
        return (None if name.startswith("..") else name), os.fstat(handle).st_ino

    def _fsync(self, real: Any) -> Any:
        def call(file: Any) -> None:
            with self.around("fsync", *self._known(file if isinstance(file, int) else file.fileno())):
                real(file)

        return call

    def _ftruncate(self, real: Any) -> Any:
        def call(handle: int, length: int) -> None:
            with self.around("truncate", *self._known(handle)):
                real(handle, length)

        return call

    def _write(self, real: Any) -> Any:
        def call(handle: int, data: Any) -> int:
            name, inode = self._known(handle)
            if name is None:
                return int(real(handle, data))
            return self.write(Event("write", name, inode), lambda part: int(real(handle, part)), data)

        return call

    def write(self, event: Event, real: Callable[[Any], int], data: Any) -> int:
        """A write in two halves, so that there is something between them."""
        if event.inode in self.failed:
            raise self.failed.pop(event.inode)
        self.act(event, "before")
        view = memoryview(data).cast("B")
        done = real(view[: len(view) // 2])
        try:
            self.act(event, "half")
        except OSError as error:  # as the system does it: what was written counts, and the next write fails
            self.failed[event.inode] = error
            return done
        if done == len(view) // 2:
            done += real(view[done:])
        self.act(event, "after")
        return done

    def _own_file(self) -> type[io.FileIO]:
        """What the program writes through, and what other libraries' files become."""
        tap = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                name, inode = tap._known(self.fileno())
                if name is None:
                    return super().write(data)
                return tap.write(Event("write", name, inode), super().write, data)

            def truncate(self, size: int | None = None) -> int:
                with tap.around("truncate", *tap._known(self.fileno())):
                    return super().truncate(size)

        return Raw

    def _open_file(self, real: Any) -> Any:
        tap, Raw = self, self._own_file()
        OwnFile.__bases__ = (Raw,)

        def call(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            name = tap.name(file) if not isinstance(file, int) else None
            if name is None or not set(mode) & set("wax+"):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            with tap.around("create", name if not os.path.exists(file) else None):
                raw = Raw(file, mode.replace("b", "").replace("t", ""))
            tap.names[raw.fileno()] = name
            if "b" in mode and buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return call


@dataclass(frozen=True)
class At:
    """A place in the life of a process: the nth event of this kind and name, before, in the middle of or after it."""

    kind: str = ""  # empty: any
    name: str = ""  # the end of the event's name; empty: any
    nth: int = 1
    when: When = "before"

    def __str__(self) -> str:
        return f"{self.when} {self.kind or 'event'} {self.nth} of {self.name or 'any file'}"


@dataclass(frozen=True)
class Fault:
    """What happens at a place, in the process that is to suffer it; `times` counts on from there."""

    at: At
    times: int = 1

    def install(self, folder: Path) -> None:
        """Arm it."""
        seen = 0

        def act(event: Event, when: When) -> None:
            nonlocal seen
            if self.at.kind not in ("", event.kind) or not event.name.endswith(self.at.name):
                return
            seen += when == "before"
            # only writes have a middle
            if self.at.nth <= seen < self.at.nth + self.times and when == (
                "after" if self.at.when == "half" and event.kind != "write" else self.at.when
            ):
                self.strike(event)

        Tap(folder, act)

    def strike(self, event: Event) -> None:
        """What happens."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.at)


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL."""

    def strike(self, event: Event) -> None:
        real_kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Signal(Fault):
    """One signal or several, one right after the other."""

    signals: tuple[int, ...] = (signal.SIGTERM,)

    def strike(self, event: Event) -> None:
        for signum in self.signals:
            real_kill(os.getpid(), signum)


@dataclass(frozen=True)
class Fail(Fault):
    """The system reports an error."""

    number: int = errno.EIO

    def strike(self, event: Event) -> None:
        by_name = [event.name] if event.kind not in ("write", "fsync", "truncate") else []  # as the system tells it
        raise OSError(self.number, os.strerror(self.number), *by_name)


@dataclass(frozen=True)
class Record:
    """Nothing goes wrong: events are written down, one a line, in the file `target`."""

    target: Path

    def install(self, folder: Path) -> None:
        """Begin."""
        handle = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def act(event: Event, when: When) -> None:
            if when == "after":
                real_write(handle, f"{event.kind}\t{event.name}\t{event.inode}\n".encode())

        Tap(folder, act)

    def events(self) -> list[Event]:
        """What was recorded."""
        rows = [line.split("\t") for line in self.target.read_text().splitlines()]
        return [Event(kind, name, int(inode)) for kind, name, inode in rows]
