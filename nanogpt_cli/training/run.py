"""A run from a request to its end, in one process or several.

One process plans, opens the run directory, trains. With `--gpus N` it is a launcher instead: it plans, shows the plan,
makes the run directory and starts N ranks that continue it (machine/launch.py). torchrun and srun start ranks, too.

Of ranks, rank 0 plans, opens the run and keeps its lock; the others take its plan, open the data and choose their
device. What one cannot do, all are told before any trains. An error that all have is told by rank 0, one of a single
rank by that rank; where there is a launcher of ours, by the launcher alone.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from nanogpt_cli.errors import NanogptError, StoppedError
from nanogpt_cli.files import write_bytes
from nanogpt_cli.machine.device import keep_freed_memory
from nanogpt_cli.machine.distributed import ALONE, Processes, join, lost_contact
from nanogpt_cli.machine.rank_env import Nodes, RankEnv, read_rank_env
from nanogpt_cli.progress import Progress
from nanogpt_cli.runs.checkpoint import RunProgress
from nanogpt_cli.runs.recovery import newest_state
from nanogpt_cli.training.plan import Peak, Plan, plan_of_rank
from nanogpt_cli.training.request import Request
from nanogpt_cli.training.start import Outcome, open_run, start, train_run
from nanogpt_cli.training.state import out_of_patience

ORPHAN_SECONDS = 20.0  # how long a rank whose launcher was killed has to save


@dataclass(frozen=True)
class Command:
    """Doing what was asked for, as the process that this one is.

    Args:
        machines: where processes are to be launched.
        progress: of planning, entered for it.
        show: shows the plan to the user; called at most once.
        say: tells the user something else.
    """

    request: Request
    machines: Nodes
    dry_run: bool
    progress: AbstractContextManager[Progress]
    show: Callable[[Plan], None]
    say: Callable[[str], None]

    def run(self) -> tuple[Plan, Outcome] | None:
        """Plan and outcome in the one process that should report the end; None in the others, and after a dry run.

        Raises:
            NanogptError: see `start` and `launch`.
        """
        env = replace(read_rank_env(), machines=self.machines.count)
        if env.distributed:
            return self._as_rank(env)
        if self.machines.number > 0 and not self.dry_run:  # machine 0 plans
            self._launch("RUN", self.request.processes(), None)
            return None
        with self.progress as planning:
            plan = self.request.plan(planning, env)
        self.show(plan)
        if self.dry_run:
            return None
        keep_freed_memory(plan.compute.device)  # for good: only a command may
        if plan.split.world_size == 1 or (plan.finished and not plan.makes_run):
            return plan, start(plan)
        return plan, self._as_launcher(plan)

    def _as_launcher(self, plan: Plan) -> Outcome:
        with open_run(plan) as opened:
            pass  # it is complete; rank 0 takes the lock from here
        self._launch(str(opened.path), plan.config.system.gpus, plan.peak)
        newest = newest_state(opened).checkpoint
        assert newest is not None
        progress = RunProgress(**newest["progress"])
        ended_by = ""
        if progress.step < plan.config.train.max_iters:
            ended_by = "--patience" if out_of_patience(plan.config, progress) else "its time limit"
        return Outcome(opened, progress.step, progress.best_loss, ended_by=ended_by)

    def _launch(self, run: str, count: int, peak: Peak | None) -> None:
        from nanogpt_cli.machine.launch import launch  # which a lone process need not import

        launch(run, count, self.machines, peak, self.say)

    def _as_rank(self, env: RankEnv) -> tuple[Plan, Outcome] | None:
        processes, plan, outcome = ALONE, None, None
        _end_with(env.launcher.pid if env.launcher else os.getppid())
        try:
            processes = join(env, (env.launcher.machines if env.launcher else self.machines).timeout)
            with contextlib.ExitStack() as stack:
                plan = self._common_plan(env, processes, stack)
                if not self.dry_run:
                    keep_freed_memory(plan.compute.device)
                    outcome = train_run(plan, processes)
            processes.leave()
        except Exception as error:
            if isinstance(error, NanogptError) and error.shared:
                processes.leave()  # rank 0 may have things to close yet
            _tell(env, error)
        except KeyboardInterrupt:
            sys.exit(130)  # before training began; whoever launched us says so
        if env.launcher:
            _end(0)  # the launcher has the last word
        return (plan, outcome) if outcome and processes.main else None

    def _common_plan(self, env: RankEnv, processes: Processes, stack: contextlib.ExitStack) -> Plan:
        """Rank 0 plans and opens the run, whose lock `stack` keeps; the others take its plan for their device."""
        plan: Plan | None = None
        problem: NanogptError | None = None
        if processes.main:
            try:
                with self.progress as planning:
                    plan = self.request.plan(planning, env)
                if not env.launcher:  # which has shown it
                    self.show(plan)
                if not self.dry_run:
                    stack.enter_context(open_run(plan, new_life=env.launcher is None))
            except NanogptError as error:
                problem = error
        processes.agree(problem)
        common = processes.from_main(plan)
        assert common is not None
        if not processes.main:
            try:
                common = plan_of_rank(common, env)
            except NanogptError as error:
                problem = error
        processes.agree(problem)
        return common


def _end_with(parent: int) -> None:
    """Save and end soon after the parent process has gone: nobody is left to pass a signal on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _tell(env: RankEnv, error: Exception) -> NoReturn:
    """End this rank so that the user hears of `error` once: from our launcher if it lives, else from here."""
    lost = lost_contact(error)
    code = error.exit_code if isinstance(error, NanogptError) else 1
    shared = isinstance(error, NanogptError) and error.shared
    if isinstance(error, NanogptError):
        text = str(error) if shared or env.rank == 0 else f"rank {env.rank}: {error}"
    elif lost:
        text = f"rank {env.rank} lost contact with another, whose own error says more ({str(error).split('. ')[0]})"
    else:
        text = f"rank {env.rank} failed:\n{traceback.format_exc()}"
    if env.launcher is not None and os.getppid() == env.launcher.pid:
        now, crash = time.time(), not isinstance(error, NanogptError)
        record = {"message": text, "exit_code": code, "crash": crash, "lost": lost, "time": now, "timestamp": int(now)}
        write_bytes(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps(record).encode())
    elif env.rank == 0:
        raise error
    elif not shared and not isinstance(error, StoppedError):
        print(f"error: {text}", file=sys.stderr, flush=True)
    _end(code)


def _end(code: int) -> NoReturn:
    """End now: what torch's threads still do may block or abort an orderly end, and all that matters is on disk."""
    with contextlib.suppress(OSError):  # nobody listens any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
