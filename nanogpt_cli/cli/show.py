"""What commands show: plans and tables for people, JSON for programs. Rich is imported when something is shown."""

import codecs
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nanogpt_cli.errors import UserError
from nanogpt_cli.terminal import COMMANDS, escaped, for_stream, give_up, quiet

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def main_process() -> bool:
    """Whether this process speaks: of several, only the first does."""
    from nanogpt_cli.machine.rank_env import read_rank_env

    try:
        return read_rank_env().rank == 0
    except UserError:  # variables that make no sense are for commands that use several processes to refuse
        return True


def say(text: str = "") -> None:
    """A line of status, to stderr."""
    if main_process() and not quiet():
        try:
            print(escaped(text), file=sys.stderr, flush=True)
        except OSError:  # a closed pipe, or a full disk
            give_up(sys.stderr)


def notes(texts: Iterable[str]) -> None:
    """What is worth knowing, a line each, to stderr."""
    for text in texts:
        say(f"note: {text}")


def warn(text: str) -> None:
    """A line that should not be missed, to stderr."""
    if main_process():
        from rich.text import Text

        draw(Text.assemble(("warning:", "bold yellow"), f" {escaped(text)}"), stderr=True, soft_wrap=True)


def stream(text: str) -> None:
    """A piece of a result as soon as it is there, to stdout."""
    sys.stdout.write(for_stream(text, sys.stdout))
    sys.stdout.flush()


def document(data: Any) -> None:
    """One JSON document on stdout; what is not known or not finite is null, and no character is lost."""
    narrow = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
    text = json.dumps(_finite(data), indent=2, ensure_ascii=narrow, allow_nan=False)
    print(COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(data: Any) -> Any:
    """The same with None for numbers that JSON does not have, such as the perplexity of a diverged model."""
    match data:
        case dict():
            return {key: _finite(value) for key, value in data.items()}
        case list() | tuple():
            return [_finite(value) for value in data]
        case float() if not math.isfinite(data):
            return None
    return data


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure with its unit, or n/a."""
    return "n/a" if value is None else f"{value:{form}}{unit}"


def groups(titled: Iterable[tuple[str, Iterable[Sequence[str]]]], *, stderr: bool) -> None:
    """The parts of a report, each a title over its rows."""
    for title, lines in titled:
        draw(escaped(title), stderr=stderr, style="bold")
        rows([(f"  {label}", *others) for label, *others in lines], stderr=stderr)


def rows(lines: Iterable[Sequence[str]], *, stderr: bool) -> None:
    """Rows of (label, value, reason): a plan, or a part of a report."""
    if stderr and quiet():
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="cyan", no_wrap=True, min_width=14)
    table.add_column(overflow="fold")  # a path that is too long is broken, not cut
    table.add_column(style="dim", overflow="fold")
    for line in lines:
        table.add_row(*map(escaped, line))
    draw(table, stderr=stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """A table on stdout; the first `left` columns are text, the others numbers."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        grid.add_column(name, justify="left" if place < left else "right", no_wrap=place == 0)
    for row in rows:
        grid.add_row(*map(escaped, row))
    draw(grid)


def draw(what: "RenderableType", *, stderr: bool = False, **how: Any) -> None:
    """Something that draws itself."""
    try:
        _console(stderr=stderr).print(what, **how)
    except OSError:
        if not stderr:
            raise
        give_up(sys.stderr)  # nobody listens any more: that ends no work


def _console(*, stderr: bool) -> "Console":
    """A terminal is used in its width; what goes elsewhere is not cut at 80 columns."""
    from rich.console import Console

    class OurConsole(Console):
        """A closed pipe is the program's to handle, not Rich's, which would exit with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    return OurConsole(file=stream, width=None if stream.isatty() else 160, highlight=False, markup=False, emoji=False)
