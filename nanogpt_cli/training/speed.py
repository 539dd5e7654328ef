"""How fast steps are: a clock that runs only inside steps."""

import time
from collections.abc import Callable
from typing import TypedDict

WARM_UP_STEPS = 2  # kernels are picked and caches filled in these; they count for no rate
FEW_STEPS = 20  # tell little about a machine
SMOOTHING = 0.9  # of the running rate, as in nanoGPT


class Figures(TypedDict):
    """Speed, as a StepReport shows it."""

    step_ms: float
    tokens_per_s: float
    mfu: float | None
    time_s: float
    wait_share: float


class StepClock:
    """Measures time inside steps only; evaluation and saving stand outside.

    Args:
        tokens_per_step: over all ranks.
        flops_per_token: of the model, PaLM's formula.
        peak_flops: of all devices together, FLOP/s; None where it is not known.
        time_s: training time before this process.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        time_s: float = 0.0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step, self.flops_per_token, self.peak_flops = tokens_per_step, flops_per_token, peak_flops
        self.time_s = time_s
        self.now = now
        self.steps = 0
        self._began = now()
        self._running: float | None = None  # smoothed seconds a step
        self._last = 0.0
        self._all = [0.0, 0]  # seconds and steps that count for a rate
        self._window = [0.0, 0.0]  # seconds since the last log step, and the data wait at its start
        self._rated = [0.0, 0]  # seconds and steps of it that count for a rate

    def start(self) -> None:
        self._began = self.now()

    def stop(self) -> None:
        seconds = self.now() - self._began
        self.time_s += seconds
        self.steps += 1
        self._last = seconds
        self._window[0] += seconds
        if self.steps > WARM_UP_STEPS:
            self._rated = [self._rated[0] + seconds, self._rated[1] + 1]
            self._all = [self._all[0] + seconds, self._all[1] + 1]
            self._running = seconds if self._running is None else SMOOTHING * self._running + (1 - SMOOTHING) * seconds

    def add(self, seconds: float) -> None:
        """The last step took this much longer: the device was not done with it."""
        self.time_s += seconds
        self._last += seconds
        self._window[0] += seconds
        self._rated[0] += seconds * bool(self._rated[1])

    def mean_mfu(self) -> float | None:
        """Share of the peak over this life of the run; None after few steps or without a peak."""
        seconds, steps = self._all
        if steps < FEW_STEPS or not self.peak_flops:
            return None
        return steps * self.tokens_per_step * self.flops_per_token / seconds / self.peak_flops

    def figures(self, waited_s: float, *, window: bool) -> Figures:
        """The running rate, or at a log step the mean rate since the last one; `waited_s` for data, in all."""
        (seconds, waited_before), (rated, steps) = self._window, self._rated
        step_s = self._running or self._last
        share = (waited_s - waited_before) / seconds if seconds else 0.0
        if window:
            step_s = rated / steps if steps else self._last
            self._window, self._rated = [0.0, waited_s], [0.0, 0]
        tokens_per_s = self.tokens_per_step / step_s if step_s else 0.0
        mfu = tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops and self._running else None
        return Figures(
            step_ms=1000 * step_s, tokens_per_s=tokens_per_s, mfu=mfu, time_s=self.time_s, wait_share=min(1.0, share)
        )
