"""What a run shows: plain lines anywhere, a panel on a terminal, and never a run lost over either."""

import io
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_cli.files import OwnFile
from nanogpt_cli.view import make_view
from nanogpt_cli.view.hints import OverfitWatch, first_loss_hint
from nanogpt_cli.view.live import History, LiveView, usable_terminal
from nanogpt_cli.view.plain import (
    EvalReport,
    PlainView,
    Start,
    StepReport,
    View,
    duration,
    peak,
    quantity,
)

START = Start("shakespeare-char", 0, 2000, 768, 65, "cpu", 0.162, "measured", None)
FIRST = StepReport(1, 4.2, None, 1e-3, 0.7, 47.1, 16300.0, None, 768, 0.001, 0.05, 0, 0.003, 0.83)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def no_room(*_: Any) -> int:
    raise OSError(28, "No space left on device")


class Clock:
    """A time that passes only when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Says that it is one, and counts what is written at once."""

    writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)

    def screen(self) -> list[str]:
        """The lines of the last panel."""
        lines = ESCAPE.sub("", self.getvalue()).replace("\r", "\n").split("\n")
        top = max(number for number, line in enumerate(lines) if line.startswith("╭"))
        return [line for line in lines[top:] if line][:10]


class Broken(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def plain(clock: Clock, log_file: Path | None = None) -> tuple[PlainView, io.StringIO]:
    stream = io.StringIO()
    view = PlainView(stream, log_file, clock)
    view.start(START)
    return view, stream


def reports(count: int, every: int = 10) -> Iterator[StepReport]:
    for step in range(1, count + 1):
        loss = 1.5 + 2.7 * math.exp(-step / 200)
        yield replace(
            FIRST,
            step=step,
            loss=loss,
            window_loss=loss if step % every == 0 else None,
            mfu=None if step < 25 else 0.213,
            grad_norm=None if step < 15 else 0.5 + step,
        )


class TestPlain:
    def test_one_line_a_log_interval_of_fixed_order_and_width(self, clock: Clock) -> None:
        view, stream = plain(clock)
        for report in reports(100):
            clock.now += 0.05
            view.step(report)
        lines = stream.getvalue().splitlines()[1:]
        assert [int(line.split("/")[0][4:]) for line in lines] == list(range(10, 101, 10))
        assert {len(line) for line in lines} == {len(lines[0])}
        assert lines[0] == (
            "step   10/2000  loss  4.0683  lr 1.00e-03  norm      -     47.1 ms   16.3k tok/s  mfu      -  left  1m 39s"
        )
        assert "mfu  21.3%" in lines[2]

    def test_mfu_is_a_dash_until_measured_and_never_negative_or_zero_on_a_cpu(self, clock: Clock) -> None:
        view, stream = plain(clock)
        for report in reports(10, every=1):
            view.step(replace(report, mfu=-1.0 if report.step == 5 else None))
        lines = stream.getvalue().splitlines()[1:]
        assert len(lines) == 10
        assert all("mfu      -  " in line for line in lines)
        assert "one device's share of 162 GFLOP/s (measured); tok/s is over all ranks" in stream.getvalue()

    def test_without_a_peak_it_is_not_available(self, clock: Clock) -> None:
        stream = io.StringIO()
        view = PlainView(stream, None, clock)
        view.start(replace(START, peak_tflops=None))
        view.step(replace(FIRST, window_loss=4.2, mfu=None))
        assert "mfu    n/a" in stream.getvalue()
        assert len(stream.getvalue().splitlines()) == 1

    def test_at_least_a_line_every_30_seconds(self, clock: Clock) -> None:
        view, stream = plain(clock)
        for report in reports(60, every=1000):
            clock.now += 10
            view.step(report)
        assert [line.split("/")[0] for line in stream.getvalue().splitlines()[1:4]] == [
            "step    3",
            "step    6",
            "step    9",
        ]
        for done in range(8):
            clock.now += 10
            view.evaluating(done, 8)
        assert stream.getvalue().splitlines()[-2:] == ["evaluating, 2 of 8 batches", "evaluating, 5 of 8 batches"]

    def test_evaluations_saves_and_words(self, clock: Clock) -> None:
        view, stream = plain(clock)
        view.evaluated(EvalReport(250, 2.1034, 2.0873, True))
        view.evaluated(EvalReport(500, 2.2, 2.0, False))
        view.saved(500, Path("runs/x/ckpt.pt"), 0.42)
        view.say("two\nlines")
        view.warn("careful")
        assert stream.getvalue().splitlines()[1:] == [
            "step  250/2000  val   2.1034  train  2.0873  best so far",
            "step  500/2000  val   2.2000  train  2.0000",
            "saved step 500 in runs/x/ckpt.pt (0.4 s)",
            "two",
            "lines",
            "note: careful",
        ]

    def test_skipped_steps_are_shown(self, clock: Clock) -> None:
        view, stream = plain(clock)
        view.step(replace(FIRST, window_loss=4.2, skipped=3))
        assert stream.getvalue().endswith("skipped 3\n")

    def test_the_log_file_has_the_same_lines_and_a_resume_appends(self, clock: Clock, tmp_path: Path) -> None:
        log_file = tmp_path / "logs" / "train.log"
        for _ in range(2):
            view, stream = plain(clock, log_file)
            view.warn("ü")
            view.close()
        assert log_file.read_text("utf-8") == stream.getvalue() * 2

    def test_a_lost_reader_ends_the_lines_and_nothing_else(self, clock: Clock, tmp_path: Path) -> None:
        view = PlainView(Broken(), tmp_path / "train.log", clock)
        view.start(START)
        view.say("still here")
        view.close()
        assert (tmp_path / "train.log").read_text().endswith("still here\n")

    def test_a_full_disk_ends_nothing(self, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OwnFile, "write", no_room)
        view, stream = plain(clock, tmp_path / "train.log")
        view.say("still here")
        view.close()
        assert stream.getvalue().endswith("still here\n")

    def test_a_closed_pipe_leaves_no_error_for_the_end_of_the_process(self, clock: Clock) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w", buffering=1, encoding="utf-8") as stream:  # noqa: PTH123 - of a file descriptor
            view = PlainView(stream, None, clock)
            view.say("a")
            view.say("b")
            stream.write("what others still write\n")
            stream.flush()


class TestHints:
    @pytest.mark.parametrize(("loss", "vocab"), [(math.log(65), 65), (4.35, 65), (10.95, 50304), (0.75, 2)])
    def test_a_fresh_model_gets_none(self, loss: float, vocab: int) -> None:
        assert first_loss_hint(loss, vocab) is None

    @pytest.mark.parametrize(("loss", "word"), [(9.0, "tokenizer"), (1.2, "weights come from training")])
    def test_far_from_ln_vocab_is_said_once_at_the_first_step(self, clock: Clock, loss: float, word: str) -> None:
        view, stream = plain(clock)
        for step in (1, 2):
            view.step(replace(FIRST, step=step, loss=loss))
        assert stream.getvalue().count("ln(65) = 4.17") == 1
        assert word in stream.getvalue()

    def test_a_resumed_run_has_no_first_loss(self, clock: Clock) -> None:
        view, stream = plain(clock)
        view.step(replace(FIRST, step=501, loss=1.2))
        assert "ln(" not in stream.getvalue()

    def test_rising_validation_loss_with_falling_training_loss_is_said_once(self, clock: Clock) -> None:
        view, stream = plain(clock)
        for number, val in enumerate((2.5, 1.5, 1.55, 1.6, 1.7, 1.8, 1.9)):
            view.evaluated(EvalReport(number * 100, val, 2.0 - number / 10, False))
        hints = [line for line in stream.getvalue().splitlines() if line.startswith("note: ")]
        assert len(hints) == 1
        assert "from 1.5000 (step 100) to 1.7000" in hints[0]
        assert "best.pt keeps the weights of step 100" in hints[0]

    @pytest.mark.parametrize(
        "losses",
        [
            [(2.5, 2.5), (2.4, 2.4), (2.3, 2.3), (2.2, 2.2), (2.1, 2.1)],  # all falls
            [(2.0, 2.0), (2.002, 1.9), (1.999, 1.8), (2.003, 1.7), (2.001, 1.6)],  # noise
            [(2.0, 2.0), (2.5, 2.5), (2.6, 2.6), (2.7, 2.7), (2.8, 2.8)],  # both rise: another trouble
        ],
    )
    def test_no_false_alarm(self, losses: list[tuple[float, float]]) -> None:
        watch = OverfitWatch()
        assert [watch.evaluated(step, val, train) for step, (val, train) in enumerate(losses)] == [None] * 5


class TestLive:
    @pytest.mark.parametrize("width", [60, 80, 100, 200])
    def test_the_panel_shows_everything_in_60_columns(
        self, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch, width: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        view = LiveView(terminal, None, clock)
        view.start(replace(START, max_iters=600_000, peak_tflops=989.5, peak_source="table"))
        view.step(FIRST)
        view.evaluated(EvalReport(99_750, 1.9012, 1.853, True))
        view.evaluated(EvalReport(99_900, 1.9512, 1.753, False))
        view.saved(99_900, Path("ckpt.pt"), 0.4)
        clock.now += 84
        view.step(
            replace(
                replace(FIRST, step=100_000, loss=1.8, mfu=0.415, tokens_per_s=463_000, skipped=2, epoch=12.34),
                step_ms=12313.4,
                wait_share=0.103,
                memory_gib=139.12,
            )
        )
        shown = terminal.screen()
        assert [len(line) for line in shown] == [min(width, 100)] * 10
        text = "\n".join(shown)
        for part in (
            "shakespeare-char on cpu", "100,000 / 600,000   17%", "now 1.8000", "1.9512  train 1.7530",
            "best 1.9012 at step 99,750", "1.00e-03", "grad norm 0.70", "epoch 12.34", "2 updates skipped",
            "463k tokens/s", "12313 ms/step", "data wait 10.3%", "41.5% of 989.5 TFLOP/s table", "memory 139 GiB",
            "1m 24s elapsed", "step 99,900, 1m 24s ago",
        ):  # fmt: skip
            assert part in text, part
        assert "…" not in text

    def test_a_narrow_terminal_is_cropped_not_folded(
        self, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        view = LiveView(terminal, None, clock)
        view.start(START)
        clock.now += 1
        view.step(FIRST)
        assert [len(line) for line in terminal.screen()] == [40] * 10

    def test_at_most_two_redraws_a_second(self, terminal: Terminal, clock: Clock) -> None:
        view = LiveView(terminal, None, clock)
        view.start(START)
        before = terminal.writes
        for report in reports(1000):
            clock.now += 0.01
            view.step(report)
        assert terminal.writes - before in range(18, 22)

    def test_the_newest_loss_is_shown_between_log_steps(self, terminal: Terminal, clock: Clock) -> None:
        view = LiveView(terminal, None, clock)
        view.start(START)
        clock.now += 1
        view.step(replace(FIRST, loss=3.21))
        assert "now 3.2100" in "\n".join(terminal.screen())

    def test_words_stand_above_and_the_log_file_is_plain(
        self, terminal: Terminal, clock: Clock, tmp_path: Path
    ) -> None:
        view = LiveView(terminal, tmp_path / "train.log", clock)
        view.start(START)
        for report in reports(20):
            clock.now += 0.3
            view.step(report)
        view.warn("[bold]careful[/bold]")
        view.close()
        assert "note: [bold]careful[/bold]" in ESCAPE.sub("", terminal.getvalue())
        assert "tok/s  mfu" not in terminal.getvalue()
        log = (tmp_path / "train.log").read_text()
        assert "\x1b" not in log
        assert [line[:9] for line in log.splitlines()] == ["mfu is on", "step   10", "step   20", "note: [bo"]

    def test_closing_leaves_the_cursor_and_stderr_as_they_were(self, terminal: Terminal, clock: Clock) -> None:
        stderr = sys.stderr
        view = LiveView(terminal, None, clock)
        view.start(START)
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l"), "also for a SIGKILL"
        view.step(FIRST)
        view.close()
        assert sys.stderr is stderr
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")
        assert terminal.getvalue().endswith("\n") or terminal.getvalue().endswith("\x1b[?25h")
        assert "Ctrl-C" not in "\n".join(terminal.screen())

    def test_a_shrunken_terminal_is_cleared_first(
        self, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        view = LiveView(terminal, None, clock)
        view.start(START)
        for width, cleared in ((80, 0), (100, 0), (60, 1), (60, 1), (70, 1)):
            monkeypatch.setenv("COLUMNS", str(width))
            view._console._environ = dict(os.environ)
            view._console._width = None
            clock.now += 1
            view.step(FIRST)
            assert terminal.getvalue().count("\x1b[2J") == cleared

    def test_a_lost_terminal_ends_the_panel_and_nothing_else(
        self, terminal: Terminal, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        view = LiveView(terminal, tmp_path / "train.log", clock)
        view.start(START)

        def hung_up(text: str) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(terminal, "write", hung_up)
        for report in reports(20):
            clock.now += 1
            view.step(report)
        view.warn("nobody looks")
        view.close()
        assert "step   20/2000" in (tmp_path / "train.log").read_text()

    def test_colours_can_be_refused(self, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        view = LiveView(terminal, None, clock)
        view.start(START)
        clock.now += 1
        view.step(FIRST)
        view.close()
        assert re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue()) is None


class TestWhere:
    def test_a_terminal_gets_the_panel(self, terminal: Terminal) -> None:
        assert usable_terminal(terminal)
        assert isinstance(make_view(terminal), LiveView)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("TERM", "dumb"), ("TERM", "unknown"), ("TTY_INTERACTIVE", "0"), ("TTY_COMPATIBLE", "0")],
    )
    def test_one_that_cannot_gets_lines(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        assert type(make_view(terminal)) is PlainView

    @pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
    def test_nothing_forces_a_panel_into_a_pipe(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "1")
        stream = io.StringIO()
        view = make_view(stream)
        view.start(START)
        for report in reports(20):
            view.step(report)
        view.close()
        assert type(view) is PlainView
        assert "\x1b" not in stream.getvalue()
        assert "\r" not in stream.getvalue()

    def test_other_ranks_are_silent(self, terminal: Terminal, tmp_path: Path) -> None:
        view = make_view(terminal, rank=1, log_file=tmp_path / "train.log")
        assert type(view) is View
        view.start(START)
        view.step(FIRST)
        view.warn("x")
        view.close()
        assert terminal.getvalue() == ""
        assert not list(tmp_path.iterdir())


class TestFigures:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(None, "-"), (-3, "0s"), (0.4, "0s"), (59.6, "1m 00s"), (84, "1m 24s"), (11100, "3h 05m"), (187200, "2d 04h")],
    )
    def test_durations(self, seconds: float | None, text: str) -> None:
        assert duration(seconds) == text

    @given(st.floats(0, 86400 * 999))
    def test_a_duration_fits_its_column(self, seconds: float) -> None:
        assert len(duration(seconds)) <= 8

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (950, "950"), (999.6, "1k"), (16300, "16.3k"), (999_900, "1M"), (1157e3, "1.16M"), (3.2e9, "3.2G")],
    )
    def test_quantities(self, value: float, text: str) -> None:
        assert quantity(value) == text

    @given(st.floats(0, 9e11))
    def test_a_quantity_fits_its_column_and_is_right_to_a_percent(self, value: float) -> None:
        text = quantity(value)
        assert len(text) <= 6
        factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
        assert float(text.rstrip("kMG")) * factor == pytest.approx(value, rel=0.01, abs=0.5)

    @pytest.mark.parametrize(
        ("tflops", "text"), [(0.162, "162 GFLOP/s"), (989.5, "989.5 TFLOP/s"), (2250, "2250 TFLOP/s")]
    )
    def test_peaks(self, tflops: float, text: str) -> None:
        assert peak(tflops) == text

    @given(st.lists(st.floats(0, 100), min_size=1, max_size=1500), st.integers(1, 90))
    def test_a_history_is_bounded_and_keeps_the_mean(self, losses: list[float], width: int) -> None:
        history = History()
        for loss in losses:
            history.add(loss)
        assert len(history.points) < History.LIMIT
        bars = history.bars(width, "01234567")
        assert len(bars) == min(width, len(history.points))
        assert set(bars) <= set("01234567")
        assert history.smoothed is not None
        assert min(losses) - 1e-9 <= history.smoothed <= max(losses) + 1e-9

    def test_a_falling_loss_has_falling_bars(self) -> None:
        history = History()
        for step in range(2000):
            history.add(1.5 + 2.7 * math.exp(-step / 300))
        bars = history.bars(40, "01234567")
        assert list(bars) == sorted(bars, reverse=True)
        assert (bars[0], bars[-1]) == ("7", "0")
