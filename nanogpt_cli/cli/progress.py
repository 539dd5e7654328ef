"""How far a longer piece of work is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from nanogpt_cli.cli import show

SILENCE = 30.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how many are done and how many there are."""
    from nanogpt_cli.runs.live import usable_terminal

    if not usable_terminal(sys.stderr):
        yield _lines(what, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, unit: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SILENCE:
            last = time.monotonic()
            show.say(f"{what}: {done:,} of {total:,} {unit}")

    return told
