"""Carrying a plan out: make or take over the run directory, build what the loop needs, train, clean up."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.data_set import Tokens
from nanogpt_cli.data.tokens.rows import evaluation_offsets
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import remove_leftovers, write_toml
from nanogpt_cli.keyed import Purpose, seed32
from nanogpt_cli.machine.device import compile_model
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.machine.sharding import load_full_state_dict, shard
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token
from nanogpt_cli.runs.checkpoint import (
    Checkpoint,
    keep_milestone,
    link_or_copy,
    load_checkpoint,
    save_checkpoint,
    weights_only,
)
from nanogpt_cli.runs.directory import RunDirectory, create_run, lock
from nanogpt_cli.runs.environment import environment
from nanogpt_cli.runs.form import Progress
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.runs.recovery import best_problem, newest_state
from nanogpt_cli.training import out_of_memory
from nanogpt_cli.training.loop import Training, Windows
from nanogpt_cli.training.optimizer import Optimizer
from nanogpt_cli.training.plan import Plan
from nanogpt_cli.training.speed import StepClock
from nanogpt_cli.training.state import Facts, TrainingState
from nanogpt_cli.view import make_view
from nanogpt_cli.view.plain import Start, View
from nanogpt_cli.view.trackers import Trackers, open_trackers


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunDirectory
    step: int
    best_loss: float | None
    already_finished: bool = False


def start(plan: Plan, *, view: View | None = None) -> Outcome:
    """Train the planned run to its end, here and in this process.

    Raises:
        UserError: the run directory is taken, or in use.
        StoppedError, NonFiniteError, NanogptError: see `Training.train`.
    """
    with opened(plan):
        return train_run(plan, view=view)


@contextlib.contextmanager
def opened(plan: Plan) -> Iterator[RunDirectory]:
    """The planned run's directory, made or taken over; its lock is held meanwhile.

    Raises:
        UserError: it is taken, or in use.
        NanogptError: there is no room for a checkpoint.
    """
    _check_room(plan)
    run = _make_run(plan) if plan.makes_run else RunDirectory(plan.run_path)
    with lock(run):
        if not plan.makes_run:
            _take_over(plan, run)
        yield run


def train_run(plan: Plan, processes: Processes = ALONE, *, view: View | None = None) -> Outcome:
    """Train a run that `opened` gave to the end, as one of `processes`.

    Raises:
        StoppedError, NonFiniteError, NanogptError: see `Training.train`; also when memory was not enough.
    """
    run = RunDirectory(plan.run_path)
    if processes.from_main(plan.finished and not plan.makes_run):
        assert plan.checkpoint is not None
        return Outcome(run, plan.first_step, plan.checkpoint["progress"]["best_loss"], True)
    shown = view or make_view(rank=processes.rank, log_file=run.log_file)
    try:
        with out_of_memory.named(out_of_memory.for_training(plan)):
            return _train(plan, run, shown, processes.on_device(plan.compute, plan.backend))
    finally:
        shown.close()


def _check_room(plan: Plan) -> None:
    """No training whose outcome could not be kept."""
    folder = next(place for place in (plan.run_path, *plan.run_path.absolute().parents) if place.exists())
    needed = sum(checkpoint_bytes(plan.architecture, plan.config.optim.optimizer).values())
    free = shutil.disk_usage(folder).free
    if free < needed and not plan.finished:
        raise NanogptError(
            f"The disk of {plan.run_path} is full: {needed / 1e6:,.2f} MB are needed for a checkpoint, "
            f"{free / 1e6:,.2f} MB are free. Make room, or choose another place with --run."
        )


def _make_run(plan: Plan) -> RunDirectory:
    def fill(run: RunDirectory) -> None:
        if plan.checkpoint is not None:  # a fork: its first state is there before its name is
            save_checkpoint(plan.checkpoint, run.checkpoint)

    tokenizer = plan.data_set.tokenizer
    return create_run(
        plan.run_path,
        config={**plan.config.to_toml(), "derived": plan.derived.to_toml()},
        tokenizer=tokenizer.to_toml() if tokenizer else None,
        environment=environment(plan.compute.describe()),
        fill=fill,
    )


def _take_over(plan: Plan, run: RunDirectory) -> None:
    """Make an existing run consistent with the state it goes on from; needs its lock."""
    _refuse_changed_meanwhile(plan, run)
    for folder in (run.path, run.logs):
        remove_leftovers(folder)
    if plan.checkpoint is not None and plan.checkpoint_path != run.checkpoint:
        if run.checkpoint.exists():
            run.checkpoint.rename(run.path / "ckpt-damaged.pt")  # it must not become ckpt-previous.pt
        link_or_copy(run.previous, run.checkpoint)
    evaluated_step = 0
    if plan.checkpoint is not None:
        _finish_last_save(plan.checkpoint, run, plan.config.train.keep_every)
        evaluated_step = plan.checkpoint["progress"]["evaluated_step"]
    if plan.finished:
        return
    write_toml(run.config, {**plan.config.to_toml(), "derived": plan.derived.to_toml()})
    metrics = MetricsLog(run.metrics)
    metrics.keep_through(plan.first_step, evaluated_step)
    metrics.close()


def _finish_last_save(checkpoint: Checkpoint, run: RunDirectory, keep_every: int) -> None:
    """What a kill right after ckpt.pt was written prevents: its milestone, and best.pt where this step is the best."""
    keep_milestone(run.checkpoint, run.milestone(checkpoint["step"]), checkpoint["step"], keep_every)
    if checkpoint["progress"]["best_step"] == checkpoint["step"] and best_problem(run.best, checkpoint):
        save_checkpoint(weights_only(checkpoint), run.best)


def _refuse_changed_meanwhile(plan: Plan, run: RunDirectory) -> None:
    newest = newest_state(run).checkpoint
    if (newest["step"] if newest else 0) != plan.first_step:
        raise UserError(f"{run.path}: another process continued this run meanwhile. Type the command again.")


def _train(plan: Plan, run: RunDirectory, view: View, processes: Processes) -> Outcome:
    plan.compute.prepare()
    _compare_layouts(plan, processes, view)
    state = build_state(plan, processes)
    model = state.model if plan.sharded else processes.wrap(state.model, plan.compute)
    if plan.compute.compile and not plan.sharded:
        _compile(plan, model, view)
    progress = state.progress
    all_peaks = plan.peak[0] * processes.world_size if plan.peak else None
    with contextlib.ExitStack() as stack:
        metrics = MetricsLog(run.metrics if processes.main else Path(os.devnull))
        stack.enter_context(contextlib.closing(metrics))
        trackers = open_trackers(plan.config, run, progress.step, view.warn) if processes.main else Trackers()
        stack.enter_context(contextlib.closing(trackers))
        batches = stack.enter_context(
            Batches(
                plan.data_set.train,
                plan.order,
                plan.split,
                processes.rank,
                first_row=progress.rows,
                vocab_size=plan.architecture.vocab_size or 0,
                device=plan.compute.device,
            )
        )
        training = Training(
            state=state,
            model=model,
            split=plan.split,
            batches=batches,
            order=plan.order,
            train_windows=_windows(plan, plan.data_set.train),
            val_windows=_windows(plan, plan.data_set.val),
            compute=plan.compute,
            processes=processes,
            run=run,
            view=view,
            metrics=metrics,
            trackers=trackers,
            clock=StepClock(plan.tokens_per_step, flops_per_token(plan.architecture), all_peaks, progress.time_s),
            saved=(progress.step, progress.evaluated_step),
        )
        training.train(_what_is_shown(plan, run, progress))
    return Outcome(run, progress.step, progress.best_loss)


def _windows(plan: Plan, tokens: Tokens) -> Windows:
    return Windows(tokens, evaluation_offsets(tokens.count, plan.architecture.block_size, plan.eval_windows))


def _what_is_shown(plan: Plan, run: RunDirectory, progress: Progress) -> Start:
    peak, source = plan.peak or (None, "")
    return Start(
        run_name=run.name,
        first_step=progress.step,
        max_iters=plan.config.train.max_iters,
        tokens_per_step=plan.tokens_per_step,
        vocab_size=plan.architecture.vocab_size or 0,
        device=plan.compute.describe(),
        peak_tflops=peak / 1e12 if peak else None,
        peak_source=source,
        best_loss=progress.best_loss,
    )


def build_state(plan: Plan, processes: Processes) -> TrainingState:
    """Model, optimizer and progress, as the plan's checkpoint, its initial weights or its seed say."""
    config, device = plan.config, plan.compute.device
    model = _build_model(plan, processes)
    optimizer = Optimizer(model, config.optim, device)
    scaler = torch.amp.GradScaler(device.type, enabled=plan.compute.dtype == torch.float16)
    tokenizer = plan.data_set.tokenizer
    facts = Facts(
        config=config,
        architecture=plan.architecture,
        schedule=plan.schedule,
        eval_windows=plan.eval_windows,
        tokenizer=tokenizer.to_toml() if tokenizer else None,
        data=plan.data_set.fingerprint(),
        layout=layout(plan, processes),
    )
    state = TrainingState(model, optimizer, scaler, Progress(), facts)
    if plan.checkpoint is not None:
        source = str(plan.checkpoint_path)
        if device.type == "cpu" and not processes.several:
            # a mapped file and its copy would be in memory together: read the tensors, and keep those that were read
            progress, plan.checkpoint = plan.checkpoint["progress"], None
            content = load_checkpoint(RunDirectory(plan.run_path).checkpoint, mmap=False)
            state.restore({**content, "progress": progress}, source, adopt=True)
            del content
        else:
            state.restore(plan.checkpoint, source)
    elif plan.initial_weights is not None:
        load_full_state_dict(model, plan.initial_weights)
    plan.checkpoint = plan.initial_weights = None  # free the memory
    return state


def _compile(plan: Plan, model: torch.nn.Module, view: View) -> None:
    """torch.compile, or the reason why not: a warning where it was our idea, an error where the user asked for it."""
    problem = compile_model(model, plan.compute, plan.split.micro_batch, plan.architecture.block_size)
    if problem and plan.config.system.compile == "on":
        raise NanogptError(f"--compile on: torch.compile failed here: {problem}. Use --compile auto or off.")
    if problem:
        view.warn(f"torch.compile failed here ({problem}); going on without it")


def _build_model(plan: Plan, processes: Processes) -> GPT:
    """The model on the device; with its first weights if there are no others."""
    drawn, recompute = None, plan.config.system.activation_checkpointing
    if plan.checkpoint is None and plan.initial_weights is None:
        generator = torch.Generator().manual_seed(seed32(plan.config.train.seed, Purpose.INIT))
        drawn = GPT(plan.architecture, generator=generator, activation_checkpointing=recompute)
        if not plan.sharded:
            return drawn.to(plan.compute.device)
    with torch.device("meta"):  # nothing is drawn for weights that are about to be replaced
        model = GPT(plan.architecture, activation_checkpointing=recompute)
    if plan.sharded:
        shard(model, processes, plan.compute)
    else:
        model.to_empty(device=plan.compute.device)
    if drawn is not None:
        load_full_state_dict(model, drawn.state_dict())
    return model


def layout(plan: Plan, processes: Processes) -> dict[str, Any]:
    """What must be the same for a resumed run to be bit-identical."""
    found: dict[str, Any] = {
        "device": plan.compute.device.type,
        "ranks": processes.world_size,
        "micro_batch": plan.split.micro_batch,
        "dtype": plan.compute.dtype_name,
        "compile": plan.compute.compile,
        "torch": str(torch.__version__),
    }
    if processes.several:
        found["parallel"] = plan.config.system.parallel
    if plan.compute.device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    else:
        found["deterministic"] = plan.compute.deterministic
    return found


def _compare_layouts(plan: Plan, processes: Processes, view: View) -> None:
    """Take the number of CPU threads the run had, since another adds up in another order; say what else differs."""
    saved = plan.checkpoint["layout"] if plan.checkpoint else {}
    if plan.compute.device.type == "cpu" and saved.get("threads") and saved.get("ranks") == processes.world_size:
        torch.set_num_threads(saved["threads"])
    here = layout(plan, processes)
    changed = [f"{key} {saved.get(key)} -> {here[key]}" for key in here if saved.get(key) != here[key]]
    if changed and saved.get("ranks"):
        view.warn(f"not bit-identical with the run so far, only equal to rounding: {'; '.join(changed)}")
