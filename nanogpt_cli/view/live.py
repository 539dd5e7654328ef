"""The live view: one calm panel at the bottom of a terminal, redrawn at most four times a second."""

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanogpt_cli.terminal import escaped, give_up
from nanogpt_cli.view.plain import EvalReport, PlainView, Start, StepReport, duration, mfu, number, peak, quantity

REDRAW_SECONDS = 0.5  # one redraw costs 2 ms
WIDEST = 100
SMOOTHING = 0.95
HTML = '<pre style="line-height: 1.2; white-space: pre">{code}</pre>'
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~+=*#"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def usable_terminal(stream: TextIO) -> bool:
    """Whether a panel can live on `stream`: a real terminal that can move its cursor, whatever FORCE_COLOR says."""
    console = Console(file=stream)
    return stream.isatty() and console.is_terminal and console.is_interactive and not console.is_dumb_terminal


class LiveView(PlainView):
    """Draws the panel, with what is said above it; the lines of a plain view go to the log file alone."""

    def __init__(
        self, stream: TextIO, log_file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(None, log_file, clock)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | Display | None = None
        self._drawn_at, self._width = -math.inf, 0
        self._loss = History()
        self._report: StepReport | None = None
        self._evaluation: EvalReport | None = None
        self._best = ""
        self._sample = "-"
        self._saved: tuple[int, float] | None = None
        self._doing: str | None = None

    def start(self, start: Start) -> None:
        super().start(start)
        self._best = f"  best {start.best_loss:.4f}" if start.best_loss is not None else ""
        self._live = self._display()
        self._draw(now=True)

    def _display(self) -> "Live | Display":
        # standard output is left alone: it carries results and may be a pipe
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        live.start()
        self._console.show_cursor(True)  # so that even a killed process leaves a usable terminal
        return live

    def step(self, report: StepReport) -> None:
        self._report, self._doing = report, None
        if report.loss is not None:
            self._loss.add(report.loss)
        super().step(report)
        self._draw()

    def evaluating(self, done: int, total: int) -> None:
        self._doing = f"evaluating, {done} of {total} batches"
        super().evaluating(done, total)
        self._draw()

    def evaluated(self, report: EvalReport) -> None:
        self._evaluation, self._doing = report, None
        if report.best:
            self._best = f"  best {report.val_loss:.4f} at step {report.step:,}"
        super().evaluated(report)
        self._draw(now=True)

    def sampled(self, step: int, text: str) -> None:
        line = next((line for line in text.splitlines() if line.strip()), "")
        self._sample = f"{escaped(line)}  (step {step:,})"
        self._draw(now=True)

    def saved(self, step: int, path: Path, seconds: float) -> None:
        self._saved = (step, self.clock())
        super().saved(step, path, seconds)
        self._draw(now=True)

    def say(self, text: str) -> None:
        super().say(text)
        with self._guarded():
            self._console.print(escaped(text))

    def close(self) -> None:
        self._doing = ""
        self._draw(now=True)
        self._stop()
        super().close()

    def _draw(self, now: bool = False) -> None:
        due = now or self.clock() - self._drawn_at >= REDRAW_SECONDS
        if (live := self._live) is None or not due or self._in_background():
            return
        self._drawn_at = self.clock()
        narrower, self._width = self._console.width < self._width, min(self._console.width, WIDEST)
        with self._guarded():
            if narrower:
                self._console.clear()  # the terminal has folded the wider panel, nobody knows over how many rows
            live.update(self._panel(), refresh=True)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the terminal is gone; the log file has everything
            self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except OSError:
                give_up(self._console.file)  # type: ignore[arg-type]

    def _in_background(self) -> bool:
        """Whether the shell runs other work in front, whose screen must not be drawn over."""
        try:
            return os.tcgetpgrp(self._console.file.fileno()) != os.getpgrp()
        except (OSError, AttributeError):  # no job control here
            return False

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(style="dim")
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for label, value in self._rows():
            grid.add_row(label, value)
        doing = "Ctrl-C saves and stops" if self._doing is None else self._doing
        return Panel(
            grid,
            title=Text(escaped(f"{self._start.run_name} on {self._start.device}"), style="bold"),
            title_align="left",
            subtitle=Text(doing) if doing else None,
            subtitle_align="right",
            border_style="dim",
            width=self._width,
        )

    def _rows(self) -> Iterator[tuple[str, RenderableType]]:
        """Label and value, always nine; no value needs more than 48 columns, so that 60 show everything."""
        start, report, evaluation = self._start, self._report, self._evaluation
        step, last = report.step if report else start.first_step, start.max_iters
        yield "step", _beside(ProgressBar(total=last, completed=step), f"{step:,} / {last:,}  {step / last:4.0%}")
        now = f"  now {number(report.loss, '.4f')}" if report else ""
        yield "loss", _beside(self._loss, Text.assemble((number(self._loss.smoothed, ".4f"), "bold"), now))
        losses = f"{evaluation.val_loss:.4f}  train {evaluation.train_loss:.4f}" if evaluation else "-"
        yield "val", losses + self._best
        yield from self._step_rows(report) if report else ((label, "-") for label in ("lr", "speed", "MFU"))
        skipped = f"   {report.skipped} updates skipped" if report and report.skipped else ""
        yield "time", f"{duration(self.clock() - self._began)} elapsed   {duration(self.left(step))} left{skipped}"
        yield "writes", Text(self._sample)
        yield "saved", f"step {self._saved[0]:,}, {duration(self.clock() - self._saved[1])} ago" if self._saved else "-"

    def _step_rows(self, report: StepReport) -> Iterator[tuple[str, RenderableType]]:
        yield "lr", f"{report.lr:.2e}   grad norm {number(report.grad_norm, '.2f')}   epoch {report.epoch:.2f}"
        step_time = f"{report.step_ms:.{1 if report.step_ms < 1000 else 0}f} ms/step"
        yield "speed", f"{quantity(report.tokens_per_s)} tokens/s   {step_time}   data wait {report.wait_share:.1%}"
        of = f" of {peak(self._start.peak_tflops)} {self._start.peak_source}" if self._start.peak_tflops else ""
        memory = "n/a" if report.memory_gib is None else f"{report.memory_gib:.3g} GiB"
        yield "MFU", f"{mfu(report, self._start)}{of}   memory {memory}"


def _beside(wide: RenderableType, text: RenderableType) -> RenderableType:
    """`text` at the right, and `wide` in all the room that is left of it."""
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(wide, text)
    return row


class NotebookView(LiveView):
    """The panel as one display of a notebook, with what is said under it."""

    def __init__(self, log_file: Path | None = None) -> None:
        super().__init__(io.StringIO(), log_file)

    def _display(self) -> "Display":
        return Display()

    def say(self, text: str) -> None:
        PlainView.say(self, text)
        if isinstance(self._live, Display):
            self._live.said.append(escaped(text))
            self._draw(now=True)


class Display:
    """What a notebook has for Rich's Live: one output, replaced in place."""

    def __init__(self) -> None:
        from IPython.display import display

        self.said: list[str] = []
        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def update(self, panel: RenderableType, *, refresh: bool) -> None:
        console = Console(file=io.StringIO(), record=True, width=WIDEST, force_jupyter=False)
        console.print(panel, *map(Text, self.said))
        html = console.export_html(inline_styles=True, clear=False, code_format=HTML)
        self._handle.update({"text/html": html, "text/plain": console.export_text()}, raw=True)

    def stop(self) -> None:
        """It stays as it is."""


class History:
    """The losses of a whole run in at most 256 numbers: when they are full, neighbours are averaged.

    It draws itself as wide as there is room.
    """

    LIMIT = 256

    def __init__(self) -> None:
        self.points: list[float] = []
        self.smoothed: float | None = None
        self._stride, self._sum, self._count = 1, 0.0, 0
        self._weight = 0.0  # of the smoothed value, so that the first losses are not pulled towards zero

    def add(self, loss: float) -> None:
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        share = (1 - SMOOTHING) / self._weight
        self.smoothed = loss if self.smoothed is None else self.smoothed + share * (loss - self.smoothed)
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count == self._stride:
            self.points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.points) == self.LIMIT:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._stride *= 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.bars(options.max_width, ASCII_BARS if options.ascii_only else BARS), style="cyan")

    def bars(self, width: int, levels: str) -> str:
        """The points as at most `width` bars, the highest tenth cut off: a run starts so high."""
        count = min(width, len(self.points))
        if not count:
            return ""
        means = [float(part.mean()) for part in np.array_split(self.points, count)]
        low, high, top = min(means), sorted(means)[int(0.9 * (count - 1))], len(levels) - 1
        span = max(high - low, 1e-12)
        return "".join(levels[min(top, int((mean - low) / span * top + 0.5))] for mean in means)
