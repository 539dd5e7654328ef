"""Signals that end a run after saving: the first is noted and obeyed at the next border, the second at once."""

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from nanogpt_cli.errors import StoppedError

HANDLED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # the last two: SLURM's usual warnings


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give stop signals to `handler`. One that was ignored before, such as SIGHUP under nohup, stays ignored."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in HANDLED:
            signum = getattr(signal, name, None)
            if signum is not None and signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Leave the loop at this border and save."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """While entered, remembers a stop signal instead of dying from it.

    `announce` is called with the signal's name the moment the first one arrives; a second one raises `StoppedError`
    out of whatever is running, and a third one kills.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.signum: int | None = None
        self._handling = handling(self._arrived)
        # the handler may have interrupted a print, so another thread tells; it waits already, since one that is being
        # started when the next signal comes is left half made, and a simple queue may be put to in a handler
        self._arrivals: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._announcing = threading.Thread(target=self._announce, daemon=True)

    def check(self) -> None:
        """Raise `StopRequested` if a signal has arrived."""
        if self.signum is not None:
            raise StopRequested(self.signum)

    def __enter__(self) -> "StopSignals":
        self._announcing.start()
        # a second signal may come while Python calls back, say for an object that goes: what is raised there is only
        # printed, and the first signal is obeyed all the same
        self._tell_unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._handling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handling.__exit__(None, None, None)
        sys.unraisablehook = self._tell_unraisable
        self._arrivals.put(None)
        self._announcing.join(timeout=1.0)  # who listens may be closed soon

    def _unraisable(self, found: "sys.UnraisableHookArgs") -> None:
        if not isinstance(found.exc_value, StoppedError):
            self._tell_unraisable(found)

    def _announce(self) -> None:
        while (name := self._arrivals.get()) is not None:
            self.announce(name)

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            signal.signal(signum, signal.SIG_DFL)  # should the way out hang
            stopped = StoppedError("Stopped at once by a second signal; what was saved before stays whole.", signum)
            stopped.shared = False  # no other rank need have it
            raise stopped
        self.signum = signum
        self._arrivals.put(signal.Signals(signum).name)
