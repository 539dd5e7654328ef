"""Speed by a clock that the test winds."""

from pathlib import Path

import pytest
import torch

from nanogpt_cli.machine.peaks import best_peak, expected_mfu, note_mfu
from nanogpt_cli.training.speed import StepClock
from nanogpt_cli.training.step import InFlight


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def run(clock: StepClock, hands: Hands, seconds: float) -> None:
    clock.start()
    hands.time += seconds
    clock.stop()


def test_time_outside_of_steps_does_not_count() -> None:
    hands = Hands()
    clock = StepClock(1000, 1e6, 1e10, time_s=7.0, now=hands)
    for _ in range(4):
        run(clock, hands, 0.5)
        hands.time += 60  # an evaluation
    figures = clock.figures(0.0, window=True)
    assert figures["step_ms"] == pytest.approx(500)
    assert figures["tokens_per_s"] == pytest.approx(2000)
    assert figures["time_s"] == pytest.approx(9.0)
    assert figures["mfu"] == pytest.approx(2000 * 1e6 / 1e10)


def test_warm_up_steps_count_for_no_rate() -> None:
    hands = Hands()
    clock = StepClock(100, 1.0, None, now=hands)
    for seconds in (9.0, 5.0, 1.0, 1.0, 1.0):
        run(clock, hands, seconds)
    figures = clock.figures(0.0, window=True)
    assert (figures["step_ms"], figures["time_s"]) == (pytest.approx(1000), pytest.approx(17))


def test_the_best_peak_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path))
    cpu = torch.device("cpu")
    assert [best_peak(cpu, "float32", flops) for flops in (4e9, 1e11, 5e10)] == [4e9, 1e11, 1e11]
    assert best_peak(cpu, "bfloat16", 1e9) == 1e9
    assert expected_mfu(cpu, "float32", 128) is None
    for width, mfu in ((64, 0.1), (768, 0.4)):
        note_mfu(cpu, "float32", width, mfu)
    assert [expected_mfu(cpu, "float32", width) for width in (1, 128, 400, 10**6)] == [0.1, 0.1, 0.4, 0.4]
    (tmp_path / "speed.toml").write_text("[damaged")
    assert best_peak(cpu, "float32", 1.0) == 1.0
    (tmp_path / "speed.toml").unlink()
    (tmp_path / "speed.toml").mkdir()  # nothing can be kept: no run minds
    assert best_peak(cpu, "float32", 2.0) == 2.0


def test_mfu_is_unknown_until_warm_and_without_a_peak() -> None:
    hands = Hands()
    clock, blind = StepClock(10, 1e6, 1e9, now=hands), StepClock(10, 1e6, None, now=hands)
    for step in range(3):
        run(clock, hands, 1.0)
        run(blind, hands, 1.0)
        assert (clock.figures(0.0, window=False)["mfu"] is None) == (step < 2)
    assert blind.figures(0.0, window=True)["mfu"] is None


def test_the_same_step_time_gives_the_same_mfu_on_any_number_of_devices() -> None:
    def mfu(devices: int) -> float | None:
        hands = Hands()
        clock = StepClock(1000 * devices, 1e6, 1e12 * devices, now=hands)
        for _ in range(4):
            run(clock, hands, 0.25)
        return clock.figures(0.0, window=True)["mfu"]

    assert mfu(1) == pytest.approx(mfu(8))


def test_windows_are_separate_and_the_wait_is_a_share() -> None:
    hands = Hands()
    clock = StepClock(100, 1.0, None, now=hands)
    run(clock, hands, 1.0)
    assert clock.figures(0.25, window=True)["wait_share"] == pytest.approx(0.25)
    run(clock, hands, 2.0)
    figures = clock.figures(0.35, window=True)
    assert figures["step_ms"] == pytest.approx(2000)
    assert figures["wait_share"] == pytest.approx(0.05)


def test_waiting_for_the_device_belongs_to_the_step() -> None:
    hands = Hands()
    clock = StepClock(100, 1.0, None, now=hands)
    run(clock, hands, 1.0)
    clock.add(0.5)
    figures = clock.figures(0.0, window=True)
    assert (figures["step_ms"], figures["time_s"]) == (pytest.approx(1500), pytest.approx(1.5))


def test_a_host_copy_gives_plain_numbers() -> None:
    assert InFlight(1, 0.1, torch.tensor([1.5, 0.0, float("inf")])).values() == [1.5, 0.0, float("inf")]
