"""The part this process plays in a run: all of it alone, launcher of the ranks of this machine, or one of the ranks."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from nanogpt_cli.config.layers import Layer
from nanogpt_cli.data.tokens.files import difference
from nanogpt_cli.errors import NanogptError, StoppedError, UserError
from nanogpt_cli.machine.distributed import ALONE, Processes, join, lost_contact
from nanogpt_cli.machine.rank import Machines, Place, find_place
from nanogpt_cli.runs.recovery import newest_state
from nanogpt_cli.training.plan import Plan
from nanogpt_cli.training.resume import plan_resume
from nanogpt_cli.training.start import Outcome, opened, start, train_run

ORPHAN_SECONDS = 20.0  # how long a rank whose launcher was killed has to save


class MakePlan(Protocol):
    """Works out the run, given this process's place or the number of machines."""

    def __call__(self, *, place: Place = ..., machines: int = ...) -> Plan: ...


def conduct(
    make_plan: MakePlan,
    *,
    processes: Callable[[], int],
    machines: Machines,
    dry_run: bool,
    show: Callable[[Plan], None],
    say: Callable[[str], None],
) -> tuple[Plan, Outcome] | None:
    """Carry a run out, in this process or several.

    Args:
        make_plan: called in the one process that decides: the only one, the launcher of machine 0, or rank 0.
        processes: how many to launch here, for the launchers of other machines than 0.
        show: shows the plan to the user; called at most once.
        say: tells the user something else.

    Returns:
        plan and outcome in the one process that should report the end; None in the others, and after a dry run.

    Raises:
        NanogptError: see `start` and `launch`.
    """
    place = find_place()
    if place.several:
        return _as_rank(place, make_plan, machines, dry_run, show)
    if machines.number > 0 and not dry_run:
        launch_workers("RUN", processes(), machines, say)
        return None
    plan = make_plan(machines=machines.count)
    show(plan)
    if dry_run:
        return None
    if plan.split.world_size == 1:
        return plan, start(plan)
    with opened(plan) as run:
        pass  # it is complete; rank 0 takes the lock from here
    if plan.finished and not plan.makes_run:
        return plan, start(plan)
    plan.checkpoint = plan.initial_weights = None
    launch_workers(str(run.path), plan.split.world_size // machines.count, machines, say)
    newest = newest_state(run).checkpoint
    assert newest is not None
    return plan, Outcome(run, newest["step"], newest["progress"]["best_loss"])


def launch_workers(run: str, count: int, machines: Machines, say: Callable[[str], None]) -> None:
    """`launch`, whose module a lone process need not import."""
    from nanogpt_cli.machine.launch import launch

    launch(run, count, machines, say)


def _as_rank(
    place: Place, make_plan: MakePlan, machines: Machines, dry_run: bool, show: Callable[[Plan], None]
) -> tuple[Plan, Outcome] | None:
    launched, processes = place.launcher is not None, ALONE
    _end_with(place.launcher.pid if place.launcher else os.getppid())
    try:
        processes = join(place, place.launcher.machines.timeout if place.launcher else machines.timeout)
        with contextlib.ExitStack() as stack:
            plan = _common_plan(place, processes, make_plan, dry_run, None if launched else show, stack)
            outcome = train_run(plan, processes) if plan and not dry_run else None
        processes.leave()
    except Exception as error:
        if isinstance(error, NanogptError) and error.shared:
            processes.leave()  # rank 0 may have things to close yet
        _tell(place, error)
    except KeyboardInterrupt:
        sys.exit(130)  # before training began; whoever launched us says so
    if launched:
        _end(0)  # the launcher has the last word
    return (plan, outcome) if plan and outcome and processes.main else None


def _common_plan(
    place: Place,
    processes: Processes,
    make_plan: MakePlan,
    dry_run: bool,
    show: Callable[[Plan], None] | None,
    stack: contextlib.ExitStack,
) -> Plan | None:
    """Rank 0 plans and opens the run, whose lock `stack` keeps; the others find what they need there.

    After a dry run the others have none.
    """
    plan, problem = None, None
    if processes.main:
        try:
            plan = make_plan(place=place)
            if show:
                show(plan)
            if not dry_run:
                stack.enter_context(opened(plan))
        except NanogptError as error:
            problem = error
    processes.agree(problem)
    told = (str(plan.run_path), plan.data_set.fingerprint()) if plan is not None and not dry_run else None
    path, data = processes.from_main(told) or ("", {})
    if plan is None and path:
        try:
            plan = plan_resume(path, Layer("", {}), place=place)
            differs = difference(data, plan.data_set.fingerprint())
            if differs:
                raise UserError(f"{plan.data_set.folder} holds other data than on machine 0: {differs}.")
        except NanogptError as error:
            problem = error
    processes.agree(problem)
    return plan


def _end_with(parent: int) -> None:
    """Save and end soon after the parent process has gone: nobody is left to pass a signal on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _tell(place: Place, error: Exception) -> NoReturn:
    """End this rank so that the user hears of `error` once: from our launcher if it lives, else from here."""
    lost = lost_contact(error)
    code = error.exit_code if isinstance(error, NanogptError) else 1
    shared = isinstance(error, NanogptError) and error.shared
    if isinstance(error, NanogptError):
        text = str(error) if shared or place.rank == 0 else f"rank {place.rank}: {error}"
    elif lost:
        text = f"rank {place.rank} lost contact with another, whose own error says more ({str(error).split('. ')[0]})"
    else:
        text = f"rank {place.rank} failed:\n{traceback.format_exc()}"
    if place.launcher is not None and os.getppid() == place.launcher.pid:
        now, crash = time.time(), not isinstance(error, NanogptError)
        record = {"message": text, "exit_code": code, "crash": crash, "lost": lost, "time": now, "timestamp": int(now)}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record), encoding="utf-8")
    elif place.rank == 0:
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
