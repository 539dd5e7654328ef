"""Reading windows of tokens from the files of a split.

A split is one file or several shards, seen as one stream. It is read by plain reads: a memory map would keep every page
it touched resident, and a run touches them all.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanogpt_cli.errors import NanogptError, UserError

Ids = npt.NDArray[np.int64]

OPEN_FILES = 64  # shards kept open at once; some systems allow a process 256 files


@dataclass(frozen=True)
class TokenFile:
    """One file of a split: `count` tokens that start `header` bytes into it."""

    path: Path
    count: int
    header: int = 0


class Tokens:
    """A split as one stream of `count` tokens. May be used from several threads, forked and pickled."""

    def __init__(self, files: Sequence[TokenFile], dtype: str, highest_id: int | None = None) -> None:
        self.files = tuple(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.highest_id = highest_id  # None where nobody has looked yet
        self._starts = np.cumsum([0, *(file.count for file in files)])
        self.count = int(self._starts[-1])
        self._forget_handles()

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of the stream."""
        return [file.path for file in self.files]

    def read(self, offsets: npt.NDArray[np.int64], length: int) -> Ids:
        """`length` tokens from each of `offsets`: int64 (len(offsets), length).

        Raises:
            ValueError: a window reaches past the end.
            NanogptError: a file is shorter than it was when it was opened.
        """
        if len(offsets) and not (offsets.min() >= 0 and offsets.max() + length <= self.count):
            raise ValueError(f"a window of {length} tokens lies outside 0 .. {self.count}")
        return self._read_raw(offsets, length).astype(np.int64)

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds a token of the stream, and the token's number in that file."""
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.files[shard].path, position - int(self._starts[shard])

    def _read_raw(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        if self._process != os.getpid():  # a forked child would share the parent's file positions
            self._forget_handles()
        window = np.empty((len(offsets), length), dtype=self.dtype)
        first_shards = np.searchsorted(self._starts, offsets, side="right") - 1
        with self._lock:
            for row, offset, shard in zip(window, offsets.tolist(), first_shards.tolist(), strict=True):
                done = 0
                while done < length:  # a window may run over into the next shards
                    inside = offset + done - int(self._starts[shard])
                    take = min(length - done, self.files[shard].count - inside)
                    if take:
                        self._read_into(row[done : done + take], shard, inside)
                    done, shard = done + take, shard + 1
        return window

    def _read_into(self, target: npt.NDArray[Any], shard: int, inside: int) -> None:
        file = self._handles.get(shard) or self._open(shard)
        file.seek(self.files[shard].header + inside * self.dtype.itemsize)
        view = target.data.cast("B")
        while view:
            read = file.readinto(view)
            if not read:
                raise NanogptError(f"{self.files[shard].path} has become shorter while it was in use.")
            view = view[read:]

    def _open(self, shard: int) -> FileIO:
        if len(self._handles) >= OPEN_FILES:
            self._handles.pop(next(iter(self._handles))).close()
        file = self._handles[shard] = FileIO(self.files[shard].path)
        return file

    def _forget_handles(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._handles: dict[int, FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "dtype": self.dtype.str, "highest_id": self.highest_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def check_batch(batch: Ids, offsets: npt.NDArray[np.int64], tokens: Tokens, vocab_size: int) -> None:
    """Refuse a batch (B, length), read at `offsets` (B,), that holds an id of `vocab_size` or more: UserError."""
    if batch.size == 0 or batch.max() < vocab_size:
        return
    row, column = np.argwhere(batch >= vocab_size)[0].tolist()
    raise bad_id(tokens, int(offsets[row]) + column, int(batch[row, column]), vocab_size)


def bad_id(tokens: Tokens, position: int, token: int, vocab_size: int) -> UserError:
    """The error for an id that the model has no row for."""
    path, inside = tokens.locate(position)
    return UserError(
        f"{path} holds id {token:,} at token {inside:,}, but the vocabulary has {vocab_size:,} ids (0 to "
        f"{vocab_size - 1:,}). Prepare the data set again, or give a size that fits: --vocab-size {token + 1} or more."
    )
