"""When a run saves, what it writes, and in words what could not be written."""

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from nanogpt_cli.config.derived import save_interval
from nanogpt_cli.config.setting import shown
from nanogpt_cli.errors import NanogptError, NonFiniteError, UserError, typed
from nanogpt_cli.files import DiskFullError
from nanogpt_cli.machine.distributed import Processes
from nanogpt_cli.runs.checkpoint import link_or_copy, save_checkpoint, weights_only
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.training.state import TrainingState
from nanogpt_cli.view.plain import View

SLURM_MARGIN = 30.0  # seconds before the end of the job, beside what saves take: the last step, and closing


def deadline(max_minutes: float) -> tuple[float, str]:
    """When this life of a run has to be over, and what says so: --max-minutes, or its SLURM job that is ended then."""
    at, what = time.time() + 60 * max_minutes if max_minutes else math.inf, "--max-minutes"
    if job_ends := os.environ.get("SLURM_JOB_END_TIME"):
        if not job_ends.isdecimal():
            wrong = UserError(f"SLURM_JOB_END_TIME is {shown(job_ends)}: seconds since 1970 are needed. Unset it.")
            wrong.shared = True
            raise wrong
        if int(job_ends) - SLURM_MARGIN < at:
            return int(job_ends) - SLURM_MARGIN, "the end of the SLURM job"
    return at, what


@dataclass
class Saver:
    """Writes the checkpoints of a run. Rank 0 writes; the others wait, and learn whether it could."""

    state: TrainingState
    processes: Processes
    run: RunDirectory
    view: View
    metrics: MetricsLog
    saved: tuple[int, int]  # step and evaluated step that the last checkpoint holds
    wished: bool = False  # rank 0's clock says so, and every rank has heard

    def __post_init__(self) -> None:
        self.tried, self._last = self.saved, time.perf_counter()  # of the last attempt
        self.ends_at, self.ended_by = deadline(self.state.config.train.max_minutes)
        self._longest_save = 0.0
        self._owes_milestone = False  # it could not be linked when it was due

    def is_due(self) -> bool:
        """Whether the state of now should be saved and has not been tried yet."""
        progress, config = self.state.progress, self.state.config
        if (progress.step, progress.evaluated_step) == self.tried:
            return False
        at_end = progress.step >= config.train.max_iters
        by_count = self._is_milestone(progress.step) or progress.step % save_interval(config) == 0
        return at_end or self.wished or by_count

    def minutes_are_up(self) -> bool:
        """Whether rank 0 wishes to save by the clock; false on the others."""
        minutes = self.state.config.train.save_minutes
        return self.processes.main and minutes > 0 and time.perf_counter() - self._last > 60 * minutes

    def time_is_up(self) -> bool:
        """Whether rank 0 finds it time to save and end: the next save may take as long as any, and must fit in."""
        return self.processes.main and time.time() + 2 * self._longest_save > self.ends_at

    def save(self, *, must: bool, best: bool = False) -> bool:
        """Write ckpt.pt, a milestone where one is due, and then best.pt if this step is the `best`.

        A full disk in the middle of a run is a warning, and False: the older checkpoint stays and the next save tries
        again. At the end, or when a signal stops the run (`must`), it is an error.
        """
        progress, settings = self.state.progress, self.state.config.train
        step = progress.step
        self.wished, self.tried, self._last = False, (step, progress.evaluated_step), time.perf_counter()
        try:
            checkpoint = self.state.checkpoint(self.processes)
        except NonFiniteError as error:
            error.args = (f"{error} {self.way_on()}",)
            raise

        def write() -> None:
            began = time.perf_counter()
            self.metrics.sync()
            previous = self.run.previous if settings.keep_previous else None
            save_checkpoint(checkpoint, self.run.checkpoint, previous=previous)
            seconds = time.perf_counter() - began
            self._longest_save = max(self._longest_save, seconds)
            self.view.saved(step, self.run.checkpoint, seconds)

        if self._owes_milestone:  # ckpt.pt is still of its step
            self._keep_milestone(must=False)
        again = "the next save tries again" + ", without this milestone" * self._is_milestone(step)
        if not self._written(f"Step {step}", write, must, again):
            return False
        self.saved, self._owes_milestone = self.tried, False
        if self._is_milestone(step):
            self._keep_milestone(must)
        if not best:
            return True
        # ckpt.pt says that its own step is the best, so a kill here loses nothing
        write_best = functools.partial(save_checkpoint, weights_only(checkpoint), self.run.best)
        return self._written(f"best.pt of step {step}", write_best, must, "a later evaluation tries again")

    def _is_milestone(self, step: int) -> bool:
        every = self.state.config.train.keep_every
        return every > 0 and step > 0 and step % every == 0

    def _keep_milestone(self, must: bool) -> None:
        step = self.saved[0]
        link = functools.partial(link_or_copy, self.run.checkpoint, self.run.milestone(step))
        self._owes_milestone = not self._written(f"The milestone of step {step}", link, must)

    def _written(
        self, what: str, write: Callable[[], object], must: bool, again: str = "the next save tries again"
    ) -> bool:
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
            self.view.warn(f"{problem} Training goes on; {again}.")
        return problem is None

    def _reason(self, error: OSError) -> str:
        if not self.run.path.exists():
            return f"the run directory {self.run.path} is gone, and its checkpoints with it"
        why = "the disk is full" if isinstance(error, DiskFullError) else "the run directory cannot be written"
        return f"{why} ({error}); {self._kept()}"

    def way_on(self) -> str:
        """For a run that went bad: what is kept, and what to type."""
        return f"{self._kept()}. To go on from there: nanogpt resume {typed(self.run.path)} --learning-rate RATE"

    def _kept(self) -> str:
        step = self.saved[0]
        return f"the checkpoint of step {step} stays" if step else "no checkpoint was saved yet"
