"""How far a longer piece of work is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

import sys
import time
from typing import TYPE_CHECKING, Self

from nanogpt_cli.cli import show
from nanogpt_cli.progress import Progress
from nanogpt_cli.terminal import escaped, quiet

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SILENCE = 30.0  # seconds between two lines where there is no terminal


class ProgressBar(Progress):
    """Shown from its first `at` on, until the context ends."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._what: str | None = None  # nothing has begun
        self._told = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        show.say(text)

    def at(self, what: str, done: float, total: float, text: str = "") -> None:
        """Draw how far `what` is; another `what` than before starts anew."""
        what, text = escaped(what), escaped(text)
        if self._what is None:
            self._bar = _bar()
        if what != self._what:
            self._what, self._told = what, time.monotonic()
            if self._bar is not None:
                for task in self._bar.task_ids:  # the speed of what came before says nothing about this
                    self._bar.remove_task(task)
                self._bar.add_task(what, text=text)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)
        elif time.monotonic() - self._told >= SILENCE:
            self._told = time.monotonic()
            show.say(f"{what}: {done / max(1, total):.1%}{', ' * bool(text)}{text}")


def _bar() -> "Bar | None":
    from nanogpt_cli.view.live import usable_terminal

    if quiet() or not usable_terminal(sys.stderr) or not show.main_process():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    words, told = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
    columns = words, BarColumn(), TaskProgressColumn(), told, TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
    bar.start()
    return bar
