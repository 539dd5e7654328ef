"""Signals: the first one saves and stops, the second one stops at once, and no place to run in changes that."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanogpt_cli.machine.signals import StopSignals
from nanogpt_cli.runs.checkpoint import load_training_state
from tests.faults.harness import Command, Patch, Result, nanogpt
from tests.faults.lives import STEPS, Lab, strays
from tests.faults.taps import At, Event, Signal, Tap, When


@dataclass(frozen=True)
class SignalInCall:
    """Signals when a function is entered for the nth time."""

    module: str
    function: str
    nth: int
    signals: tuple[int, ...] = (signal.SIGTERM,)

    def install(self, folder: Path) -> None:
        module = sys.modules[self.module]
        real, calls = getattr(module, self.function), 0

        def call(*arguments: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                for signum in self.signals:
                    os.kill(os.getpid(), signum)
            return real(*arguments, **more)

        setattr(module, self.function, call)


def stopped_at(lab: Lab, result: Result, code: int) -> int:
    """The step that a stopped run has saved, after a look at everything that a stop promises."""
    assert result.code == code, result
    assert "Traceback" not in result.err, result
    assert "nanogpt resume runs/cut" in result.err, result
    assert f"{signal.Signals(code - 128).name}: stopping" in result.err, result
    state = load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")
    assert f"after step {state['step']}, which is saved" in result.err, result
    assert strays(lab.folder) == []
    return int(state["step"])


PLACES = {
    # line n of metrics.jsonl belongs to log step 2n, or to the evaluation after it, and is written one step later
    "between two steps": (Signal(At("write", "metrics.jsonl", 3, "after")), {4, 5}),
    "in a save": (Signal(At("write", "ckpt.pt~", 20, "half")), {2, 3}),
    "in a save of the best": (Signal(At("write", "best.pt~", 2, "half")), {2}),
    "in an evaluation": (SignalInCall("nanogpt_cli.training.validation", "windows_loss", 6), {6}),
    "in the last evaluation": (SignalInCall("nanogpt_cli.training.validation", "windows_loss", 11), {STEPS}),
}


@pytest.mark.parametrize(("patch", "steps"), PLACES.values(), ids=PLACES.keys())
def test_a_stopped_run_goes_on_as_if_it_had_not(lab: Lab, patch: Patch, steps: set[int]) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), patch)
    assert stopped_at(lab, result, 143) in steps
    lab.live("cut", [])


def test_interrupt(lab: Lab) -> None:
    patch = Signal(At("write", "metrics.jsonl", 3, "after"), signals=(signal.SIGINT,))
    stopped_at(lab, nanogpt(lab.folder, lab.line("cut"), patch), 130)


@pytest.mark.parametrize("name", ["ckpt.pt~", "best.pt~", "metrics.jsonl", "train.log"])
def test_a_second_signal_stops_at_once(lab: Lab, name: str) -> None:
    patch = Signal(At("write", name, 3, "half"), signals=(signal.SIGINT, signal.SIGTERM))
    result = nanogpt(lab.folder, lab.line("cut"), patch)
    assert result.code == 143, result
    assert "Traceback" not in result.err, result
    assert "at once" in result.err, result
    assert strays(lab.folder) == []
    lab.check_alive("cut")
    lab.live("cut", [])


@dataclass(frozen=True)
class Pair:
    """Two signals, the second so many seconds after the first, sent by a process of their own from a point on."""

    at: At
    gap: float
    signals: tuple[int, int]

    def install(self, folder: Path) -> None:
        started = False

        def act(event: Event, when: When) -> None:
            nonlocal started
            if not started and event.kind == self.at.kind and event.name.endswith(self.at.name):
                started = True
                code = f"import os, time; os.kill({os.getpid()}, {int(self.signals[0])}); time.sleep({self.gap}); "
                code += f"os.kill({os.getpid()}, {int(self.signals[1])})"
                subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stderr=subprocess.DEVNULL)

        Tap(folder, act)


@pytest.mark.parametrize("gap", [0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1])
def test_a_pair_of_signals_at_any_distance(lab: Lab, gap: float) -> None:
    signals = (signal.SIGINT, signal.SIGTERM)
    result = nanogpt(lab.folder, lab.line("cut"), Pair(At("write", "metrics.jsonl"), gap, signals))
    # the second one may come when all is over, or find the first one's end
    assert result.code in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT), result
    assert "Traceback" not in result.err, result
    assert "Exception ignored" not in result.err, result
    assert result.err.count("error:") <= 1, result
    lab.live("cut", [])


def test_a_second_signal_within_a_callback_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python only prints what is raised while an object goes; the first signal is obeyed all the same."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Going:
        def __init__(self, signum: int) -> None:
            self.signum = signum

        def __del__(self) -> None:
            if not self.signum:
                raise ValueError
            os.kill(os.getpid(), self.signum)

    with StopSignals(lambda name: None) as signals:
        Going(signal.SIGINT)
        Going(signal.SIGTERM)
        assert signals.signum == signal.SIGINT
        assert told == []
        Going(0)  # errors of others are told as ever
    assert len(told) == 1


def test_a_hang_up_is_a_stop_and_nohup_outlives_it(lab: Lab) -> None:
    hang_up = Signal(At("write", "metrics.jsonl", 3, "after"), signals=(signal.SIGHUP,))
    stopped_at(lab, nanogpt(lab.folder, lab.line("cut"), hang_up), 129)
    shutil.rmtree(lab.folder / "runs" / "cut")
    result = nanogpt(lab.folder, lab.line("cut"), NoHup(), hang_up)
    assert result.code == 0, result
    lab.check_end("cut")


@dataclass(frozen=True)
class NoHup:
    """What nohup does."""

    def install(self, folder: Path) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@dataclass(frozen=True)
class Terminal:
    """A terminal of its own for the process, its three streams on it."""

    name: str

    def install(self, folder: Path) -> None:
        os.setsid()
        terminal = os.open(self.name, os.O_RDWR)  # the first one that a session leader opens is its own
        for number in range(3):
            os.dup2(terminal, number)
        os.environ["TERM"] = "xterm-256color"


def test_ctrl_c_at_a_terminal(lab: Lab) -> None:
    controller, terminal = os.openpty()
    line = lab.line("cut").replace(f"--max-iters={STEPS}", "--max-iters=100000")
    command = Command(line.split(), lab.folder, [Terminal(os.ttyname(terminal))])
    shown = read_until(controller, b"Ctrl-C saves and stops")
    os.write(controller, b"\x03")
    shown += read_until(controller, b"nanogpt resume")
    result = command.wait()
    os.close(terminal)
    os.close(controller)
    assert result.code == 130, shown
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor is back
    assert b"which is saved" in shown.replace(b"\r\n", b" ")


def read_until(controller: int, words: bytes) -> bytes:
    """What a terminal shows until some words stand on it."""
    shown, end = b"", time.monotonic() + 30
    while words not in shown and time.monotonic() < end:
        if select.select([controller], [], [], 1)[0]:
            shown += os.read(controller, 1 << 16)
    return shown


def test_no_streams_at_all(lab: Lab) -> None:
    """Started by a program that closed all three: a file of the run must not become its standard error."""
    one_thread = 'import sys, torch; torch.set_num_threads(1); sys.modules["matplotlib"] = None'
    program = f"{one_thread}; from nanogpt_cli.cli.main import main; main()"
    closed = f"exec 0<&- 1>&- 2>&-; exec {sys.executable} -c '{program}' {lab.line('cut')}"
    assert subprocess.run(["bash", "-c", closed], cwd=lab.folder, timeout=120).returncode == 0
    lab.check_end("cut")


@dataclass(frozen=True)
class NobodyReads:
    """Both streams are pipes whose readers have gone."""

    def install(self, folder: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)


def test_nobody_reads(lab: Lab) -> None:
    """The sample goes to stdout and what is shown to stderr; neither is worth a run."""
    assert nanogpt(lab.folder, lab.line("cut"), NobodyReads()).code == 0
    lab.check_end("cut")
    assert nanogpt(lab.folder, "resume runs/no-such-run", NobodyReads()).code == 2
