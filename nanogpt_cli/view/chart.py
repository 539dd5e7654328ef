"""Losses drawn with characters, where there is no matplotlib or nothing that shows pictures.

A braille character has 2 by 4 dots; a terminal that knows only ASCII gets one star a place.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.terminal import escaped
from nanogpt_cli.view.curves import Axis, comparable_curves, loss_limits, time_unit, xy
from nanogpt_cli.view.plain import quantity

COLOURS = ("blue", "red", "green", "magenta", "cyan", "yellow")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of U+2800, by row and column
WIDEST, ROWS, MARGIN = 110, 16, 8  # characters
ENDS = 3  # characters right of the chart, for the number of each curve


class Chart:
    """Validation losses, or the training's where there are none, in all the width; UserError if a run has no losses."""

    def __init__(self, runs: Sequence[RunDirectory], axis: Axis) -> None:
        curves, self.unit = comparable_curves(runs)
        self.keys = ["val_loss" if len(one["val_loss"]) > 1 else "loss" for one in curves]
        self.lines = [xy(one, key, axis) for one, key in zip(curves, self.keys, strict=True)]
        self.names, self.axis = [escaped(run.name) for run in runs], axis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(WIDEST, options.max_width) - MARGIN - ENDS)
        across, down = (1, 1) if options.ascii_only else (2, 4)
        left, right = min(x[0] for x, _ in self.lines), max(x[-1] for x, _ in self.lines)
        low, high = loss_limits([y for _, y in self.lines])
        cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> dots, run
        ends: dict[int, list[int]] = {}  # row -> runs whose curve ends there
        for run, (x, y) in enumerate(self.lines):
            columns = [round((one - left) / ((right - left) or 1) * (width * across - 1)) for one in x]
            rows = [round((high - one) / (high - low) * (ROWS * down - 1)) for one in y]
            for column, row in _joined(list(zip(columns, rows, strict=True))):
                if 0 <= row < ROWS * down:
                    place = (row // down, column // across)
                    dot = DOTS[row % down][column % across] if down > 1 else 0
                    cells[place] = (cells.get(place, (0, run))[0] | dot, run)
            ends.setdefault(min(max(rows[-1] // down, 0), ROWS - 1), []).append(run)
        yield Text(f"loss ({self.unit})")
        for row in range(ROWS):
            label = f"{high - (row + 0.5) / ROWS * (high - low):.2f}" if row % 5 == 0 else ""
            line = Text(f"{label:>{MARGIN - 2}}{'|' if options.ascii_only else '│'} ")
            for column in range(width):
                dots, run = cells.get((row, column), (None, 0))
                mark = " " if dots is None else "*" if options.ascii_only else chr(0x2800 | dots)
                line.append(mark, COLOURS[run % len(COLOURS)])
            for run in ends.get(row, []):
                line.append(f" {run + 1}", COLOURS[run % len(COLOURS)])
            yield line
        size, unit = time_unit(right) if self.axis == "time" else (1, {"steps": "updates"}.get(self.axis, self.axis))
        first, last = quantity(left / size), f"{quantity(right / size)} {unit}"
        yield Text(" " * MARGIN + first + last.rjust(width - len(first)))
        for run, (name, key, (_, y)) in enumerate(zip(self.names, self.keys, self.lines, strict=True)):
            what = "val" if key == "val_loss" else "train"
            words = f"{run + 1} {name}: {what} {y[-1]:.4f}, lowest {min(y):.4f}"
            yield Text(" " * MARGIN + words, COLOURS[run % len(COLOURS)])


def _joined(points: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The points, and those on the straight lines between them."""
    yield points[0]
    for (x, y), (next_x, next_y) in pairwise(points):
        count = max(abs(next_x - x), abs(next_y - y))
        for i in range(1, count + 1):
            yield x + round(i * (next_x - x) / count), y + round(i * (next_y - y) / count)
