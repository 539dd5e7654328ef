"""The story of a run: take a step, look at it one step later, evaluate and save when it is time, stop when asked.

Every update is a pure function of the checkpoint before it and of (seed, step): rows, dropout and rates are looked up,
never remembered. That is why a run can be cut anywhere and go on as if nothing had happened.
"""

import itertools
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nanogpt_cli.config.derived import Split, save_interval
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.data_set import Tokens
from nanogpt_cli.data.tokens.rows import RowOrder
from nanogpt_cli.errors import NanogptError, NonFiniteError, StoppedError, typed
from nanogpt_cli.files import DiskFullError
from nanogpt_cli.inference.evaluate import windows_loss
from nanogpt_cli.machine.device import Compute, key_dropout, memory_gib
from nanogpt_cli.machine.distributed import Processes, gradient_sync
from nanogpt_cli.machine.signals import StopRequested, StopSignals
from nanogpt_cli.runs.checkpoint import keep_milestone, save_checkpoint, weights_only
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.training.speed import Reading, StepClock
from nanogpt_cli.training.state import TrainingState
from nanogpt_cli.view.plain import EvalReport, Start, StepReport, View
from nanogpt_cli.view.trackers import Trackers

# of a StepReport, what a line of metrics.jsonl holds beside step and loss
LOGGED = ("lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "tokens", "epoch", "time_s", "skipped")


@dataclass(frozen=True)
class Windows:
    """What validation reads of a split, the same for the whole run."""

    tokens: Tokens
    offsets: npt.NDArray[np.int64]


@dataclass
class InFlight:
    """An update that was sent to the device and has not been looked at: [loss, norm, skipped, stop, save]."""

    step: int
    rate: float
    reading: Reading


@dataclass
class Training:
    """A run being trained: what it consists of, and the few flags that live between steps."""

    state: TrainingState
    model: nn.Module  # what is called: the bare module, or its wrapper for several ranks
    split: Split
    batches: Batches
    order: RowOrder
    train_windows: Windows
    val_windows: Windows
    compute: Compute
    processes: Processes
    run: RunDirectory
    view: View
    metrics: MetricsLog
    trackers: Trackers
    clock: StepClock
    in_flight: list[InFlight] = field(default_factory=list)
    saved: tuple[int, int] = (0, 0)  # step and evaluated step that the last checkpoint holds
    tried: tuple[int, int] = field(init=False)  # the same of the last attempt to save
    save_due: bool = False
    stopping: bool = False  # a signal is being obeyed
    signals: StopSignals = field(init=False)

    def __post_init__(self) -> None:
        self.signals = StopSignals(self._announce_stop)
        self.tried = self.saved

    def train(self, start: Start) -> None:
        """Train to max_iters; the last state is evaluated and saved.

        Raises:
            StoppedError: a signal; the last completed update is saved.
            NonFiniteError: the numbers went bad; the last checkpoint is from before.
            NanogptError: the final state could not be saved.
        """
        progress, settings = self.state.progress, self.state.facts.config.train
        with self.signals:
            self.view.start(start)  # it says that Ctrl-C saves: from here on that is true
            try:
                while True:
                    if self.at_end or progress.step % settings.eval_interval == 0:
                        self.evaluate()
                    if self._time_to_save():
                        self.save(must=self.at_end)
                    if self.at_end:
                        return
                    self.step()
            except StopRequested as stop:
                self._save_and_stop(stop)

    @property
    def at_end(self) -> bool:
        """Whether all updates are done."""
        return self.state.progress.step >= self.state.facts.config.train.max_iters

    def step(self) -> None:
        """One update: forward and backward over every micro-batch, then the optimizer, then a look at the last one."""
        progress, facts = self.state.progress, self.state.facts
        self.clock.start()
        if facts.architecture.dropout:
            key_dropout(self.compute.device, facts.config.train.seed, progress.step, self.processes.rank)
        factor = facts.schedule.factor(progress.step)
        self.state.optimizer.set_rates(factor)
        loss = torch.zeros((), device=self.compute.device)
        for micro_step in range(self.split.micro_steps):
            if not self.processes.several:
                self.signals.check()
            x, y = next(self.batches)
            with gradient_sync(self.model, last=micro_step == self.split.micro_steps - 1):
                with self.compute.autocast():
                    micro_loss = self.model(x, y) / self.split.micro_steps
                self.state.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        outcome = self._update(loss)
        progress.step += 1
        progress.rows += self.split.rows
        self.in_flight.append(InFlight(progress.step, factor * facts.schedule.learning_rate, Reading(outcome)))
        self.settle(leave=1)
        self.clock.stop()

    def _update(self, loss: Tensor) -> Tensor:
        """Clip and apply the gradients unless something is not finite; all on the device, nobody waits.

        Returns [loss, gradient norm before clipping, skipped, stop flag, save flag], the same on every rank.
        """
        optimizer, scaler = self.state.optimizer, self.state.scaler
        optimizer.take_gradients()
        if scaler.is_enabled():
            for part in optimizer.torch_optimizers():
                scaler.unscale_(part)
        norm = optimizer.clip(self.state.facts.config.optim.grad_clip, add=self.processes.sum)
        stop = float(self.signals.signum is not None and self.processes.several)
        # filled on the device: a tensor made of a list would be copied there, and the copy waits for all work before it
        wishes = [torch.full_like(loss, wish) for wish in (stop, float(self._minutes_are_up()))]
        shared = self.processes.sum(torch.stack([loss / self.processes.world_size, *wishes]))
        skip = 1 - (torch.isfinite(norm) & torch.isfinite(shared[0])).float()
        optimizer.step(skip)
        if scaler.is_enabled():
            scaler.update()
        optimizer.zero_grad()
        return torch.stack([shared[0], norm, skip, shared[1], shared[2]])

    def settle(self, leave: int = 0) -> None:
        """Look at updates in flight, oldest first, until `leave` are left."""
        while len(self.in_flight) > leave:
            update = self.in_flight.pop(0)
            loss, norm, skipped, stop, save = update.reading.values()
            self._check_finite(update.step, loss, norm, bool(skipped))
            progress = self.state.progress
            progress.window_sum += loss
            progress.window_count += 1
            progress.skipped += bool(skipped)
            self.save_due |= save > 0
            self._report(update, loss, norm)
            if stop and not self.stopping:
                raise StopRequested(self.signals.signum or signal.SIGTERM)  # perhaps another rank's

    def drain(self) -> None:
        """Look at every update in flight; the wait belongs to the last step's time."""
        began = time.perf_counter()
        for update in self.in_flight:
            update.reading.values()
        if self.in_flight:
            self.clock.add(time.perf_counter() - began)
        self.settle()

    def _check_finite(self, step: int, loss: float, norm: float, skipped: bool) -> None:
        if not skipped:
            return
        scaler, lower = self.state.scaler, "Try a lower --learning-rate"
        if not math.isfinite(loss):
            what = f"the loss is {loss} at step {step}. {lower}"
        elif not scaler.is_enabled():
            what = f"the gradient norm is {norm} at step {step}. {lower}"
        elif scaler.get_scale() >= 1:
            return  # the scale was too high: it has been lowered, and that is no error
        else:
            what = f"the loss scale fell below 1 at step {step}: float16 cannot hold these gradients. "
            what += "Try --dtype bfloat16"
        raise NonFiniteError(f"Stopped: {what}.\nThe last good step is {step - 1}; {self._way_on()}")

    def _way_on(self) -> str:
        kept = f"the checkpoint of step {self.saved_step} is kept" if self.saved_step else "no checkpoint was saved yet"
        return f"{kept}. To go on from there: nanogpt resume {typed(self.run.path)} --learning-rate RATE"

    def _report(self, update: InFlight, loss: float, norm: float) -> None:
        progress, config = self.state.progress, self.state.facts.config
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
            tokens=rows * self.state.facts.architecture.block_size,
            epoch=self.order.epoch(rows),
            skipped=progress.skipped,
            memory_gib=memory_gib(self.compute.device),
            **self.clock.figures(self.batches.waited_s, window=window_loss is not None),
        )
        progress.time_s = report.time_s
        self.view.step(report)
        if window_loss is not None:
            self._log({"step": report.step, "loss": window_loss} | {name: getattr(report, name) for name in LOGGED})

    def _log(self, line: dict[str, Any]) -> None:
        self.metrics.append(line)
        self.trackers.log(line)

    def evaluate(self) -> None:
        """Mean loss on both splits; a best one is saved, the training state first."""
        progress = self.state.progress
        if progress.step == progress.evaluated_step:
            return
        self.drain()
        total, done = self._passes(self.val_windows) + self._passes(self.train_windows), itertools.count()

        def tick() -> None:
            if not self.processes.several:
                self.signals.check()
            self.view.evaluating(next(done), total)

        val_loss, train_loss = (self._windows_loss(windows, tick) for windows in (self.val_windows, self.train_windows))
        if not math.isfinite(val_loss):
            what = f"the validation loss is {val_loss} after step {progress.step}"
            raise NonFiniteError(f"Stopped: {what}, which was not saved; {self._way_on()}")
        progress.evaluated_step = progress.step
        before = progress.best_loss, progress.best_step
        best = before[0] is None or val_loss < before[0]
        if best:
            progress.best_loss, progress.best_step = val_loss, progress.step
        self._log({"step": progress.step, "val_loss": val_loss, "train_loss": train_loss})
        self.view.evaluated(EvalReport(progress.step, val_loss, train_loss, best))
        if best and not self.save(must=self.at_end, best=True):
            progress.best_loss, progress.best_step = before  # the next evaluation may still become the best on disk

    @property
    def saved_step(self) -> int:
        """The update that a resume would go on after."""
        return self.saved[0]

    def _passes(self, windows: Windows) -> int:
        return -(-len(windows.offsets) // (self.split.micro_batch * self.processes.world_size))

    def _windows_loss(self, windows: Windows, tick: Callable[[], None]) -> float:
        return windows_loss(
            self.model,
            windows.tokens,
            windows.offsets,
            block_size=self.state.facts.architecture.block_size,
            micro_batch=self.split.micro_batch,
            compute=self.compute,
            processes=self.processes,
            progress=tick,
        )

    def _time_to_save(self) -> bool:
        step, config = self.state.progress.step, self.state.facts.config
        if (step, self.state.progress.evaluated_step) == self.tried:
            return False
        milestone = config.train.keep_every and step % config.train.keep_every == 0
        return bool(self.at_end or self.save_due or milestone or step % save_interval(config) == 0)

    def _minutes_are_up(self) -> bool:
        minutes = self.state.facts.config.train.save_minutes
        return self.processes.main and minutes > 0 and self.clock.since_save() > 60 * minutes

    def save(self, *, must: bool, best: bool = False) -> bool:
        """Write ckpt.pt, a milestone where one is due, and then best.pt if this step is the `best`.

        A full disk in the middle of a run is a warning, and False: the older checkpoint stays and the next save tries
        again. At the end, or when a signal stops the run (`must`), it is an error.
        """
        self.drain()
        step, settings = self.state.progress.step, self.state.facts.config.train
        self.save_due, self.tried = False, (step, self.state.progress.evaluated_step)
        self.clock.saved()
        try:
            checkpoint = self.state.checkpoint(self.processes)
        except NonFiniteError as error:
            error.args = (f"{error} {self._way_on()}",)
            raise

        def write() -> None:
            began = time.perf_counter()
            self.metrics.sync()
            previous = self.run.previous if settings.keep_previous else None
            save_checkpoint(checkpoint, self.run.checkpoint, previous=previous)
            self.view.saved(step, self.run.checkpoint, time.perf_counter() - began)

        def write_milestone() -> None:
            keep_milestone(self.run.checkpoint, self.run.milestone(step), step, settings.keep_every)

        def write_best() -> None:
            save_checkpoint(weights_only(checkpoint), self.run.best)

        if not self._written(f"Step {step}", write, must):
            return False
        self.saved = self.tried
        self._written(f"The milestone of step {step}", write_milestone, must)
        # ckpt.pt says that its own step is the best, so a kill here loses nothing
        return not best or self._written(f"best.pt of step {step}", write_best, must)

    def _written(self, what: str, write: Callable[[], None], must: bool) -> bool:
        """Let rank 0 write; the others wait, and learn whether it could."""
        problem = None
        if self.processes.main:
            try:
                write()
            except OSError as error:
                problem = f"{what} was not saved: {self._reason(error)}."
        problem = self.processes.from_main(problem)
        if problem and must:
            path = self.run.path
            back = f"When there is room again: nanogpt resume {typed(path)}"
            if not path.exists():
                back = "If it was moved, it goes on from its last checkpoint there: nanogpt resume NEW-PLACE"
            failed = NanogptError(f"{problem} {back}")
            failed.shared = True
            raise failed
        if problem:
            self.view.warn(f"{problem} Training goes on; the next save tries again.")
        return problem is None

    def _reason(self, error: OSError) -> str:
        if not self.run.path.exists():
            return f"the run directory {self.run.path} is gone, and its checkpoints with it"
        why = "the disk is full" if isinstance(error, DiskFullError) else "the run directory cannot be written"
        kept = f"the checkpoint of step {self.saved_step} stays" if self.saved_step else "there is no checkpoint yet"
        return f"{why} ({error}); {kept}"

    def _announce_stop(self, signal_name: str) -> None:
        where = "step" if self.processes.several else "micro-step"
        self.view.warn(f"{signal_name}: stopping after this {where}, then saving. Once more stops at once.")

    def _save_and_stop(self, stop: StopRequested) -> None:
        self.stopping = True
        self.state.optimizer.zero_grad()  # of an unfinished update: resume takes the step again
        self.save(must=True)
        step = self.state.progress.step
        raise StoppedError(
            f"Stopped by {stop} after step {step}, which is saved. To go on: nanogpt resume {typed(self.run.path)}",
            stop.signum,
        )
