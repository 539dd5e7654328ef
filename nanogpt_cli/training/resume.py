"""Going on: what a resumed run, a fork, or a nanoGPT run continues from, and what may have changed since."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.derived import moved_folder, schedule_of, with_schedule
from nanogpt_cli.config.dial import told_before
from nanogpt_cli.config.layers import Layer, Layered, combine
from nanogpt_cli.config.schema import Config
from nanogpt_cli.data.tokens.files import difference
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.machine.rank_env import RankEnv
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.runs.checkpoint import Checkpoint, RunProgress, is_nanogpt, own_checkpoint, read_torch_file
from nanogpt_cli.runs.directory import RunDirectory, refuse_existing
from nanogpt_cli.runs.recovery import Source, best_problem, fixed_differences, newest_state
from nanogpt_cli.training.plan import ALONE, Plan, ResumePoint, plan_run
from nanogpt_cli.training.state import as_checkpoint
from nanogpt_cli.weights.nanogpt import from_nanogpt
from nanogpt_cli.weights.resolve import find_run, look_up


@dataclass(frozen=True)
class ResumeRequest:
    """A run that goes on.

    Args:
        word: a run, by path or name; with `new_run` also a nanoGPT out_dir or ckpt.pt.
        changes: settings given on the command line.
        checkpoint: fork from this file instead of the last state; needs `new_run`.
        new_run: continue there and leave the old run as it is.
    """

    word: str
    changes: Layer
    checkpoint: Path | None = None
    new_run: Path | None = None

    def processes(self) -> int:
        """How many to launch on each machine."""
        return combine(Layer(self.word, read_toml(find_run(self.word).config)), self.changes).config.system.gpus

    def plan(self, progress: Progress = QUIET, env: RankEnv = ALONE) -> Plan:
        """Work out how the run goes on; UserError if there is nothing to go on from, or for a change it cannot take."""
        makes_run = self.new_run is not None
        if self.new_run is not None:
            refuse_existing(self.new_run)
        source = self._source()
        run_path = self.new_run or find_run(self.word).path
        layered, moved = _with_moved_data(combine(source.settings, self.changes), source.path or run_path)
        saved, told = source.checkpoint, told_before(source.settings.tables)
        if saved is None or source.path is None:
            _refuse_fixed(combine(source.settings).config, layered.config, f"{run_path} was started with")
            notes = (*moved, "there is no checkpoint yet: starting at step 0")
            return plan_run(layered, run_path, env=env, makes_run=makes_run, told=told, notes=notes, progress=progress)
        before = combine(Layer(str(source.path), saved["config"])).config
        _refuse_fixed(before, layered.config, f"{source.path} was trained with")
        _refuse_other_rows(before, layered.config)
        # `--max-iters` alone changes neither warm-up nor decay
        config = with_schedule(layered.config, schedule_of(before))
        done, warnings = RunProgress(**saved["progress"]), list(source.problems)
        if done.best_step != done.step:  # else best.pt is written again
            problem = "" if makes_run else best_problem(RunDirectory(run_path).best, saved)
            if problem:
                warnings.append(f"{problem} The best weights of this run are lost: the next evaluation begins anew.")
            if problem or makes_run:  # a best loss without its file would keep later weights from being kept
                done = dataclasses.replace(done, best_loss=None, best_step=None)
        eval_windows = saved["eval_windows"] // before.train.eval_iters * config.train.eval_iters
        plan = plan_run(
            dataclasses.replace(layered, config=config),
            run_path,
            env=env,
            makes_run=makes_run,
            resume_point=ResumePoint(source.path, done, saved["layout"], before.model.vocab_size or 0, eval_windows),
            told=told,
            notes=(*moved, *(f"changed {change}" for change in _differences(before, config))),
            warnings=tuple(warnings),
            progress=progress,
        )
        if plan.makes_run and plan.finished:
            raise UserError(
                f"{source.path} is at step {plan.first_step:,} of {config.train.max_iters:,}: a new run would have "
                f"nothing to do. Say how far it is to go: --max-iters N, above {plan.first_step}."
            )
        if saved["data"] and (differs := difference(saved["data"], plan.data_set.fingerprint())):
            raise UserError(
                f"{plan.data_set.folder} is not the data the run was trained on: {differs}. "
                "Put the old data back, name its folder with --data-dir, "
                "or start a new run on this data: nanogpt train --init-from RUN."
            )
        return plan

    def _source(self) -> Source:
        if self.checkpoint is not None and self.new_run is None:
            raise UserError(
                "--checkpoint goes back to an earlier state, which needs a new run: add --run NEW. "
                "Nothing of the old run is overwritten."
            )
        file = _lone_checkpoint(self.word)
        if file is None:
            run = find_run(self.word)
            if self.checkpoint is None:
                return newest_state(run)
            file = run.named_checkpoint(self.checkpoint, "no such file")
        state = read_state(file)
        if self.new_run is None:
            raise UserError(f"{self.word} is a checkpoint without a run; it continues in one of ours: add --run NEW.")
        return Source(state, file, Layer(str(file), state["config"]))


def _with_moved_data(layered: Layered, beside: Path) -> tuple[Layered, tuple[str, ...]]:
    """Settings that name the data where it lies now, and a note if it is not where it was."""
    data_dir = layered.config.data.data_dir
    if data_dir is None or (found := moved_folder(Path(data_dir), beside)) == Path(data_dir):
        return layered, ()
    note = f"{data_dir} is gone; the data set is read from {found}"
    return dataclasses.replace(layered, config=layered.config.replace("data", data_dir=str(found))), (note,)


def _differences(before: Config, now: Config) -> list[str]:
    """Settings that changed, each as `key: old -> new`; those of the schedule as they are used."""
    old, new = _as_used(before), _as_used(now)
    return [
        f"{key}: {old[section].get(key, 'unset')} -> {table.get(key, 'unset')}"
        for section, table in new.items()
        for key in dict.fromkeys([*old[section], *table])
        if key != "vocab_size" and old[section].get(key) != table.get(key)
    ]


def _as_used(config: Config) -> dict[str, Any]:
    s = schedule_of(config)
    decay = {} if s.shape == "constant" else {"min_lr": s.min_lr, "lr_decay_iters": s.lr_decay_iters}
    return config.replace("optim", warmup_iters=s.warmup_iters, **decay).to_toml()


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
    rows, given = (c.train.batch_size * c.train.gradient_accumulation_steps for c in (before, now))
    if rows != given:
        raise UserError(
            f"batch_size x gradient_accumulation_steps = {given}, but the run takes {rows} rows an update. "
            f"Choose a batch size that divides {rows} and set --gradient-accumulation-steps to {rows} / batch size."
        )


def _lone_checkpoint(word: str) -> Path | None:
    """The checkpoint outside of our runs that `word` names; UserError for a file of a run."""
    found = look_up(word)
    if found is None or found.kind not in ("file", "checkpoint folder"):
        return None
    path = found.path
    if found.kind == "checkpoint folder":
        return path / "ckpt.pt" if is_nanogpt(read_torch_file(path / "ckpt.pt")) else None
    if RunDirectory(path.parent).config.exists():
        run = typed(path.parent)
        raise UserError(
            f"{word} is a file of a run: nanogpt resume {run} continues the run. To go on from this file type "
            f"nanogpt resume {run} --checkpoint {typed(path.name)} --run NEW"
        )
    return path


def read_state(path: Path) -> Checkpoint:
    """The whole training state in a checkpoint of ours or nanoGPT's, its tensors mapped."""
    content = read_torch_file(path)
    return _from_nanogpt(content, path) if is_nanogpt(content) else own_checkpoint(content, path, trainable=True)


def _from_nanogpt(content: Any, path: Path) -> Checkpoint:
    """A nanoGPT checkpoint as a training state of ours: weights, AdamW moments and step."""
    theirs = from_nanogpt(content, str(path))
    if theirs.adamw is None:
        raise UserError(
            f"{path}: holds no optimizer state. "
            f"To start a new run from its weights: nanogpt train --init-from {typed(path)}"
        )
    model = {k: v for k, v in dataclasses.asdict(theirs.settings).items() if v is not None}
    config = combine(Layer(f"nanoGPT's {path}", {**theirs.tables, "model": model})).config
    rows = theirs.step * config.train.batch_size * config.train.gradient_accumulation_steps
    progress = RunProgress(step=theirs.step, rows=rows, evaluated_step=theirs.step)
    return as_checkpoint(
        config,
        progress,
        model=theirs.tensors,
        optimizer={"adamw": theirs.adamw, "muon": {}},
        scaler={},
        eval_windows=config.train.eval_iters * config.train.batch_size,
        tokenizer=None,
        data={},
        layout={"torch": str(torch.__version__)},
    )
