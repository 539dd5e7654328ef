"""`metrics.jsonl`: one JSON object a line, each step once of each kind, whatever was killed in between."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanogpt_cli.files import OwnFile, atomic_write, disk_full_named, open_own, own_folder, sync_folder


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
    """The lines of a metrics file that are whole: a JSON object with a whole-numbered `step`. No file, no lines."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # half a line of a killed process, or damage
                continue
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield {key: value for key, value in line.items() if _plain(value)}


def _plain(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
