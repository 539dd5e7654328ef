"""Going on: what a resumed run, a fork, or a nanoGPT run continues from, and what may have changed since."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.derived import moved_folder, schedule_of, with_schedule
from nanogpt_cli.config.layers import Layer, Layered, combine
from nanogpt_cli.config.schema import Config
from nanogpt_cli.data.tokens.files import difference
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.machine.rank_env import RankEnv
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.runs.checkpoint import (
    Checkpoint,
    RunProgress,
    is_nanogpt,
    load_training_state,
    own_checkpoint,
    read_torch_file,
)
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.recovery import Source, best_problem, fixed_differences, newest_state
from nanogpt_cli.training.plan import ALONE, Plan, ResumePoint, plan_run
from nanogpt_cli.training.state import as_checkpoint
from nanogpt_cli.weights.nanogpt import NanoGPTCheckpoint, from_nanogpt
from nanogpt_cli.weights.resolve import find_run, look_up


def plan_resume(
    word: str,
    changes: Layer,
    *,
    checkpoint: Path | None = None,
    new_run: Path | None = None,
    env: RankEnv = ALONE,
    machines: int = 1,
    progress: Progress = QUIET,
) -> Plan:
    """Work out how a run goes on; makes nothing.

    Args:
        word: a run, by path or name; with `new_run` also a nanoGPT out_dir or ckpt.pt.
        changes: settings given on the command line.
        checkpoint: fork from this file instead of the last state; needs `new_run`.
        new_run: continue there and leave the old run as it is.
        env, machines, progress: as for `plan_run`.

    Raises:
        UserError: nothing to go on from, or a change that a run cannot take.
    """
    source, run_path = _find_source(word, checkpoint, new_run)
    layered, makes_run = combine(source.settings, changes), new_run is not None
    layered, moved = _with_moved_data(layered, source.path or run_path)
    saved = source.checkpoint
    if saved is None or source.path is None:
        _refuse_fixed(combine(source.settings).config, layered.config, f"{run_path} was started with")
        notes = (*moved, "there is no checkpoint yet: starting at step 0")
        return plan_run(
            layered, run_path, env=env, machines=machines, makes_run=makes_run, notes=notes, progress=progress
        )
    before = combine(Layer(str(source.path), saved["config"])).config
    _refuse_fixed(before, layered.config, f"{source.path} was trained with")
    _refuse_other_rows(before, layered.config)
    frozen = schedule_of(before)  # `--max-iters` alone changes neither warm-up nor decay
    layered = dataclasses.replace(layered, config=with_schedule(layered.config, frozen))
    done, warnings = RunProgress(**saved["progress"]), list(source.problems)
    if not makes_run and (problem := _lost_best(RunDirectory(run_path), saved)):
        warnings.append(f"{problem} The best weights of this run are lost: the next evaluation begins anew.")
        done = dataclasses.replace(done, best_loss=None, best_step=None)
    plan = plan_run(
        layered,
        run_path,
        env=env,
        machines=machines,
        makes_run=makes_run,
        resume_point=ResumePoint(source.path, done, saved["layout"], before.model.vocab_size or 0),
        eval_windows=saved["eval_windows"] // before.train.eval_iters * layered.config.train.eval_iters,
        notes=(*moved, *(f"changed {change}" for change in _differences(before, layered.config))),
        warnings=tuple(warnings),
        progress=progress,
    )
    if plan.makes_run and plan.finished:
        raise UserError(
            f"{source.path} is at step {plan.first_step:,} of {layered.config.train.max_iters:,}: a new run would have "
            f"nothing to do. Say how far it is to go: --max-iters N, above {plan.first_step}."
        )
    _refuse_other_data(plan, saved)
    return plan


def _with_moved_data(layered: Layered, beside: Path) -> tuple[Layered, tuple[str, ...]]:
    """Settings that name the data where it lies now, and a note if it is not where it was."""
    data_dir = layered.config.data.data_dir
    if data_dir is None or (found := moved_folder(Path(data_dir), beside)) == Path(data_dir):
        return layered, ()
    note = f"{data_dir} is gone; the data set is read from {found}"
    return dataclasses.replace(layered, config=layered.config.replace("data", data_dir=str(found))), (note,)


def read_state(point: ResumePoint) -> Checkpoint:
    """The whole training state of a resume point, its tensors mapped, as a new run starts with it."""
    content = read_torch_file(point.path)
    path = point.path
    state = _from_nanogpt(content, path) if is_nanogpt(content) else own_checkpoint(content, path, trainable=True)
    return {**state, "progress": dataclasses.asdict(point.progress)}


def _differences(before: Config, now: Config) -> list[str]:
    """Settings that changed, each as `key: old -> new`; those of the schedule as they are used."""
    old, new = _as_used(before), _as_used(now)
    found = []
    for section, table in new.items():
        for key in dict.fromkeys([*old[section], *table]):
            if key != "vocab_size" and old[section].get(key) != table.get(key):
                found.append(f"{key}: {old[section].get(key, 'unset')} -> {table.get(key, 'unset')}")
    return found


def _as_used(config: Config) -> dict[str, Any]:
    s = schedule_of(config)
    decay = {} if s.shape == "constant" else {"min_lr": s.min_lr, "lr_decay_iters": s.lr_decay_iters}
    return config.replace("optim", warmup_iters=s.warmup_iters, **decay).to_toml()


def _lost_best(run: RunDirectory, saved: Checkpoint) -> str:
    """What is wrong with best.pt, if it is not written again: its loss would keep later weights from being kept."""
    return best_problem(run.best, saved) if saved["progress"]["best_step"] != saved["step"] else ""


def _find_source(word: str, checkpoint: Path | None, new_run: Path | None) -> tuple[Source, Path]:
    if checkpoint is not None and new_run is None:
        raise UserError(
            "--checkpoint goes back to an earlier state, which needs a new run: add --run NEW. "
            "Nothing of the old run is overwritten."
        )
    foreign = _nanogpt_file(word)
    if foreign is not None:
        state = _from_nanogpt(read_torch_file(foreign), foreign)
        if new_run is None:
            raise UserError(f"{word} is a nanoGPT run; it continues in a run of ours: add --run NEW.")
        return Source(state, foreign, Layer(f"nanoGPT's {foreign}", state["config"])), new_run
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


def _refuse_fixed(before: Config, now: Config, who: str) -> None:
    changed = []
    for name, old, new in fixed_differences(before, now):
        if name == "vocab_size" and new is None:
            continue  # it follows from the data set, which the run keeps
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


def _from_nanogpt(content: Any, path: Path) -> Checkpoint:
    """A nanoGPT checkpoint as a training state of ours: weights, AdamW moments and step."""
    if not is_nanogpt(content):
        raise UserError(f"{path}: neither a run nor a nanoGPT checkpoint. To go on from a file of a run: --checkpoint.")
    theirs: NanoGPTCheckpoint = from_nanogpt(content, str(path))
    if theirs.adamw is None:
        raise UserError(
            f"{path}: holds no optimizer state. "
            f"To start a new run from its weights: nanogpt train --init-from {typed(path)}"
        )
    model = {k: v for k, v in dataclasses.asdict(theirs.settings).items() if v is not None}
    config = combine(Layer(f"nanoGPT's {path}", {**theirs.tables, "model": model})).config
    lasting = {
        "eval_windows": config.train.eval_iters * config.train.batch_size,
        "tokenizer": None,
        "data": {},
        "layout": {"torch": str(torch.__version__)},
    }
    rows = theirs.step * config.train.batch_size * config.train.gradient_accumulation_steps
    progress = RunProgress(step=theirs.step, rows=rows, evaluated_step=theirs.step)
    optimizer = {"adamw": theirs.adamw, "muon": {}}
    return as_checkpoint(config, progress, lasting, model=theirs.tensors, optimizer=optimizer, scaler={})
