"""Windows of tokens: a split as a stream, and a data set as two of them.

A split is one file or several shards. It is read by plain reads: a memory map would keep every page it touched
resident, and a run touches them all.
"""

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanogpt_cli import foreign
from nanogpt_cli.errors import NanogptError, UserError, typed

if TYPE_CHECKING:
    from nanogpt_cli.data.tokenizers import Tokenizer

Int64Array = npt.NDArray[np.int64]

META, FORMAT = "meta.toml", 1  # what makes a folder of token files a data set of ours
WORK = ".prepare"  # stands in a folder that prepare has not finished
OPEN_FILES = 64  # shards kept open at once; some systems allow a process 256 files
SAMPLED_BLOCKS, SAMPLED_TOKENS = 64, 1024


@dataclass(frozen=True)
class TokenFile:
    """One file of a split: `count` tokens that start `header` bytes into it."""

    path: Path
    count: int
    header: int = 0


class Tokens:
    """A split as one stream of `count` tokens. May be used from several threads, forked and pickled."""

    def __init__(
        self, files: Sequence[TokenFile], dtype: str, highest_id: int | None = None, sha256: str | None = None
    ) -> None:
        self.files = tuple(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.highest_id, self.sha256 = highest_id, sha256  # None where nobody has looked yet
        self._starts = np.cumsum([0, *(file.count for file in files)])
        self.count = int(self._starts[-1])
        self._forget_handles()

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of the stream."""
        return [file.path for file in self.files]

    def read(self, offsets: Int64Array, length: int) -> Int64Array:
        """`length` tokens from each of `offsets`: int64 (len(offsets), length).

        Raises:
            ValueError: a window reaches past the end.
            NanogptError: a file is shorter than it was when it was opened.
        """
        if len(offsets) and not (offsets.min() >= 0 and offsets.max() + length <= self.count):
            raise ValueError(f"a window of {length} tokens lies outside 0 .. {self.count}")
        if self._process != os.getpid():  # a forked child would share the parent's file positions
            self._forget_handles()
        window = np.empty((len(offsets), length), dtype=self.dtype)
        first_shards = np.searchsorted(self._starts, offsets, side="right") - 1
        with self._lock:
            for row, offset, shard in zip(window, offsets.tolist(), first_shards.tolist(), strict=True):
                self._read_row(row, offset, shard)
        return window.astype(np.int64)

    def sampled(self) -> tuple[Int64Array, Int64Array]:
        """Blocks spread evenly over the stream: positions and ids, int64 (blocks, tokens of a block) both."""
        length = min(SAMPLED_TOKENS, self.count)
        blocks = min(SAMPLED_BLOCKS, -(-self.count // max(1, length)))
        offsets = np.arange(blocks, dtype=np.int64) * (self.count - length) // max(1, blocks - 1)
        return offsets[:, None] + np.arange(length), self.read(offsets, length)

    def digest(self) -> str:
        """Names the content cheaply, wherever it lies and however it is cut into files: SHA-256 of `sampled`."""
        _, ids = self.sampled()
        return hashlib.sha256(self.count.to_bytes(8, "little") + ids.astype("<u4").tobytes()).hexdigest()

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds a token of the stream, and the token's number in that file."""
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.files[shard].path, position - int(self._starts[shard])

    def _read_row(self, row: npt.NDArray[Any], offset: int, shard: int) -> None:
        view, place = row.data.cast("B"), (offset - int(self._starts[shard])) * self.dtype.itemsize
        while view:  # a window may run over into the next shards
            part = self.files[shard]
            left = part.count * self.dtype.itemsize - place
            if not left:
                shard, place = shard + 1, 0
                continue
            file = self._handles.get(shard) or self._open(shard)
            file.seek(part.header + place)
            read = file.readinto(view[:left])
            if not read:
                raise NanogptError(f"{part.path} has become shorter while it was in use.")
            view, place = view[read:], place + read

    def _open(self, shard: int) -> FileIO:
        if len(self._handles) >= OPEN_FILES:
            self._handles.pop(next(iter(self._handles))).close()
        file = self._handles[shard] = FileIO(self.files[shard].path)
        return file

    def _forget_handles(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._handles: dict[int, FileIO] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.files, self.dtype.str, self.highest_id, self.sha256)


@dataclass
class DataSet:
    """Two splits and what is known about their ids."""

    folder: Path
    name: str
    train: Tokens
    val: Tokens
    tokenizer: "Tokenizer | None"
    vocab_size: int  # rows of the token table for a model trained from scratch
    vocab_source: str  # where vocab_size comes from, in words
    notes: list[str] = field(default_factory=list)  # what a reader of the plan should know
    bytes_per_token: float | None = None  # UTF-8 bytes of its text / tokens of both splits; None if nobody counted

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data set from another one, in plain types; the same wherever the folder lies."""
        splits = {}
        for split, tokens in (("train", self.train), ("val", self.val)):
            splits[split] = {"tokens": tokens.count, "dtype": tokens.dtype.name, "digest": tokens.digest()}
            if tokens.sha256 is not None:
                splits[split]["sha256"] = tokens.sha256
        return {"name": self.name, "folder": str(self.folder), **splits}


def difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """How two fingerprints differ in content, in words; None when they are of the same data."""
    for split in ("train", "val"):
        old, new = saved[split], current[split]
        if old["tokens"] != new["tokens"]:
            return f"the {split} split had {old['tokens']:,} tokens, now {new['tokens']:,}"
        if any(old[key] != new[key] for key in ("digest", "sha256") if key in old and key in new):
            return f"the {split} split has as many tokens as before, but not the same ones"
    return None


def check_batch(batch: Int64Array, offsets: Int64Array, tokens: Tokens, vocab_size: int) -> None:
    """Refuse a batch (B, length), read at `offsets` (B,), that holds an id of `vocab_size` or more: UserError."""
    if batch.size == 0 or batch.max() < vocab_size:
        return
    row, column = np.argwhere(batch >= vocab_size)[0].tolist()
    token = int(batch[row, column])
    advice = f"Prepare the data set again, or start a run with a table that holds it: --vocab-size {token + 1}."
    raise bad_id(tokens, int(offsets[row]) + column, token, vocab_size, advice)


def bad_id(tokens: Tokens, position: int, token: int, vocab_size: int, advice: str) -> UserError:
    """The error for an id outside the vocabulary."""
    path, inside = tokens.locate(position)
    return UserError(
        f"{path} holds id {token:,} at token {inside:,}, but the vocabulary has {vocab_size:,} ids (0 to "
        f"{vocab_size - 1:,}). {advice}"
    )


class DamagedError(UserError):
    """A data set that was complete and is so no more; `fault` says what is wrong with it."""

    def __init__(self, fault: str, folder: Path) -> None:
        super().__init__(f"{fault}. Prepare the data set again: {prepare_line(folder)}")
        self.fault = fault


def read_meta(path: Path) -> dict[str, Any]:
    """What meta.toml says; nothing where it is not there or damaged."""
    try:
        return foreign.read_toml(path, limit=foreign.LARGE)
    except UserError:
        return {}


def prepare_line(folder: Path, **instead: str) -> str:
    """The command that makes the data set of a folder: as it was made, where its meta.toml can be read.

    `instead` replaces flags, for a data set that differs in them.
    """
    from nanogpt_cli.data.catalogue import find  # only for messages

    name, meta = folder.name, folder / META
    try:
        words = [str(word) for word in foreign.field(read_meta(meta), "arguments", list, meta)]
    except UserError:  # none, of an earlier version, or damaged
        words = [name] if find(name) else ["PATH", "--name", name]
        words += ["--force"] * (meta.exists() and not instead)
    for flag, value in instead.items():
        if f"--{flag}" in words:
            place = words.index(f"--{flag}")
            del words[place : place + 2]
        words += [f"--{flag}", value]
    return " ".join(["nanogpt prepare", *map(typed, words)])
