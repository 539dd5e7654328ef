"""Beginning a planned run: make or take over its directory, build what the loop needs, train, clean up."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import free_bytes, own_folder, remove_leftovers, sync_folder, write_toml
from nanogpt_cli.machine.compiling import compile_model
from nanogpt_cli.machine.device import device_name
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.machine.memory import explain_out_of_memory
from nanogpt_cli.machine.peaks import note_mfu
from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token
from nanogpt_cli.runs.checkpoint import (
    Checkpoint,
    RunProgress,
    keep_milestone,
    link_or_copy,
    load_training_state,
    save_checkpoint,
    weights_only,
)
from nanogpt_cli.runs.directory import RunDirectory, create_run
from nanogpt_cli.runs.environment import environment, with_resume
from nanogpt_cli.runs.lock import kernel_locks, lock
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.runs.recovery import best_problem, newest_state
from nanogpt_cli.training.init_from import initial_weights
from nanogpt_cli.training.loop import Training
from nanogpt_cli.training.plan import Plan, memory_advice
from nanogpt_cli.training.resume import read_state
from nanogpt_cli.training.saving import Saver
from nanogpt_cli.training.speed import StepClock
from nanogpt_cli.training.state import TrainingState, build_state
from nanogpt_cli.training.step import TrainStep
from nanogpt_cli.training.validation import Samples, Validation
from nanogpt_cli.view import make_view
from nanogpt_cli.view.plain import Start, View
from nanogpt_cli.view.trackers import Trackers, open_trackers

LACKING = (
    (sync_folder, "syncs no folders: a power cut, not a kill, may take the newest save away"),
    (kernel_locks, "has no locks: of two commands typed in the same instant both may write this run"),
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunDirectory
    step: int
    best_loss: float | None
    already_finished: bool = False
    ended_by: str = ""  # "--patience", or what kept this life of the run from its end


def start(plan: Plan, *, view: View | None = None) -> Outcome:
    """Train the planned run to its end, here and in this process; raises what `open_run` and `train_run` do."""
    with open_run(plan):
        return train_run(plan, view=view)


@contextlib.contextmanager
def open_run(plan: Plan, *, new_life: bool = True) -> Iterator[RunDirectory]:
    """The planned run's directory, made or taken over; its lock is held meanwhile.

    Args:
        new_life: note in environment.toml that the run goes on here; a launcher has done so for its ranks.

    Raises:
        UserError: it is taken, or in use.
        NanogptError: there is no room for a checkpoint.
    """
    folder = next(path for path in (plan.run_path, *plan.run_path.absolute().parents) if path.exists())
    needed = sum(checkpoint_bytes(plan.config.model, plan.config.optim.optimizer).values())
    free = free_bytes(folder)
    if free < needed and not plan.finished:  # no training whose outcome could not be kept
        raise NanogptError(
            f"The disk of {plan.run_path} is full: {needed / 1e6:,.2f} MB are needed for a checkpoint, "
            f"{free / 1e6:,.2f} MB are free. Make room, or choose another place with --run."
        )
    run = _make_run(plan) if plan.makes_run else RunDirectory(plan.run_path)
    with lock(run.path):
        if not plan.makes_run:
            _take_over(plan, run, new_life)
        yield run


def train_run(plan: Plan, processes: Processes = ALONE, *, view: View | None = None) -> Outcome:
    """Train a run that `open_run` opened to the end, as one of `processes`; all have the same plan.

    Raises:
        StoppedError, NonFiniteError, NanogptError: see `Training.train`; also when memory was not enough.
    """
    run = RunDirectory(plan.run_path)
    if plan.resume_point is not None and plan.finished:
        return Outcome(run, plan.first_step, plan.resume_point.progress.best_loss, True)
    shown = view or make_view(rank=processes.rank, log_file=run.log_file)
    try:
        with explain_out_of_memory(memory_advice(plan)):
            return _train(plan, run, shown, processes.on_device(plan.compute, plan.backend))
    finally:
        shown.close()


def _make_run(plan: Plan) -> RunDirectory:
    def fill(run: RunDirectory) -> None:
        if plan.resume_point is not None:  # a fork: its first state is there before its name is
            state = {**read_state(plan.resume_point.path), "progress": asdict(plan.resume_point.progress)}
            save_checkpoint(state, run.checkpoint)
            _finish_last_save(state, run, keep_every=0)

    return create_run(
        plan.run_path,
        config=plan.config_toml(),
        tokenizer=_tokenizer_toml(plan),
        environment=environment(plan.compute.describe()),
        fill=fill,
    )


def _tokenizer_toml(plan: Plan) -> dict[str, Any] | None:
    tokenizer = plan.data_set.tokenizer
    return tokenizer.to_toml() if tokenizer else None


def _take_over(plan: Plan, run: RunDirectory, new_life: bool) -> None:
    """Make an existing run consistent with the state it goes on from; needs its lock."""
    source = newest_state(run)
    saved = source.checkpoint
    if (saved["step"] if saved else 0) != plan.first_step:  # before we had its lock
        why = source.problems[0] if source.problems else f"{run.path}: another process continued this run meanwhile."
        raise UserError(f"{why} Type the command again.")
    for folder in (run.path, run.logs):
        remove_leftovers(folder)
    if plan.resume_point is not None and plan.resume_point.path != run.checkpoint:
        if run.checkpoint.exists():
            run.checkpoint.rename(run.path / "ckpt-damaged.pt")  # it must not become ckpt-previous.pt
        link_or_copy(run.previous, run.checkpoint)
    evaluated_step = 0
    if plan.resume_point is not None and saved is not None:
        progress = plan.resume_point.progress
        _finish_last_save({**saved, "progress": asdict(progress)}, run, plan.config.train.keep_every)
        evaluated_step = progress.evaluated_step
    if plan.finished:
        return
    write_toml(run.config, plan.config_toml())
    if new_life:
        own_folder(run.logs)  # somebody may have tidied up
        write_toml(run.environment, with_resume(run.environment, environment(plan.compute.describe())))
    for path in (run.metrics, run.samples):
        log = MetricsLog(path)
        log.keep_through(plan.first_step, evaluated_step)
        log.close()


def _finish_last_save(checkpoint: Checkpoint, run: RunDirectory, keep_every: int) -> None:
    """What a kill right after ckpt.pt was written prevents: its milestone, and best.pt where this step is the best."""
    keep_milestone(run.checkpoint, run.milestone(checkpoint["step"]), checkpoint["step"], keep_every)
    if checkpoint["progress"]["best_step"] == checkpoint["step"] and best_problem(run.best, checkpoint):
        save_checkpoint(weights_only(checkpoint), run.best)


def _train(plan: Plan, run: RunDirectory, view: View, processes: Processes) -> Outcome:
    with plan.compute.process_settings(), contextlib.ExitStack() as stack:
        lasting = {
            "eval_windows": plan.eval_windows,
            "tokenizer": _tokenizer_toml(plan),
            "data": plan.data_set.fingerprint(),
            "layout": _layout(plan, processes, view),
        }
        state = _first_state(plan, run, processes, lasting)
        model = state.model if plan.sharded else processes.wrap(state.model, plan.compute)
        if plan.compute.compile:
            _compile(plan, model, view)
        progress, main = state.progress, processes.main
        metrics = MetricsLog(run.metrics)  # rank 0 alone writes to it
        if main:
            stack.enter_context(contextlib.closing(metrics))
        trackers = open_trackers(plan.config, run, progress.step, view.warn) if main else Trackers()
        stack.enter_context(contextlib.closing(trackers))
        batches = stack.enter_context(
            Batches(
                plan.data_set.train,
                plan.order,
                plan.split,
                processes.rank,
                first_row=progress.rows,
                vocab_size=plan.config.model.vocab_size or 0,
                device=plan.compute.device,
            )
        )
        all_peaks = plan.peak[0] * processes.world_size if plan.peak else None
        train_step = TrainStep(state, model, plan.split, plan.compute, processes)
        training = Training(
            state=state,
            schedule=plan.schedule,
            train_step=train_step,
            batches=batches,
            validation=Validation(plan.data_set, plan.eval_windows, train_step),
            saver=Saver(state, processes, run, view, metrics, (progress.step, progress.evaluated_step)),
            view=view,
            metrics=metrics,
            trackers=trackers,
            samples=_samples(plan, state, run, view, stack) if main else None,
            clock=StepClock(plan.tokens_per_step, flops_per_token(plan.config.model), all_peaks, progress.time_s),
        )
        lacking = [words for works, words in LACKING if not works(run.path)] if main else []
        if lacking:
            view.warn(f"this file system {', and '.join(lacking)}")
        training.train(_what_is_shown(plan, run, progress))
        mfu = training.clock.mean_mfu()
        if main and mfu is not None and plan.peak and plan.peak[1] != "given":
            note_mfu(plan.compute.device, plan.compute.dtype_name, plan.config.model.n_embd, mfu)
    return Outcome(run, progress.step, progress.best_loss, ended_by=training.ended_by)


def _samples(
    plan: Plan, state: TrainingState, run: RunDirectory, view: View, stack: contextlib.ExitStack
) -> Samples | None:
    """None where they are not wanted, the model is in pieces, or nobody could read its ids."""
    tokenizer = plan.data_set.tokenizer
    if plan.sharded or tokenizer is None or not plan.config.log.sample:
        return None
    log = stack.enter_context(contextlib.closing(MetricsLog(run.samples)))
    return Samples(state.model, tokenizer, plan.config.train.seed, log, view)


def _what_is_shown(plan: Plan, run: RunDirectory, progress: RunProgress) -> Start:
    peak, source = plan.peak or (None, "")
    return Start(
        run_name=run.name,
        first_step=progress.step,
        max_iters=plan.config.train.max_iters,
        tokens_per_step=plan.tokens_per_step,
        vocab_size=plan.config.model.vocab_size or 0,
        device=plan.compute.describe(),
        peak_tflops=peak / 1e12 if peak else None,
        peak_source=source,
        best_loss=progress.best_loss,
    )


def _first_state(plan: Plan, run: RunDirectory, processes: Processes, lasting: dict[str, Any]) -> TrainingState:
    """The training state to go on from: of the run's checkpoint, of given weights, or drawn from the seed."""
    config, compute = plan.config, plan.compute
    weights: dict[str, torch.Tensor] | None = {}
    if plan.resume_point is None:
        weights = initial_weights(config) if config.train.init_from is not None else None
    state = build_state(config, compute, processes, weights=weights, lasting=lasting)
    if plan.resume_point is None:
        return state
    # a mapped file and its copy would be in memory together: where nobody shares it, keep the tensors that were read
    adopt = compute.device.type == "cpu" and not processes.distributed
    saved = load_training_state(run.checkpoint, mmap=not adopt)
    state.restore({**saved, "progress": asdict(plan.resume_point.progress)}, str(plan.resume_point.path), adopt=adopt)
    return state


def _compile(plan: Plan, model: torch.nn.Module, view: View) -> None:
    """torch.compile, or the reason why not: a warning where it was our idea, an error where the user asked for it."""
    problem = compile_model(model, plan.compute, plan.split.micro_batch, plan.config.model.block_size)
    if problem and plan.config.system.compile == "on":
        raise NanogptError(f"--compile on: torch.compile failed here: {problem}. Use --compile auto or off.")
    if problem:
        view.warn(f"torch.compile failed here ({problem}); going on without it")


def _layout(plan: Plan, processes: Processes, view: View) -> dict[str, Any]:
    """What must be the same for a resumed run to be bit-identical; what differs from the run so far is said.

    The run keeps the number of CPU threads that it had: others add up in another order.
    """
    saved = plan.resume_point.layout if plan.resume_point else {}
    here: dict[str, Any] = {
        "device": plan.compute.device.type,
        "ranks": processes.world_size,
        "micro_batch": plan.split.micro_batch,
        "dtype": plan.compute.dtype_name,
        "compile": plan.compute.compile,
        "torch": str(torch.__version__),
    }
    if processes.distributed:
        here["parallel"] = plan.config.system.parallel
    if plan.compute.device.type == "cpu":
        if saved.get("threads") and saved.get("ranks") == processes.world_size:
            torch.set_num_threads(saved["threads"])
        here["threads"] = torch.get_num_threads()
    else:
        here |= {"deterministic": plan.compute.deterministic, "name": device_name(plan.compute.device)}
    changed = [f"{key} {saved[key]} -> {here[key]}" for key in here if key in saved and saved[key] != here[key]]
    if changed and saved.get("ranks"):
        view.warn(f"not bit-identical with the run so far, only equal to rounding: {'; '.join(changed)}")
    return here
