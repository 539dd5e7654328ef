"""What of a run can be trusted after files were damaged, swapped or lost, and what can still be used.

The protocol. A save makes ckpt.pt durable under another name, links the old one to ckpt-previous.pt, and renames;
best.pt follows, metrics came before. So whatever instant a process was killed at, one of the two checkpoints is
whole, and what lies after it is repeated: metrics are cut back to it, best.pt is rebuilt from it where its own step
is the best. Here is decided which one that is: the newest whose checksums hold and whose fixed settings are those of
config.toml, so that a file copied from another run is not taken for this one's. Nothing is deleted that the decision
did not rest on: a damaged ckpt.pt is kept under another name, and where no state can be trusted, what else there is
(milestones, best weights) is named with the command that uses it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.schema import SECTIONS, Config, settings
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.runs.checkpoint import Checkpoint, load_checkpoint, load_training_state
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.metrics import read_metrics


@dataclass(frozen=True)
class Source:
    """A training state to go on from."""

    checkpoint: Checkpoint | None  # None: the run was killed before its first save
    path: Path | None
    settings: Layer
    problems: tuple[str, ...] = ()  # what is wrong with config.toml or a newer checkpoint


def newest_state(run: RunDirectory) -> Source:
    """The newest checkpoint that is whole and this run's own, and the settings that hold.

    config.toml is what the user sees and may edit; the checkpoint's settings stand in for a damaged one.

    Raises:
        UserError: nothing can be trusted; says what is wrong with each file and what can still be used.
    """
    layer, wrong = None, ""
    try:
        tables = read_toml(run.config)
        if missing := [section for section in SECTIONS if section not in tables]:
            raise UserError(f"{run.config} is damaged: [{missing[0]}] is missing.")
        combine(read := Layer(str(run.config), tables))
        layer = read
    except UserError as error:
        wrong = str(error)
    there = run.checkpoint.exists() or run.previous.exists()
    checkpoint: Checkpoint | None = None
    broken: list[str] = []
    for path in (run.checkpoint, run.previous) if there else ():
        try:
            found = load_training_state(path)
            if why := _stranger(found, layer):
                raise UserError(f"{path}: {why}.")
            checkpoint = found
            break
        except UserError as error:
            broken.append(str(error))
    if there and checkpoint is None:
        raise UserError("\n".join([*broken, f"No checkpoint of this run can be used.{_still_usable(run)}"]))
    if checkpoint is None:
        if saved := ", ".join(sorted(file.name for file in run.path.glob("*.pt"))):
            gone = f"{run.path}: ckpt.pt and ckpt-previous.pt are gone"
            raise UserError(f"{gone}, but there is {saved}.{_still_usable(run)}")
        if layer is None:
            raise UserError(f"{wrong} There is no checkpoint that could tell the settings.")
        return Source(None, None, layer)
    problems = []
    if broken:
        step = checkpoint["step"]
        reached = max((line["step"] for line in read_metrics(run.metrics)), default=step)
        kept = "The file will be kept as ckpt-damaged.pt. " if run.checkpoint.exists() else ""
        going = f"Going on from step {step:,} in {path.name}; the run had reached step {reached:,}."
        problems.append(f"{broken[0]} {kept}{going}")
    if layer is None:
        layer = Layer(f"the checkpoint {path}", checkpoint["config"])
        problems.append(f"{wrong} The settings of {path.name} are used instead.")
    return Source(checkpoint, path, _with_architecture(layer, checkpoint), tuple(problems))


def fixed_differences(before: Config, now: Config) -> Iterator[tuple[str, Any, Any]]:
    """The settings that a run keeps and that differ, each with both values."""
    for name, known in settings().items():
        old, new = getattr(getattr(before, known.section), name), getattr(getattr(now, known.section), name)
        if known.resume == "fixed" and old != new:
            yield name, old, new


def _with_architecture(layer: Layer, checkpoint: Checkpoint) -> Layer:
    """The settings of config.toml; an earlier version left out there what the weights of init_from brought."""
    model = layer.tables.get("model", {})
    if "init_from" not in layer.tables.get("train", {}) or "vocab_size" in model:
        return layer
    model = checkpoint["config"]["model"] | {key: model[key] for key in ("dropout",) if key in model}
    return dataclasses.replace(layer, tables={**layer.tables, "model": model})


def _stranger(checkpoint: Checkpoint, layer: Layer | None) -> str:
    """Why a checkpoint cannot be of the run with these settings; empty if it can, or if they are not known."""
    if layer is None:
        return ""
    saved = combine(Layer("the checkpoint", checkpoint["config"])).config
    for name, theirs, ours in fixed_differences(saved, combine(_with_architecture(layer, checkpoint)).config):
        if None not in (theirs, ours):
            return f"not of this run: its {name} is {theirs}, that of config.toml {ours}"
    return ""


def _still_usable(run: RunDirectory) -> str:
    """A sentence about the newest milestone or the best weights, if they are whole."""
    for path in sorted(run.path.glob("ckpt-*[0-9].pt"), reverse=True):
        try:
            load_training_state(path)
        except UserError:
            continue
        return (
            f" {path.name} can still be used: "
            f"nanogpt resume {typed(run.path)} --checkpoint {typed(path.name)} --run NEW"
        )
    try:
        load_checkpoint(run.best)
    except UserError:
        return ""
    return f" The best weights can still be used: nanogpt train --init-from {typed(run.best)}"


def best_problem(best: Path, checkpoint: Checkpoint) -> str:
    """Why the file `best` is not the best that a training state speaks of; empty if it is, or if there is none yet."""
    step, loss = (checkpoint["progress"][key] for key in ("best_step", "best_loss"))
    if step is None:
        return ""
    try:
        found = load_checkpoint(best)
    except UserError as error:
        return str(error)
    if found["step"] > checkpoint["step"] or (found["step"], found.get("val_loss")) == (step, loss):
        return ""  # a later one is this run's too: it goes on from an older state than that which was the best
    return f"{best}: holds step {found['step']:,}, but the best step of this run is {step:,}."
