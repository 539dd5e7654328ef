"""Checkpoints: plain dicts of tensors and built-in types, written whole or not at all, checked before they are trusted.

`ckpt.pt` holds everything a run needs to go on; `best.pt` holds weights alone. Both load with `weights_only=True`.
"""

import errno
import functools
import os
import pickle
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, InstanceOf, Strict, StrictStr, TypeAdapter, ValidationError
from torch import Tensor

from nanogpt_cli.config.derived import Schedule, with_schedule
from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.setting import shown
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import (
    DiskFullError,
    atomic_write,
    disk_full_named,
    free_bytes,
    sync_file,
    sync_folder,
    temporary_beside,
)
from nanogpt_cli.model.build import check_tensors, meta_parameters
from nanogpt_cli.runs.directory import is_bomb

FORMAT = 2
Checkpoint = dict[str, Any]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "muon": ("momentum_buffer",)}


@dataclass
class RunProgress:
    """How far a run is. `step` counts completed updates, `rows` the rows they consumed."""

    step: Count = 0
    rows: Count = 0
    best_loss: Number | None = None  # lowest validation loss, nats
    best_step: Count | None = None
    evaluated_step: Count = 0  # the last step that was evaluated
    not_better: Count = 0  # evaluations since the best one
    window_sum: Number = 0.0  # losses since the last log line
    window_count: Count = 0
    skipped: Count = 0  # float16 updates that overflowed
    time_s: Number = 0.0  # training time


class Empty(BaseModel, extra="forbid"):
    """A table without keys: there is no scaler, or the data is not known."""


class Scaler(BaseModel):  # torch's GradScaler
    scale: Number
    growth_factor: Number
    backoff_factor: Number
    growth_interval: Count
    growth_tracker: Count = Field(alias="_growth_tracker")


class SplitPrint(BaseModel):
    tokens: Count
    dtype: StrictStr
    digest: StrictStr
    sha256: StrictStr = ""


class DataPrint(BaseModel):
    """What tells one data set from another."""

    name: StrictStr
    folder: StrictStr
    train: SplitPrint
    val: SplitPrint


class Layout(BaseModel, extra="allow"):
    """What must be the same for a resumed run to be bit-identical; absent where it does not apply."""

    ranks: Count = 1
    threads: Count = 1


class Weights(BaseModel):
    """best.pt. `config` holds all settings, [model] with vocab_size: it is the architecture."""

    format: Count
    model: dict[str, InstanceOf[Tensor]]
    step: Count
    config: dict[str, dict[str, Any]]
    tokenizer: dict[str, Any] | None
    data: DataPrint | Empty


class TrainingContent(Weights):
    """ckpt.pt."""

    optimizer: dict[str, dict[str, dict[str, InstanceOf[Tensor]]]]
    scaler: Scaler | Empty
    rows: Count
    progress: RunProgress
    eval_windows: Annotated[Count, Field(gt=0)]  # as configured at the start of the run
    layout: Layout


WEIGHTS, TRAINING = Weights.model_fields.keys(), TrainingContent.model_fields.keys()


def save_checkpoint(checkpoint: Checkpoint, path: Path, *, previous: Path | None = None) -> None:
    """Write `checkpoint` to `path`; what stood there becomes `previous` if that is given.

    The new file is complete and synced before the old name moves, so that a kill at any instant leaves a whole file
    under `path`.

    Raises:
        DiskFullError: no room, told by the free space or by the write itself; both old files stay.
        OSError: the folder cannot be written.
    """
    if free_bytes(path.parent) < tensor_bytes(checkpoint):
        raise _no_room(checkpoint, path)
    keep = functools.partial(link_or_copy, path, previous) if previous is not None and path.exists() else None
    try:
        atomic_write(path, lambda file: torch.save(checkpoint, file), before_rename=keep)
    except DiskFullError:
        raise _no_room(checkpoint, path) from None


def _no_room(checkpoint: Checkpoint, path: Path) -> DiskFullError:
    needed, free = tensor_bytes(checkpoint), free_bytes(path.parent)
    return DiskFullError(errno.ENOSPC, f"{needed / 1e6:,.2f} MB needed, {free / 1e6:,.2f} MB free", str(path))


def weights_only(checkpoint: Checkpoint) -> Checkpoint:
    """What best.pt holds, out of a training state whose step is the best: enough to sample and evaluate."""
    return {**{key: checkpoint[key] for key in WEIGHTS}, "val_loss": checkpoint["progress"]["best_loss"]}


def keep_milestone(checkpoint: Path, milestone: Path, step: int, keep_every: int) -> None:
    """Give the checkpoint of `step` the name that lasts, if one is due."""
    if keep_every and step and step % keep_every == 0:
        link_or_copy(checkpoint, milestone)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a second name of `source`'s content, replacing what stands there, in one rename."""
    with disk_full_named(target), temporary_beside(target) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)
            sync_file(temporary)
        temporary.replace(target)
        sync_folder(target.parent)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of ours onto the CPU, after checking every checksum in it.

    Raises:
        UserError: missing, truncated, damaged, or no checkpoint of this program; says which.
    """
    return own_checkpoint(read_torch_file(path), path)


def own_checkpoint(content: Any, path: Path, *, trainable: bool = False) -> Checkpoint:
    """`content` of `path`, if it is our checkpoint, and `trainable` if asked; UserError says what it is instead."""
    if not isinstance(content, dict) or not content.keys() >= WEIGHTS:
        hint = " It looks like a nanoGPT checkpoint." if is_nanogpt(content) else ""
        raise UserError(f"{path}: not a checkpoint of this program.{hint}")
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise UserError(f"{path}: checkpoint format {shown(version)}; this version reads format {FORMAT} and before.")
    found: Checkpoint = content if version == FORMAT else _from_format_1(content, path)
    whole = found.keys() >= TRAINING
    try:
        (TrainingContent if whole else Weights).model_validate(found)
    except ValidationError as error:
        raise _damaged(path, error.errors()[0]["loc"][0]) from None
    _check_tensors(found, path)
    if whole:  # an earlier version may have known less
        found["progress"] = asdict(TypeAdapter(RunProgress).validate_python(found["progress"]))
    elif trainable:
        raise UserError(
            f"{path}: holds weights alone, no optimizer state. "
            f"To start a new run from these weights: nanogpt train --init-from {typed(path)}"
        )
    return found


def _check_tensors(content: Checkpoint, path: Path) -> None:
    """Compare the tensors with the architecture that the file names."""
    architecture, weights = combine(Layer(str(path), content["config"])).config.model, content["model"]
    blocks = {name.split(".")[1] for name in weights if name.startswith("h.")}
    if architecture.vocab_size is None or len(blocks) != architecture.n_layer:
        raise _damaged(path, "architecture")
    check_tensors(weights, meta_parameters(architecture), str(path))
    for part, states in content.get("optimizer", {}).items():
        for name, moments in states.items():
            shape = weights[name].shape if name in weights else None
            shapes = {key: () if key == "step" else shape for key in MOMENTS.get(part, ())}
            if {key: moment.shape for key, moment in moments.items()} != shapes:
                raise _damaged(path, f"optimizer state of {name}")


def _damaged(path: Path, key: object) -> UserError:
    return UserError(f"{path}: damaged, or not written by this program: its {key} is not what it should be.")


def _from_format_1(content: Checkpoint, path: Path) -> Checkpoint:
    """Format 1 kept architecture and schedule beside settings that did not always say the same."""
    for key in ("config", "architecture"):
        if not isinstance(content.get(key), dict):
            raise _damaged(path, key)
    model = {name: value for name, value in content["architecture"].items() if value is not None}
    config = combine(Layer(str(path), {**content["config"], "model": model})).config
    if "schedule" in content:
        try:
            config = with_schedule(config, TypeAdapter(Schedule).validate_python(content["schedule"]))
        except ValidationError:
            raise _damaged(path, "schedule") from None
    left = {key: value for key, value in content.items() if key not in ("architecture", "schedule")}
    return {**left, "format": FORMAT, "config": config.to_toml()}


def load_training_state(path: Path, *, mmap: bool = True) -> Checkpoint:
    """A checkpoint that training can continue from; UserError as for `load_checkpoint`, or if it has weights alone."""
    return own_checkpoint(read_torch_file(path, mmap=mmap), path, trainable=True)


def read_torch_file(path: Path, *, mmap: bool = True) -> Any:
    """What torch.save wrote to `path`, without ever building an object beyond tensors and built-in types.

    With `mmap` tensors are read from the file when they are used, so memory holds no second copy.

    Raises:
        UserError: missing, empty, truncated, damaged, foreign, or holding anything else.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint file.")
    problem = damage(path)
    if problem:
        raise UserError(f"{path}: {problem}.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: holds objects other than tensors and plain values; loading them could run foreign code: refused."
        ) from None
    except (RuntimeError, ValueError, KeyError, EOFError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: not a checkpoint that torch can read ({type(error).__name__}).") from None


def damage(path: Path) -> str:
    """What is wrong with the file as a zip archive, in words; empty if all checksums hold.

    torch.load itself does not look at checksums: a flipped bit would load silently.
    """
    if path.stat().st_size == 0:
        return "the file is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            if is_bomb(archive, path):
                return "the file says that it holds more than it is long"
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"the file is damaged, truncated, or no checkpoint ({error})"
    return f"the file is damaged: checksum of {broken} does not match" if broken else ""


def is_nanogpt(content: Any) -> bool:
    """Whether a loaded file has the shape of nanoGPT's ckpt.pt."""
    return isinstance(content, dict) and content.keys() >= {"model", "model_args"}


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest of dicts and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, inside))


def non_finite(state: dict[str, Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or infinity."""
    floats = ((name, tensor) for name, tensor in state.items() if tensor.is_floating_point())
    return next((name for name, tensor in floats if not torch.isfinite(tensor).all()), None)


def refuse_non_finite(state: dict[str, Tensor], source: str, what: str) -> None:
    """Raise UserError if a tensor of `source` holds NaN or infinity."""
    if broken := non_finite(state):
        raise UserError(f"{source}: the {what} hold NaN or infinity ({broken}). Use an earlier checkpoint.")
