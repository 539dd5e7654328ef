"""How far a longer piece of work is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from nanogpt_cli.cli import show

SILENCE = 30.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[float, str], None]]:
    """A function to call with the share that is done, 0 to 1, and with what is done so far, in words."""
    from nanogpt_cli.view.live import usable_terminal

    if not usable_terminal(sys.stderr):
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(TextColumn(what), *columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=1.0, text="")
        yield lambda share, text: bar.update(task, completed=share, text=text)


@contextlib.contextmanager
def counted(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """The same for a function to call with how many are done and how many there are."""
    with progress(what) as told:
        yield lambda done, total: told(done / max(1, total), f"{done:,} of {total:,} {unit}")


class Preparing:
    """How far the preparation of a data set is; a context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._told: Callable[[float, str], None] | None = None  # from the first share on

    def __enter__(self) -> "Preparing":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        show.say(text)

    def at(self, share: float, documents: int, text_bytes: int, tokens: int) -> None:
        """Totals so far."""
        self._told = self._told or self._stack.enter_context(progress("preparing"))
        self._told(share, f"{documents:,} documents, {text_bytes / 1e6:,.0f} MB, {tokens:,} tokens")


def _lines(what: str) -> Callable[[float, str], None]:
    last = time.monotonic()

    def told(share: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SILENCE:
            last = time.monotonic()
            show.say(f"{what}: {share:.1%}, {text}")

    return told
