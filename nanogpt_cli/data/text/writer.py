"""The two unfinished token files of a data set, and the note beside them of what they hold."""

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_cli.data.text.encode import Chunk, Cursor, Encoded
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import DiskFullError, OwnFile, disk_full_named, open_own, write_bytes
from nanogpt_cli.foreign import field, read_json

STATE = "state.json"
SPLITS = ("train", "val")
SAVE_SECONDS = 5.0


class Writer:
    """Appends chunks; a context manager. What follows the last note is dropped when the work goes on.

    Args:
        work: the folder of the unfinished files.
        request: names the work.
        itemsize: bytes a token.
        head: so many of the first tokens go to val.
    """

    def __init__(self, work: Path, request: str, itemsize: int, head: int = 0) -> None:
        self.work, self.request, self.itemsize, self.head = work, request, itemsize, head
        self.cursor, self.bytes = Cursor(), [0, 0, 0, 0]
        self.paths = [work / f"{split}.{kind}" for kind in ("bin", "hashes") for split in SPLITS]
        if (work / STATE).exists():
            state = read_note(work)
            sizes = [path.stat().st_size if path.exists() else 0 for path in self.paths]
            if all(size >= noted for size, noted in zip(sizes, state["bytes"], strict=True)):
                self.cursor, self.bytes = Cursor(*state["cursor"]), state["bytes"]

    def __enter__(self) -> "Writer":
        self.saved = time.monotonic()
        self.files: list[io.BufferedWriter[OwnFile]] = []
        for path, size in zip(self.paths, self.bytes, strict=True):
            file = io.BufferedWriter(open_own(path))
            self.files.append(file)
            with disk_full_named(path):
                file.truncate(size)
            file.seek(size)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of train and val so far."""
        return self.bytes[0] // self.itemsize, self.bytes[1] // self.itemsize

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        train, val, *hashes = encoded
        if self.head:
            place = max(0, self.head * self.itemsize - self.bytes[1])
            train, val = train[place:], train[:place]
        with _full_disk_told(self.work):
            for which, data in enumerate((train, val, *hashes)):
                self.files[which].write(data)
                self.bytes[which] += len(data)
        self.cursor = chunk.after
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Make what is written durable, then note it."""
        note = {"request": self.request, "cursor": self.cursor, "bytes": self.bytes}
        with _full_disk_told(self.work):
            for file in self.files:
                file.flush()
                os.fsync(file.fileno())
            write_bytes(self.work / STATE, json.dumps(note).encode())
        self.saved = time.monotonic()

    def duplicates(self) -> int:
        """Documents of val that stand in train too, going by their beginnings."""
        train, val = (np.fromfile(path, "<u8") for path in self.paths[2:])
        return int(np.isin(val, train).sum())


def read_note(work: Path) -> dict[str, Any]:
    """What is noted of unfinished files; UserError if it is damaged."""
    note = read_json(work / STATE)
    field(note, "request", str, work / STATE)
    for key, length in (("cursor", len(Cursor._fields)), ("bytes", 2 * len(SPLITS))):
        counts = field(note, key, list, work / STATE, lambda held: all(type(one) is int and one >= 0 for one in held))
        if len(counts) != length:
            raise UserError(f"{work / STATE}: {key} has {len(counts)} numbers, {length} are needed.")
    return note


@contextlib.contextmanager
def _full_disk_told(work: Path) -> Iterator[None]:
    try:
        with disk_full_named(work):
            yield
    except DiskFullError as error:
        raise NanogptError(
            f"The disk of {work.parent} is full. What is written so far is kept: make room and run it again."
        ) from error
