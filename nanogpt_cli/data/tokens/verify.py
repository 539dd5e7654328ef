"""Whether token files hold what they should: a full hash and scan where that is cheap or the files are new here.

Splits under 256 MB are read through at every start. For larger ones the outcome is kept in the user's cache; after that
size, time stamp and sampled blocks are compared with it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanogpt_cli.data.tokens.files import DamagedError, Tokens, bad_id
from nanogpt_cli.files import user_cache, write_bytes
from nanogpt_cli.progress import QUIET, Progress

SMALL = 256 << 20  # bytes
CHUNK = 8 << 20  # bytes read at once


def check_content(tokens: Tokens, *, full: bool = False, progress: Progress = QUIET) -> None:
    """Compare a split with its metadata, and set its highest_id.

    Args:
        tokens: the split.
        full: read large files through again, whatever the cache says.
        progress: hears how much of the split is read through.

    Raises:
        UserError: the content is not what the metadata says.
    """
    stats = [path.stat() for path in tokens.paths]
    large = sum(stat.st_size for stat in stats) >= SMALL
    subject: dict[str, Any] = {"paths": [str(path.resolve()) for path in tokens.paths], "dtype": tokens.dtype.name}
    if large:
        subject |= {"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats], "digest": tokens.digest()}
    known = _recall(subject) if large and not full else None
    sha256, highest_id = known or read_through(tokens, progress)
    if tokens.sha256 not in (None, sha256):
        path = tokens.paths[0]
        fault = f"{path} is damaged: its SHA-256 is {sha256[:16]}..., meta.toml says {tokens.sha256:.16}..."
        raise DamagedError(fault, path.parent)
    tokens.highest_id = highest_id
    if large and not known:
        with suppress(OSError):  # a home that cannot be written to costs time at the next start, nothing else
            record = _record(subject)
            record.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(record, json.dumps([sha256, highest_id]).encode())


def check_ids(tokens: Tokens, vocab_size: int, advice: str) -> None:
    """Refuse a split whose highest id, where it is known, is outside the vocabulary: UserError with its place."""
    if tokens.highest_id is None or tokens.highest_id < vocab_size:
        return
    position = 0
    for _, ids in _chunks(tokens):
        above = np.flatnonzero(ids >= vocab_size)
        if above.size:
            raise bad_id(tokens, position + int(above[0]), int(ids[above[0]]), vocab_size, advice)
        position += ids.size
    path, found = tokens.paths[0], f"the highest id is {tokens.highest_id:,}"
    raise DamagedError(
        f"{path}: meta.toml says {found}, but the file holds none of {vocab_size:,} or more", path.parent
    )


def looks_like_uint32(tokens: Tokens) -> bool:
    """Whether a split read as uint16 seems to hold 32-bit ids: every second number tiny, the others not."""
    if tokens.dtype.itemsize != 2 or tokens.count < 2 or any(file.count % 2 for file in tokens.files):
        return False
    positions, ids = tokens.sampled()
    high, low = int(ids[positions % 2 == 1].max()), int(ids[positions % 2 == 0].max())
    return high <= 3 and low > 16 * high  # the upper half of an id below 262,144


def read_through(tokens: Tokens, progress: Progress) -> tuple[str, int | None]:
    """SHA-256 of the files of a split, and its highest id."""
    total, first = sum(path.stat().st_size for path in tokens.paths), tokens.paths[0]
    what = f"checking {first.parent.name}/{first.name}"
    hash_, done, highest_id = hashlib.sha256(), 0, None
    for data, ids in _chunks(tokens):
        hash_.update(data)
        if ids.size:
            highest_id = max(highest_id or 0, int(ids.max()))
        done += len(data)
        progress.at(what, done, total, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
    return hash_.hexdigest(), highest_id


def _chunks(tokens: Tokens) -> Iterator[tuple[bytes, npt.NDArray[Any]]]:
    """All bytes of a split, headers too, with the ids among them."""
    for file in tokens.files:
        with file.path.open("rb", buffering=0) as stream:
            yield stream.read(file.header), np.empty(0, tokens.dtype)
            while data := stream.read(CHUNK):
                yield data, np.frombuffer(data, tokens.dtype, len(data) // tokens.dtype.itemsize)


def _record(subject: dict[str, Any]) -> Path:
    """Where the outcome for just these files is kept."""
    return user_cache() / "verified" / f"{hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:32]}.json"


def _recall(subject: dict[str, Any]) -> tuple[str, int] | None:
    """(sha256, highest_id) of an earlier scan, or None."""
    try:
        sha256, highest_id = json.loads(_record(subject).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # none yet, or damaged: scanning again answers both
        return None
    return (sha256, highest_id) if isinstance(sha256, str) and isinstance(highest_id, int) else None
