"""Checkpoints: plain dicts of tensors and built-in types, written whole or not at all, checked before they are trusted.

`ckpt.pt` holds everything a run needs to go on; `best.pt` holds weights alone. Both load with `weights_only=True`.
"""

import errno
import functools
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.setting import shown
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import DiskFullError, atomic_write, disk_full_named, sync_folder, temporary_beside
from nanogpt_cli.runs.form import TRAINING, WEIGHTS, Progress, check_form

FORMAT = 1
Checkpoint = dict[str, Any]


def save_checkpoint(checkpoint: Checkpoint, path: Path, *, previous: Path | None = None) -> None:
    """Write `checkpoint` to `path`; what stood there becomes `previous` if that is given.

    The new file is complete and synced before the old name moves, so that a kill at any instant leaves a whole file
    under `path`.

    Raises:
        DiskFullError: no room, told by the free space or by the write itself; both old files stay.
        OSError: the folder cannot be written.
    """
    if shutil.disk_usage(path.parent).free < tensor_bytes(checkpoint):
        raise _no_room(checkpoint, path)

    keep = functools.partial(link_or_copy, path, previous) if previous is not None and path.exists() else None
    try:
        atomic_write(path, lambda file: torch.save(checkpoint, file), before_rename=keep)
    except DiskFullError:
        raise _no_room(checkpoint, path) from None


def _no_room(checkpoint: Checkpoint, path: Path) -> DiskFullError:
    needed, free = tensor_bytes(checkpoint), shutil.disk_usage(path.parent).free
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
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(target.parent)


def load_checkpoint(path: Path, *, mmap: bool = True) -> Checkpoint:
    """Read a checkpoint of ours onto the CPU, after checking every checksum in it.

    With `mmap` tensors are read from the file when they are used, so memory holds no second copy.

    Raises:
        UserError: missing, truncated, damaged, or no checkpoint of this program; says which.
    """
    return own_checkpoint(read_torch_file(path, mmap=mmap), path)


def own_checkpoint(content: Any, path: Path) -> Checkpoint:
    """`content`, read from `path`, if it is a checkpoint of this program.

    Raises:
        UserError: it is something else, of a later format, or not as this program writes it.
    """
    if not isinstance(content, dict) or not content.keys() >= WEIGHTS.keys():
        hint = " It looks like a nanoGPT checkpoint." if is_nanogpt(content) else ""
        raise UserError(f"{path}: not a checkpoint of this program.{hint}")
    version = content["format"]
    if type(version) is not int or version != FORMAT:
        raise UserError(f"{path}: checkpoint format {shown(version)}; this version reads format {FORMAT}.")
    trainable = content.keys() >= TRAINING.keys()
    check_form(content, TRAINING if trainable else WEIGHTS, str(path))
    if trainable:
        content["progress"] = asdict(Progress(**content["progress"]))  # an earlier version may have known less
    return content


def load_training_state(path: Path) -> Checkpoint:
    """A checkpoint that training can continue from.

    Raises:
        UserError: as `load_checkpoint`; also for a file with weights alone.
    """
    content = load_checkpoint(path)
    if not content.keys() >= TRAINING.keys():
        raise UserError(
            f"{path}: holds weights alone, no optimizer state. "
            f"To start a new run from these weights: nanogpt train --init-from {typed(path)}"
        )
    return content


def read_torch_file(path: Path, *, mmap: bool = True) -> Any:
    """What torch.save wrote to `path`, without ever building an object beyond tensors and built-in types.

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
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"the file is damaged, truncated, or no checkpoint ({error})"
    return f"the file is damaged: checksum of {broken} does not match" if broken else ""


def is_nanogpt(content: Any) -> bool:
    """Whether a loaded file has the shape of nanoGPT's ckpt.pt."""
    return isinstance(content, dict) and content.keys() >= {"model", "model_args"}


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest of dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(tensor_bytes(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(v) for v in value)
    return 0


def non_finite(state: dict[str, torch.Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or infinity."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def refuse_non_finite(state: dict[str, torch.Tensor], source: str, what: str) -> None:
    """Raise UserError if a tensor of `source` holds NaN or infinity."""
    if broken := non_finite(state):
        raise UserError(f"{source}: the {what} hold NaN or infinity ({broken}). Use an earlier checkpoint.")


def latest_state(
    last: Path, previous: Path, stranger: Callable[[Checkpoint], str] = lambda checkpoint: ""
) -> tuple[Checkpoint | None, Path | None, str]:
    """The newest training state that can be trusted: (checkpoint, its file, what was wrong with the newer one).

    Args:
        stranger: says why a checkpoint that is whole does not belong here; empty if it does.

    Raises:
        UserError: files exist, but none can be used.
    """
    if not last.exists() and not previous.exists():
        return None, None, ""

    problems: list[str] = []
    for path in (last, previous):
        try:
            checkpoint = load_training_state(path)
            if why := stranger(checkpoint):
                raise UserError(f"{path}: {why}.")
            return checkpoint, path, "".join(problems)
        except UserError as error:
            problems.append(str(error))
    raise UserError("\n".join([*problems, "No checkpoint of this run can be used."]))
