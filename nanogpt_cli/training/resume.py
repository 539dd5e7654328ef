"""Going on: what a resumed run, a fork, or a nanoGPT run continues from, and what may have changed since."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.derived import Schedule, schedule_of
from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.data.tokens.files import difference
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.runs.checkpoint import Checkpoint, is_nanogpt, load_training_state, read_torch_file
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.form import Progress
from nanogpt_cli.runs.recovery import Source, best_problem, fixed_differences, newest_state
from nanogpt_cli.training.plan import Plan, differences, plan_run
from nanogpt_cli.training.state import Facts, as_checkpoint
from nanogpt_cli.weights.nanogpt import NanoGPTCheckpoint, from_nanogpt
from nanogpt_cli.weights.resolve import find_run, look_up

SCHEDULE_SETTINGS = ("schedule", "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters")


def plan_resume(
    word: str, changes: Layer, *, checkpoint: Path | None = None, new_run: Path | None = None, **machine: Any
) -> Plan:
    """Work out how a run goes on; makes nothing.

    Args:
        word: a run, by path or name; with `new_run` also a nanoGPT out_dir or ckpt.pt.
        changes: settings given on the command line.
        checkpoint: fork from this file instead of the last state; needs `new_run`.
        new_run: continue there and leave the old run as it is.
        machine: `place`, `machines` and `progress` of `plan_run`.

    Raises:
        UserError: nothing to go on from, or a change that a run cannot take.
    """
    source, run_path = _find_source(word, checkpoint, new_run)
    layered = combine(source.settings, changes)
    saved = source.checkpoint
    if saved is None:
        _refuse_fixed(combine(source.settings).config, layered.config, f"{run_path} was started with")
        plan = plan_run(layered, run_path, **machine)
        plan.makes_run = new_run is not None
        plan.notes.append("there is no checkpoint yet: starting at step 0")
        return plan
    before = combine(Layer(str(source.path), saved["config"])).config
    _refuse_fixed(before, layered.config, f"{source.path} was trained with", saved["architecture"]["vocab_size"])
    _refuse_other_rows(before, layered.config)
    # what init_from brought stands in the checkpoint, also where the settings never named it
    architecture = ModelSettings(**{**saved["architecture"], "dropout": layered.config.model.dropout})
    schedule = _schedule(saved, before, layered.config)
    plan = plan_run(layered, run_path, schedule=schedule, architecture=architecture, **machine)
    plan.checkpoint = saved
    plan.checkpoint_path = source.path
    plan.eval_windows = saved["eval_windows"] // before.train.eval_iters * layered.config.train.eval_iters
    plan.makes_run = new_run is not None
    if plan.makes_run and plan.finished:
        raise UserError(
            f"{source.path} is at step {plan.first_step:,} of {layered.config.train.max_iters:,}: a new run would have "
            f"nothing to do. Say how far it is to go: --max-iters N, above {plan.first_step}."
        )
    _refuse_other_data(plan, saved)
    plan.notes += [f"changed {change}" for change in differences(before.to_toml(), layered.config.to_toml())]
    plan.warnings += source.problems
    _warn_of_flat_end(plan)
    if not plan.makes_run:
        _forget_lost_best(plan, saved)
    return plan


def _warn_of_flat_end(plan: Plan) -> None:
    s, last = plan.schedule, plan.config.train.max_iters
    if s.shape != "constant" and last > s.lr_decay_iters:
        plan.warnings.append(
            f"the decay ends at step {s.lr_decay_iters:,}, the run at {last:,}: "
            f"in between the rate stays at {s.min_lr:g}. To decay over the longer run add --lr-decay-iters."
        )


def _forget_lost_best(plan: Plan, saved: Checkpoint) -> None:
    """Without its file the best loss so far would keep later weights from being kept."""
    progress = saved["progress"]
    problem = best_problem(RunDirectory(plan.run_path).best, saved)
    if problem and progress["best_step"] != saved["step"]:  # else it is written again
        plan.warnings.append(f"{problem} The best weights of this run are lost: the next evaluation begins anew.")
        plan.checkpoint = {**saved, "progress": {**progress, "best_loss": None, "best_step": None}}


def _find_source(word: str, checkpoint: Path | None, new_run: Path | None) -> tuple[Source, Path]:
    if checkpoint is not None and new_run is None:
        raise UserError(
            "--checkpoint goes back to an earlier state, which needs a new run: add --run NEW. "
            "Nothing of the old run is overwritten."
        )
    foreign = _nanogpt_file(word)
    if foreign is not None:
        source = _from_nanogpt(foreign)
        if new_run is None:
            raise UserError(f"{word} is a nanoGPT run; it continues in a run of ours: add --run NEW.")
        return source, new_run
    run = find_run(word)
    if checkpoint is not None:
        file = run.named_checkpoint(checkpoint, "no such file")
        state = load_training_state(file)
        return Source(_forked(state), file, Layer(str(file), state["config"])), new_run or run.path
    source = newest_state(run)
    if new_run is None or source.checkpoint is None:
        return source, new_run or run.path
    return dataclasses.replace(source, checkpoint=_forked(source.checkpoint)), new_run


def _forked(saved: Checkpoint) -> Checkpoint:
    """A fork has no best.pt unless the checkpoint itself is the best: the next evaluation will be."""
    progress = dict(saved["progress"])
    if progress["best_step"] != saved["step"]:
        progress |= {"best_loss": None, "best_step": None}
    return {**saved, "progress": progress}


def _refuse_fixed(before: Config, now: Config, who: str, vocab_size: int | None = None) -> None:
    if before.model.vocab_size is None and now.model.vocab_size is not None:
        before = before.replace("model", vocab_size=vocab_size)  # what followed from the data set
    changed = []
    for name, old, new in fixed_differences(before, now):
        if old is not None or name in ("vocab_size", "init_from"):  # the others only say what the data set is
            changed.append(f"{name} = {new}, but {who} {'none' if old is None else old}")
    if changed:
        raise UserError(
            f"{'; '.join(changed)}. A run keeps its architecture, data set, optimizer and seed. "
            "Leave these out, or start a new run: nanogpt train (--init-from takes the weights)."
        )


def _refuse_other_rows(before: Config, now: Config) -> None:
    old = before.train.batch_size * before.train.gradient_accumulation_steps
    new = now.train.batch_size * now.train.gradient_accumulation_steps
    if old != new:
        raise UserError(
            f"batch_size x gradient_accumulation_steps = {new}, but the run takes {old} rows an update. "
            f"Choose a batch size that divides {old} and set --gradient-accumulation-steps to {old} / batch size."
        )


def _refuse_other_data(plan: Plan, saved: Checkpoint) -> None:
    differs = difference(saved["data"], plan.data_set.fingerprint()) if saved["data"] else None
    if differs:
        raise UserError(
            f"{plan.data_set.folder} is not the data the run was trained on: {differs}. "
            "Put the old data back, name its folder with --data-dir, "
            "or start a new run on this data: nanogpt train --init-from RUN."
        )


def _schedule(saved: Checkpoint, before: Config, now: Config) -> Schedule:
    """The frozen schedule, unless one of its settings was changed by name; `--max-iters` alone is no such change."""
    frozen = Schedule(**saved["schedule"])
    changed = [key for key in SCHEDULE_SETTINGS if getattr(before.optim, key) != getattr(now.optim, key)]
    if not changed:
        return frozen
    fresh = schedule_of(now)
    kept: dict[str, Any] = {}
    if now.optim.lr_decay_iters is None:
        kept["lr_decay_iters"] = frozen.lr_decay_iters
    if now.optim.warmup_iters is None:
        kept["warmup_iters"] = frozen.warmup_iters
    return dataclasses.replace(fresh, **kept)


def _nanogpt_file(word: str) -> Path | None:
    """The nanoGPT checkpoint that `word` names; UserError for a file of a run."""
    found = look_up(word)
    if found is None or found.kind == "run":
        return None
    path = found.path
    if found.kind == "file" and RunDirectory(path.parent).config.exists():
        run = typed(path.parent)
        raise UserError(
            f"{word} is a file of a run: nanogpt resume {run} continues the run. To go on from this file type "
            f"nanogpt resume {run} --checkpoint {typed(path.name)} --run NEW"
        )
    if found.kind == "checkpoint folder":
        return path / "ckpt.pt" if is_nanogpt(read_torch_file(path / "ckpt.pt")) else None
    return path if found.kind == "file" else None


def _from_nanogpt(path: Path) -> Source:
    """A nanoGPT checkpoint as a training state of ours: weights, AdamW moments and step."""
    content = read_torch_file(path)
    if not is_nanogpt(content):
        raise UserError(f"{path}: neither a run nor a nanoGPT checkpoint. To go on from a file of a run: --checkpoint.")
    theirs: NanoGPTCheckpoint = from_nanogpt(content, str(path))
    if theirs.adamw is None:
        raise UserError(
            f"{path}: holds no optimizer state. "
            f"To start a new run from its weights: nanogpt train --init-from {typed(path)}"
        )
    model = {k: v for k, v in dataclasses.asdict(theirs.settings).items() if v is not None}
    layer = Layer(f"nanoGPT's {path}", {**theirs.tables, "model": model})
    config = combine(layer).config
    rows = theirs.step * config.train.batch_size * config.train.gradient_accumulation_steps
    facts = Facts(
        config=config,
        architecture=theirs.settings,
        schedule=schedule_of(config),
        eval_windows=config.train.eval_iters * config.train.batch_size,
        tokenizer=None,
        data={},
        layout={"torch": str(torch.__version__)},
    )
    progress = Progress(step=theirs.step, rows=rows, evaluated_step=theirs.step)
    optimizer = {"adamw": theirs.adamw, "muon": {}}
    return Source(as_checkpoint(facts, progress, model=theirs.tensors, optimizer=optimizer, scaler={}), path, layer)
