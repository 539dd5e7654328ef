"""`metrics.jsonl`: one JSON object a line, each step once of each kind, whatever was killed in between."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanogpt_cli.files import OwnFile, atomic_write, disk_full_named, open_own, own_folder, sync_folder

TAIL = 1 << 18  # bytes that are read of the end of a file
LARGEST = 1e300  # of a number: sums of larger ones are infinite


class MetricsLog:
    """Appends lines to `path`. A line the disk has no room for waits in memory, in order, for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: OwnFile | None = None
        self._pending = b""
        self._made = False  # and its name is not durable yet

    def append(self, values: dict[str, Any]) -> None:
        """Write one line without values that are None, NaN or infinite.

        A full disk raises nothing here: the line waits in memory, and `sync` raises if there is still no room.
        """
        kept = {key: value for key, value in values.items() if _plain(value)}
        self._pending += json.dumps(kept).encode() + b"\n"
        try:
            self._drain()
        except OSError:
            self._close()  # the lines are kept; `sync`, called before a checkpoint, raises if it still fails

    def sync(self) -> None:
        """Make every line durable; call it before the checkpoint that counts on them.

        Raises:
            DiskFullError: no room; the lines stay in memory for the next try.
            OSError: anything else the file system reports.
        """
        with disk_full_named(self.path):
            self._drain()
            if self._file is not None:
                os.fsync(self._file.fileno())
            if self._made:
                sync_folder(self.path.parent)
                self._made = False

    def keep_through(self, step: int, evaluated_step: int) -> None:
        """Rewrite the file without half lines, repeated ones, and what lies after a checkpoint.

        Args:
            step: completed updates in the checkpoint.
            evaluated_step: the last step that was evaluated before it.
        """
        self._close()
        self._pending = b""
        if not self.path.exists():
            return
        atomic_write(self.path, lambda file: file.writelines(self._kept(step, evaluated_step)))

    def _kept(self, step: int, evaluated_step: int) -> Iterator[bytes]:
        seen = set()
        for line in read_metrics(self.path):
            key = (line["step"], "val_loss" in line)
            if line["step"] <= (evaluated_step if key[1] else step) and key not in seen:
                seen.add(key)
                yield json.dumps(line).encode() + b"\n"

    def close(self) -> None:
        """Write what is left, if the disk takes it: a checkpoint that needs it has been refused by `sync`."""
        with contextlib.suppress(OSError):
            self._drain()
        self._close()

    def _drain(self) -> None:
        if self._file is None:
            own_folder(self.path.parent)  # somebody may have tidied up
            self._made |= not self.path.exists()
            self._file = open_own(self.path, append=True)
        while self._pending:
            written = self._file.write(self._pending)  # unbuffered: may write less than all
            self._pending = self._pending[written:]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file that are whole. No file, no lines."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from parse_lines(file)


def parse_lines(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Those of some lines that are whole: a JSON object with a whole-numbered `step`, without what is not finite."""
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # half a line of a killed process, or damage
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            yield {key: value for key, value in line.items() if _plain(value)}


def read_after(path: Path, place: str) -> tuple[list[dict[str, Any]], str, bool]:
    """The whole lines after `place`, and the place after them; "" is the beginning of the file.

    The third is whether these are all lines: a place in a file that a resume has replaced since is the beginning.
    """
    if not path.is_file():
        return [], "", True
    with path.open("rb") as file:
        there = os.fstat(file.fileno())
        inode, _, offset = place.partition(":")
        whole = inode != str(there.st_ino) or not offset.isdecimal() or int(offset) > there.st_size
        start = 0 if whole else int(offset)
        file.seek(start)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]  # the rest is still being written
    return list(parse_lines(text.splitlines())), f"{there.st_ino}:{start + len(text)}", whole


def last_lines(path: Path) -> list[bytes]:
    """The end of a file as lines, the first perhaps not whole; no file, no lines."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        return file.read().splitlines()


def columns(
    lines: Sequence[dict[str, Any]], keys: Sequence[str], most: int | None = None
) -> dict[str, list[float | None]]:
    """The numbers of lines by key, None where a line has none; of more than `most` lines neighbours are averaged."""
    size = -(-len(lines) // most) or 1 if most else 1
    groups = [lines[at : at + size] for at in range(0, len(lines), size)]
    return {key: [_mean([line.get(key) for line in group]) for group in groups] for key in keys}


def _mean(values: list[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float) and abs(value) < LARGEST]
    if len(numbers) == 1:
        return numbers[0]  # a step stays a whole number
    return sum(numbers) / len(numbers) if numbers else None


def _plain(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
