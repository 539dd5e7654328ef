"""What is shown while a run trains: the protocol the loop speaks to, plain lines, and silence."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nanogpt_cli.files import OwnFile, open_own, own_folder
from nanogpt_cli.terminal import escaped, give_up
from nanogpt_cli.view.hints import OverfitWatch, first_loss_hint

LONGEST_SILENCE = 30.0  # seconds


@dataclass(frozen=True)
class Start:
    """What a view has to know before the first update."""

    run_name: str
    first_step: int  # updates completed before this start
    max_iters: int
    tokens_per_step: int
    vocab_size: int
    device: str
    peak_tflops: float | None  # of one device
    peak_source: str  # "measured", "table" or "given"
    best_loss: float | None


@dataclass(frozen=True)
class StepReport:
    """One completed update, as far as the host can know it without waiting for the device."""

    step: int
    loss: float | None  # the newest update's own
    window_loss: float | None  # mean since the last log step; set at log steps only
    lr: float
    grad_norm: float | None
    step_ms: float
    tokens_per_s: float  # over all ranks, step time only
    mfu: float | None  # share of one device's peak; None until measured
    tokens: int
    epoch: float
    time_s: float
    skipped: int
    wait_share: float
    memory_gib: float | None


@dataclass(frozen=True)
class EvalReport:
    step: int
    val_loss: float
    train_loss: float
    best: bool


class View:
    """What the training loop tells whoever watches. This one is silent: ranks but the first show nothing.

    Every call is cheap, and none of them raises because a terminal was lost.
    """

    def start(self, start: Start) -> None:
        """Training begins."""

    def step(self, report: StepReport) -> None:
        """An update is complete."""

    def evaluating(self, done: int, total: int) -> None:
        """An evaluation goes on: so many of its batches are done."""

    def evaluated(self, report: EvalReport) -> None:
        """An evaluation is complete."""

    def sampled(self, step: int, text: str) -> None:
        """The model wrote a sample after so many updates."""

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """A checkpoint is durable; writing it took so long."""

    def say(self, text: str) -> None:
        """Something to read."""

    def warn(self, text: str) -> None:
        """Something to act on."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainView(View):
    """One line of fixed order and width a log interval, and at least one every 30 s; no escape codes.

    Lines go to a stream and a log file. Neither a closed pipe nor a lost terminal nor a full disk ends a training.
    """

    def __init__(
        self, stream: TextIO | None, log_file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self._stream = clock, stream
        self._log: OwnFile | None = None
        if log_file is not None:
            own_folder(log_file.parent)
            self._log = open_own(log_file, append=True)
        self._watch = OverfitWatch()
        self._written = -math.inf  # when

    def start(self, start: Start) -> None:
        self._start, self._began = start, self.clock()
        self._first: tuple[int, float] | None = None  # update and when: it may hold a compilation
        if start.peak_tflops is not None:
            of = f"{peak(start.peak_tflops)} ({start.peak_source})"
            self._line(f"mfu is one device's share of {of}; tok/s is over all ranks")

    def step(self, report: StepReport) -> None:
        self._first = self._first or (report.step, self.clock())
        if report.step == 1 and report.loss is not None:
            self.warn(first_loss_hint(report.loss, self._start.vocab_size))
        if report.window_loss is None and not self._silent_for_long():
            return
        loss = report.window_loss if report.window_loss is not None else report.loss
        fields = [
            self._counter(report.step),
            f"loss {number(loss, '7.4f')}",
            f"lr {report.lr:8.2e}",
            f"norm {number(report.grad_norm, '6.2f')}",
            f"{report.step_ms:7.1f} ms",
            f"{quantity(report.tokens_per_s):>6} tok/s",
            f"mfu {mfu(report, self._start):>6}",
            f"left {duration(self.left(report.step)):>7}",
            *([f"skipped {report.skipped}"] if report.skipped else []),
        ]
        self._line("  ".join(fields))

    def evaluating(self, done: int, total: int) -> None:
        if self._silent_for_long():
            self._line(f"evaluating, {done} of {total} batches")

    def evaluated(self, report: EvalReport) -> None:
        losses = f"val  {report.val_loss:7.4f}  train {report.train_loss:7.4f}"  # under those of a step
        self._line(f"{self._counter(report.step)}  {losses}{'  best so far' * report.best}")
        self.warn(self._watch.evaluated(report.step, report.val_loss, report.train_loss))

    def saved(self, step: int, path: Path, seconds: float) -> None:
        self._line(f"saved step {step:,} in {path} ({seconds:.1f} s)")

    def say(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str | None) -> None:
        if text:
            self.say(f"note: {text}")

    def close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def left(self, step: int) -> float | None:
        """Seconds until the last update by the wall clock, evaluations and saves included; None: not yet known."""
        if self._first is None or step <= self._first[0]:
            return None
        first, began = self._first
        return (self.clock() - began) / (step - first) * (self._start.max_iters - step)

    def _counter(self, step: int) -> str:
        """Step of steps, as wide for the first as for the last."""
        last = str(self._start.max_iters)
        return f"step {step:{len(last)}}/{last}"

    def _silent_for_long(self) -> bool:
        return self.clock() - self._written >= LONGEST_SILENCE

    def _line(self, text: str) -> None:
        self._written, text = self.clock(), escaped(text)
        if self._stream is not None:
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except OSError:
                give_up(self._stream)
                self._stream = None
        if self._log is not None:
            with contextlib.suppress(OSError):  # there may be room again for the next line
                self._log.write(f"{text}\n".encode(errors="replace"))


def number(value: float | None, form: str) -> str:
    """A number, or a dash of the same width."""
    return "-".rjust(int(form.split(".")[0] or 1)) if value is None else format(value, form)


def mfu(report: StepReport, start: Start) -> str:
    """A percentage, - until it is measured, n/a without a peak."""
    if start.peak_tflops is None:
        return "n/a"
    return "-" if report.mfu is None or report.mfu < 0 else f"{report.mfu:.1%}"


def peak(tflops: float) -> str:
    return f"{tflops * 1000:.0f} GFLOP/s" if tflops < 1 else f"{tflops:.4g} TFLOP/s"


def quantity(value: float) -> str:
    """Four digits at most: 950, 16.3k, 1.16M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """A time in its two largest units: 52s, 1m 24s, 3h 05m, 2d 04h."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // small:02d}{small_unit}"
    return f"{whole}s"
