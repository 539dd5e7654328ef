"""Token files of other projects: nanoGPT's folders, and the shards of llm.c and modded-nanogpt."""

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.errors import UserError

SHARD_HEADER = 1024  # bytes: 256 int32, of which magic, version and token count are used (llm.c, data_common.py)
SHARD_KINDS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # GPT-2 and Llama 3 ids
LLMC_EVAL_MAGIC = 20240522
LFS_POINTER = b"version https://git-lfs.github.com"
LARGEST_PICKLE = 16 << 20  # bytes


@dataclass
class Foreign:
    """A folder without our metadata: its splits, and whether their headers say what the ids are."""

    train: Tokens
    val: Tokens
    shards: bool


def find_foreign(folder: Path, dtype: str) -> Foreign | None:
    """The splits in `folder`, read as `dtype` where no header says it; None when it holds no token files.

    Raises:
        UserError: only one split is there, or a file is not what its name or header promises.
    """
    files = {split: _files_of(folder, split) for split in ("train", "val")}
    if not any(files.values()):
        return None
    for split, paths in files.items():
        if not paths:
            other = next(path.name for paths in files.values() for path in paths)
            raise UserError(f"{folder} holds {other} but no {split} split. Put a {split}.bin beside it.")
    opened = {split: [_open_file(path, dtype) for path in paths] for split, paths in files.items()}
    kinds = {(found, shard) for parts in opened.values() for _, found, shard in parts}
    if len(kinds) > 1:
        raise UserError(f"{folder} mixes token files of several formats. Give each format a folder of its own.")
    ((found, shards),) = kinds
    train, val = (Tokens([file for file, _, _ in opened[split]], found) for split in ("train", "val"))
    return Foreign(train, val, shards)


def _files_of(folder: Path, split: str) -> list[Path]:
    exact = folder / f"{split}.bin"
    if exact.is_file():
        return [exact]
    return sorted(path for path in folder.glob("*.bin") if split in re.split("[^a-z]+", path.stem.lower()))


def _open_file(path: Path, dtype: str) -> tuple[TokenFile, str, bool]:
    """A file with its dtype and whether it is a shard with a header."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(SHARD_HEADER)
    numbers = np.frombuffer(head, "<i4").tolist() if len(head) == SHARD_HEADER else [0, 0, 0]
    magic, version, count = numbers[:3]
    if head.startswith(LFS_POINTER):
        raise UserError(f"{path} is a Git LFS pointer, not the file itself. Fetch it: git lfs pull")
    if magic == LLMC_EVAL_MAGIC:
        raise UserError(f"{path} holds multiple-choice questions (llm.c's evaluation format), not a stream of tokens.")
    kind = SHARD_KINDS.get((magic, version))
    if kind is not None:
        expected = SHARD_HEADER + count * np.dtype(kind).itemsize
        if size != expected:
            raise UserError(
                f"{path} has {size:,} bytes, but its header says {count:,} tokens, {expected:,} bytes: it is truncated "
                "or damaged. Download it again."
            )
        return TokenFile(path, count, SHARD_HEADER), kind, True
    if path.name not in ("train.bin", "val.bin"):
        raise UserError(
            f"{path} has no header of llm.c or modded-nanogpt. Files of bare ids must be called train.bin and val.bin."
        )
    width = np.dtype(dtype).itemsize
    if size % width:
        raise UserError(
            f"{path} has {size:,} bytes, which is no whole number of {dtype} ids: it is truncated, or no token file."
        )
    return TokenFile(path, size // width), dtype, False


def read_meta_pkl(path: Path) -> tuple[int, str | None]:
    """Vocabulary size of nanoGPT's meta.pkl, and its alphabet where it is one of single characters in our order.

    Raises:
        UserError: the file is damaged or holds anything but numbers, strings and tables of them.
    """
    meta = load_plain_pickle(path)
    vocab_size, itos, stoi = (meta.get(key) for key in ("vocab_size", "itos", "stoi"))
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise UserError(f"{path}: vocab_size should be a whole number above 0.")
    if itos is None and stoi is None:
        return vocab_size, None
    if (
        not isinstance(itos, dict)
        or len(itos) != vocab_size
        or set(itos) != set(range(vocab_size))
        or not all(isinstance(text, str) for text in itos.values())
        or stoi != {text: number for number, text in itos.items()}
    ):
        raise UserError(
            f"{path}: itos and stoi should name the ids 0 to {vocab_size - 1}, each the reverse of the other, and do "
            "not. Prepare the data set again."
        )
    characters = [itos[number] for number in range(vocab_size)]
    in_order = characters == sorted(characters) and all(len(text) == 1 for text in characters)
    return vocab_size, "".join(characters) if in_order else None


class _PlainUnpickler(pickle._Unpickler):
    """Builds numbers, strings and containers of them, nothing that has to be looked up by a name.

    It is the unpickler written in Python: the one in C makes its memo as large as an index in the file says.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:200])


def load_plain_pickle(path: Path) -> dict[Any, Any]:
    """A pickled dict of numbers, strings and containers of them; no name in it is looked up, and nothing is run.

    Raises:
        UserError: the file is damaged, too large or holds anything else.
    """
    if path.stat().st_size > LARGEST_PICKLE:
        raise UserError(f"{path} is larger than {LARGEST_PICKLE:,} bytes, more than any vocabulary takes.")
    try:
        meta = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(meta, dict):
            raise ValueError(f"it holds a {type(meta).__name__}, no table")
    # damage may raise anything: the unpickler was not written with it in mind
    except Exception as error:
        why = str(error) or type(error).__name__
        raise UserError(
            f"{path} was not read: {why:.300}. Only a table of numbers and strings, as nanoGPT writes it, is accepted; "
            "nothing in the file was run."
        ) from error
    return meta
