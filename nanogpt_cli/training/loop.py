"""The story of a run: take a step, look at it one step later, evaluate and save when it is time, stop when asked.

Every update is a pure function of the checkpoint before it and of (seed, step): rows, dropout and rates are looked up,
never remembered. That is why a run can be cut anywhere and go on as if nothing had happened.
"""

import math
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from nanogpt_cli.config.derived import Schedule
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.errors import NonFiniteError, StoppedError, typed
from nanogpt_cli.machine.device import memory_gib
from nanogpt_cli.machine.signals import StopRequested, StopSignals
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.training.saving import Saver
from nanogpt_cli.training.speed import StepClock
from nanogpt_cli.training.state import TrainingState, out_of_patience
from nanogpt_cli.training.step import InFlight, TrainStep, what_went_bad
from nanogpt_cli.training.validation import Samples, Validation
from nanogpt_cli.view.plain import EvalReport, Start, StepReport, View
from nanogpt_cli.view.trackers import Trackers

# of a StepReport, what a line of metrics.jsonl holds beside step and loss
LOGGED = ("lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "tokens", "epoch", "time_s", "skipped")


@dataclass
class Training:
    """A run being trained: what it consists of, and the few flags that live between steps."""

    state: TrainingState
    schedule: Schedule
    train_step: TrainStep
    batches: Batches
    validation: Validation
    saver: Saver
    view: View
    metrics: MetricsLog
    trackers: Trackers
    clock: StepClock
    samples: Samples | None  # on the rank that writes them
    in_flight: list[InFlight] = field(default_factory=list)
    stopping: bool = False  # a signal is being obeyed
    ended_by: str = ""  # what ends this life of the run before max_iters
    signals: StopSignals = field(init=False)

    def __post_init__(self) -> None:
        self.split, self.processes = self.train_step.split, self.train_step.processes
        self.signals = StopSignals(self._announce_stop)

    def train(self, start: Start) -> None:
        """Train to max_iters, or until patience or time ends; the last state is saved, and but for time evaluated.

        Raises:
            StoppedError: a signal; the last completed update is saved.
            NonFiniteError: the numbers went bad; the last checkpoint is from before.
            NanogptError: the final state could not be saved.
        """
        progress, settings = self.state.progress, self.state.config.train
        with self.signals:
            self.view.start(start)  # it says that Ctrl-C saves: from here on that is true
            try:
                while True:
                    due = self.at_end or progress.step % settings.eval_interval == 0
                    if due and progress.step != progress.evaluated_step:
                        self.evaluate()
                    if self.saver.is_due() or self.ended_by:
                        self.save(must=bool(self.at_end or self.ended_by))
                    if self.at_end or self.ended_by:
                        return
                    self.step()
            except StopRequested as stop:
                self._save_and_stop(stop)

    @property
    def at_end(self) -> bool:
        return self.state.progress.step >= self.state.config.train.max_iters

    def step(self) -> None:
        """Send one update to the device, then look at the one before it."""
        progress = self.state.progress
        self.clock.start()
        factor = self.schedule.factor(progress.step)
        self.state.optimizer.set_rates(factor)
        stop = self.processes.distributed and self.signals.signum is not None
        wishes = stop, self.saver.minutes_are_up(), self.saver.time_is_up()
        outcome = self.train_step(self.batches, between=self._check_signal, wishes=wishes)
        progress.step += 1
        progress.rows += self.split.rows
        self.in_flight.append(InFlight(progress.step, factor * self.schedule.learning_rate, outcome))
        self.settle(leave=1)
        self.clock.stop()

    def _check_signal(self) -> None:
        """One process stops at any border; several agree at the end of a step."""
        if not self.processes.distributed:
            self.signals.check()

    def settle(self, leave: int = 0) -> None:
        """Look at updates in flight, oldest first, until `leave` are left."""
        while len(self.in_flight) > leave:
            update = self.in_flight.pop(0)
            loss, norm, skipped, stop, save, time_is_up = update.values()
            if skipped and (why := what_went_bad(update.step, loss, norm, self.state.scaler)):
                good = update.step - 1
                raise NonFiniteError(f"Stopped: {why}.\nThe last good step is {good}; {self.saver.way_on()}")
            progress = self.state.progress
            progress.window_sum += loss
            progress.window_count += 1
            progress.skipped += bool(skipped)
            self.saver.wished |= save > 0
            if time_is_up:
                self.ended_by = self.saver.ended_by
            self._report(update, loss, norm)
            if stop and not self.stopping:
                raise StopRequested(self.signals.signum or signal.SIGTERM)  # perhaps another rank's

    def drain(self) -> None:
        """Look at every update in flight; the wait belongs to the last step's time."""
        began = time.perf_counter()
        for update in self.in_flight:
            update.values()
        if self.in_flight:
            self.clock.add(time.perf_counter() - began)
        self.settle()

    def _report(self, update: InFlight, loss: float, norm: float) -> None:
        progress, config = self.state.progress, self.state.config
        window_loss = None
        if update.step % config.train.log_interval == 0:
            window_loss = progress.window_sum / progress.window_count
            progress.window_sum, progress.window_count = 0.0, 0
        rows = progress.rows - self.split.rows * (progress.step - update.step)
        report = StepReport(
            step=update.step,
            loss=loss,
            window_loss=window_loss,
            lr=update.rate,
            grad_norm=norm if math.isfinite(norm) else None,
            tokens=rows * config.model.block_size,
            epoch=self.batches.order.epoch(rows),
            skipped=progress.skipped,
            memory_gib=memory_gib(self.train_step.compute.device),
            **self.clock.figures(self.batches.waited_s, window=window_loss is not None),
        )
        progress.time_s = report.time_s
        self.view.step(report)
        if window_loss is not None:
            self._log({"step": report.step, "loss": window_loss} | {name: getattr(report, name) for name in LOGGED})

    def _log(self, line: dict[str, Any]) -> None:
        if self.processes.main:
            self.metrics.append(line)
            self.trackers.log(line)

    def evaluate(self) -> None:
        """Mean loss on both splits; a best one is saved, the training state first."""
        progress = self.state.progress
        self.drain()
        val_loss, train_loss = self.validation.losses(self._check_signal, self.view.evaluating)
        if not math.isfinite(val_loss):
            what = f"the validation loss is {val_loss} after step {progress.step}"
            raise NonFiniteError(f"Stopped: {what}, which was not saved; {self.saver.way_on()}")
        progress.evaluated_step = progress.step
        before = progress.best_loss, progress.best_step
        best = before[0] is None or val_loss < before[0]
        progress.not_better = 0 if best else progress.not_better + 1
        if best:
            progress.best_loss, progress.best_step = val_loss, progress.step
        if not self.at_end and out_of_patience(self.state.config, progress):
            self.ended_by = "--patience"
        self._log({"step": progress.step, "val_loss": val_loss, "train_loss": train_loss})
        self.view.evaluated(EvalReport(progress.step, val_loss, train_loss, best))
        if best and not self.save(must=self.at_end, best=True):
            progress.best_loss, progress.best_step = before  # the next evaluation may still become the best on disk
        if self.samples is not None:
            self.samples.write(progress.step)

    def save(self, *, must: bool, best: bool = False) -> bool:
        """`Saver.save`, once every update has been looked at."""
        self.drain()
        return self.saver.save(must=must, best=best)

    def _announce_stop(self, signal_name: str) -> None:
        where = "step" if self.processes.distributed else "micro-step"
        self.view.warn(f"{signal_name}: stopping after this {where}, then saving. Once more stops at once.")

    def _save_and_stop(self, stop: StopRequested) -> None:
        self.stopping = True
        self.state.optimizer.zero_grad()  # of an unfinished update: resume takes the step again
        self.save(must=True)
        step, run = self.state.progress.step, typed(self.saver.run.path)
        raise StoppedError(
            f"Stopped by {stop} after step {step}, which is saved. To go on: nanogpt resume {run}", stop.signum
        )
