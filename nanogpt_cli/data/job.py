"""Text to token files, in bounded memory, with the same bytes for any number of workers and after any interruption.

    files -> documents -> pieces -> (workers) -> ids -> .prepare/{train,val}.bin -> data/NAME, meta.toml last

While it runs everything lies in the folder `.prepare` of the data set, with a note of how far the input is written.
The same command again goes on from there; another one starts afresh.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from nanogpt_cli.data.documents import Documents, Piece, Reading
from nanogpt_cli.data.inputs import Inputs
from nanogpt_cli.data.splits import Split
from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer, get_tokenizer
from nanogpt_cli.data.workers import Cursor, Encoded, Unit, encoded, usable_cores
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import DiskFullError, atomic_write, disk_full_named, sync_folder, user_cache, write_toml

META, WORK, STATE = "meta.toml", ".prepare", "state.json"
FORMAT = 1
SMALL_BYTES, MOST_CHARACTERS = 10_000_000, 10_000  # own text up to this size and alphabet is taken by characters
PARALLEL_BYTES = 8_000_000  # below this, starting processes takes longer than the work
UNIT = 1 << 19  # characters of a unit of work, at least
SAVE_SECONDS = 5.0
SPLITS = ("train", "val")
EOT_RULES = {
    "eot": "id {eot} after every document",
    "newline": "a line break after every document that does not end in one",
    "none": "none",
}


class Progress(Protocol):
    """Who hears how far the work is."""

    def say(self, text: str) -> None:
        """One line about what was chosen or found."""

    def at(self, share: float, documents: int, text_bytes: int, tokens: int) -> None:
        """Totals so far; `share` of the input is done, 0 to 1."""


class Quiet:
    """Progress for nobody."""

    def say(self, text: str) -> None:
        """Nothing."""

    def at(self, share: float, documents: int, text_bytes: int, tokens: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Job:
    """What is to be made, where, and out of which text."""

    name: str
    folder: Path
    inputs: Inputs
    source: dict[str, Any]  # for meta.toml
    tokenizer: str  # "auto", "char", "bytes" or an encoding of tiktoken
    split: Split
    reading: Reading = field(default_factory=Reading)
    end_of_text: bool = True  # after every document
    expect: dict[str, int] = field(default_factory=dict)  # tokens by split
    again: str = ""  # the command that makes it, for messages

    def request(self) -> str:
        """Names the job: two jobs that make different files differ in it."""
        what = [FORMAT, self.tokenizer, self.end_of_text, asdict(self.split), asdict(self.reading)]
        return hashlib.sha256(json.dumps([self.inputs.identity(), self.source, *what]).encode()).hexdigest()


@dataclass(frozen=True)
class Prepared:
    """A complete data set: its folder, what meta.toml says, and whether it was there already."""

    folder: Path
    meta: dict[str, Any]
    already: bool
    seconds: float


def run(job: Job, *, workers: int | None = None, force: bool = False, progress: Progress | None = None) -> Prepared:
    """Make the data set, or go on making it, or find that it is complete.

    Raises:
        UserError: the text cannot be read or is too short, or the folder holds something else; nothing was changed.
        NanogptError: the disk is full or a worker was killed; the same call goes on from there.
    """
    progress, started = progress or Quiet(), time.perf_counter()
    with _one_at_a_time(job.folder, progress):
        meta = _already(job, force)
        if meta is not None:
            return Prepared(job.folder, meta, True, time.perf_counter() - started)
        with _work_folder(job) as work:
            if not (work / META).is_file():  # else nothing but the last renames is missing
                _make(job, work, workers, progress)
            meta = _install(work, job.folder)
    return Prepared(job.folder, meta, False, time.perf_counter() - started)


def _already(job: Job, force: bool) -> dict[str, Any] | None:
    """The metadata if the data set is complete and the same; UserError if the folder holds another one."""
    path, fresh = job.folder / META, "or give this one another --name"
    if force:
        return None
    if path.is_file():
        meta = tomllib.loads(path.read_text(encoding="utf-8"))
        if meta.get("request") == job.request():
            return meta
        raise UserError(
            f"{job.folder} holds a data set made from other text or with other settings "
            f"({meta.get('split_rule')}; tokenizer {meta.get('tokenizer', {}).get('kind')}). "
            f"To make it again add --force, {fresh}."
        )
    if (job.folder / "train.bin").exists() and not (job.folder / WORK).exists():
        raise UserError(
            f"{job.folder} holds token files that nanogpt did not make. To replace them add --force, {fresh}."
        )
    return None


@contextlib.contextmanager
def _work_folder(job: Job) -> Iterator[Path]:
    """The folder of the unfinished files. After a failure it stays if there is something to go on from."""
    work = job.folder / WORK
    made = [folder for folder in (job.folder, *job.folder.parents) if not folder.exists()]
    if work.exists() and _read_request(work) != job.request():
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    except BaseException:
        if not (work / STATE).exists():
            shutil.rmtree(work)
            for folder in made:
                folder.rmdir()
        raise


def _read_request(work: Path) -> str | None:
    if (work / META).is_file():
        return str(tomllib.loads((work / META).read_text(encoding="utf-8")).get("request"))
    if (work / STATE).is_file():
        return str(json.loads((work / STATE).read_text(encoding="utf-8")).get("request"))
    return None


@dataclass(frozen=True)
class _Plan:
    """What follows from a look at the text."""

    tokenizer: Tokenizer
    ending: str
    cut: int | None  # characters before val, where "tail" can be counted in characters


def _make(job: Job, work: Path, workers: int | None, progress: Progress) -> None:
    plan = _look(job, progress)
    with _Writer(job, work, plan) as writer:
        if writer.cursor != Cursor():
            progress.say(f"going on after {sum(writer.tokens()):,} tokens that are written")
        small = sum(job.inputs.sizes) < PARALLEL_BYTES
        units = _units(job, plan.cut, writer.cursor)
        for unit, ids in encoded(units, plan.tokenizer, plan.ending, 1 if small else workers or usable_cores()):
            writer.add(unit, ids)
            progress.at(unit.share, writer.documents, writer.text_bytes, sum(writer.tokens()))
        writer.save()
        write_toml(work / META, _finish(job, plan, writer, progress))


def _look(job: Job, progress: Progress) -> _Plan:
    """Choose the tokenizer, and find where val begins: by a scan of the text if it is short or read by characters."""
    kind, scan = job.tokenizer, None
    if kind in ("auto", "char") or job.split.rule == "tail":
        scan = _scan(job, None if kind == "char" else SMALL_BYTES)
    if kind == "auto":
        kind = "char" if scan is not None and len(scan.counts) <= MOST_CHARACTERS else "gpt2"
        progress.say(f"tokenizer {kind}: characters are for up to 10 MB of text with at most 10,000 different ones")
    cut = job.split.cut(scan.characters) if scan is not None and job.split.rule == "tail" else None
    if kind == "char":
        assert scan is not None
        ending = "newline" if scan.documents > 1 else "none"
        alphabet = scan.counts.keys() | ({"\n"} if ending == "newline" else set())
        return _Plan(CharTokenizer(alphabet, max(scan.counts, key=lambda c: (scan.counts[c], c))), ending, cut)
    return _Plan(get_tokenizer(kind, progress.say), "eot" if job.end_of_text else "none", cut)


@dataclass
class _Scan:
    characters: int = 0
    documents: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of every character


def _scan(job: Job, most_bytes: int | None) -> _Scan | None:
    """Read the text once without encoding it; None if it is longer than `most_bytes` in UTF-8."""
    scan, text_bytes = _Scan(), 0
    if most_bytes is not None and sum(job.inputs.sizes) > 4 * most_bytes:
        return None  # nothing shrinks that much
    for unit in _units(job, None, Cursor()):
        for piece in unit.pieces:
            scan.characters += len(piece.text)
            scan.documents += piece.ends
            scan.counts.update(piece.text)
            text_bytes += len(piece.text.encode())
        if most_bytes is not None and text_bytes > most_bytes:
            return None
    if not scan.characters:
        raise UserError(f"{', '.join(job.inputs.labels[:5])}: there is no text in it.")
    return scan


def _units(job: Job, cut: int | None, cursor: Cursor) -> Iterator[Unit]:
    """The input from `cursor` on, in portions for one worker each. Empty documents are left out and counted."""
    held: list[Piece] = []
    flags: list[bool] = []
    size, before, total = 0, sum(job.inputs.sizes[: cursor.file]), max(1, sum(job.inputs.sizes))
    _, skip, row, empty, characters = cursor
    for index in range(cursor.file, len(job.inputs.labels)):
        starts, val = True, False
        with job.inputs.open(index) as path:
            documents = Documents(path, job.reading, job.inputs.labels[index])
            for number, piece in enumerate(documents):
                val = job.split.is_val(index, row, piece.text) if starts else val
                starts, is_empty = piece.ends, starts and piece.ends and not piece.text
                if number < skip:
                    continue
                empty, row = empty + is_empty, row + piece.ends
                for part in [] if is_empty else _parted(piece, cut, characters):
                    held.append(part)
                    flags.append(val if cut is None else characters >= cut)
                    size, characters = size + len(part.text), characters + len(part.text)
                if size >= UNIT:
                    share = (before + documents.share * job.inputs.sizes[index]) / total
                    yield Unit(held, flags, Cursor(index, number + 1, row, empty, characters), share)
                    held, flags, size = [], [], 0
        before, skip = before + job.inputs.sizes[index], 0
    if held:
        yield Unit(held, flags, Cursor(len(job.inputs.labels), 0, row, empty, characters), 1.0)


def _parted(piece: Piece, cut: int | None, characters: int) -> list[Piece]:
    """The piece, in two if val begins inside it; `characters` come before it."""
    place = -1 if cut is None else cut - characters
    if 0 < place < len(piece.text):
        return [Piece(piece.text[:place], False), Piece(piece.text[place:], piece.ends)]
    return [piece]


class _Writer:
    """The two unfinished token files, and the note beside them of what they hold."""

    def __init__(self, job: Job, work: Path, plan: _Plan) -> None:
        self.work, self.split, self.request = work, job.split, job.request()
        self.itemsize = plan.tokenizer.dtype.itemsize
        self.cursor = Cursor()
        self.bytes = [0, 0]
        self.documents = self.characters = self.text_bytes = 0
        self.saved = time.monotonic()
        self._restore()

    def _restore(self) -> None:
        path = self.work / STATE
        if not path.exists():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        self.cursor, self.bytes = Cursor(*state["cursor"]), state["bytes"]
        self.documents, self.characters, self.text_bytes = state["counts"]

    def __enter__(self) -> "_Writer":
        self.files: list[BinaryIO] = []
        for split, size in zip(SPLITS, self.bytes, strict=True):
            path = self.work / f"{split}.bin"
            path.touch()
            file = path.open("r+b")
            file.truncate(size)  # what came after the note
            file.seek(size)
            self.files.append(file)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()

    def tokens(self) -> list[int]:
        """Tokens of train and val so far."""
        return [size // self.itemsize for size in self.bytes]

    def add(self, unit: Unit, ids: Encoded) -> None:
        """Write the ids of the next unit."""
        train, val = ids.ids
        if self.split.rule == "head":
            place = max(0, self.split.tokens * self.itemsize - self.bytes[1])
            train, val = train[place:], train[:place]
        for which, data in enumerate((train, val)):
            with _full_disk_told(self.work):
                self.files[which].write(data)
            self.bytes[which] += len(data)
        self.cursor = unit.after
        self.documents += ids.documents
        self.characters += ids.characters
        self.text_bytes += ids.text_bytes
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Make what is written durable, then note it."""
        for file in self.files:
            with _full_disk_told(self.work):
                file.flush()
                os.fsync(file.fileno())
        counts = [self.documents, self.characters, self.text_bytes]
        state = {"request": self.request, "cursor": self.cursor, "bytes": self.bytes, "counts": counts}
        with _full_disk_told(self.work):
            atomic_write(self.work / STATE, lambda file: file.write(json.dumps(state).encode()))
        self.saved = time.monotonic()


def _finish(job: Job, plan: _Plan, writer: _Writer, progress: Progress) -> dict[str, Any]:
    """Cut val off where that is still to do, and describe the result."""
    if job.split.rule == "tail" and plan.cut is None:
        _cut_tail(writer, job.split.cut(writer.tokens()[0]))
    counts = dict(zip(SPLITS, writer.tokens(), strict=True))
    if not all(counts.values()):
        raise UserError(
            f"{', '.join(job.inputs.labels[:5])}: too little text to split: {counts['train']:,} tokens for train and "
            f"{counts['val']:,} for val ({job.split.words()}). Use more text, or another --val-fraction or --split."
        )
    dtype = plan.tokenizer.dtype.newbyteorder("<")
    splits = {split: _measured(writer.work / f"{split}.bin", count, dtype) for split, count in counts.items()}
    wrong = [
        f"{split} has {counts[split]:,} tokens, {n:,} were expected"
        for split, n in job.expect.items()
        if counts[split] != n
    ]
    for warning in wrong:
        progress.say(f"warning: {warning}")
    return {
        "format": FORMAT,
        "name": job.name,
        "dtype": plan.tokenizer.dtype.name,
        "vocab_size": plan.tokenizer.size,
        "eot_rule": EOT_RULES[plan.ending].format(eot=plan.tokenizer.eot),
        "split_rule": job.split.words(),
        "request": writer.request,
        "warnings": wrong,
        "splits": splits,
        "tokenizer": plan.tokenizer.to_toml(),
        "source": job.source,
        "statistics": {
            "documents": writer.documents,
            "empty_documents": writer.cursor.empty,
            "characters": writer.characters,
            "text_bytes": writer.text_bytes,
        },
    }


def _cut_tail(writer: _Writer, count: int) -> None:
    """Copy the tokens from number `count` on from train to val. `_install` cuts train: here the note still holds."""
    train, val = writer.files
    train.seek(count * writer.itemsize)
    val.seek(0)
    with _full_disk_told(writer.work):
        shutil.copyfileobj(train, val, 1 << 20)
        val.flush()
        os.fsync(val.fileno())
    writer.bytes = [count * writer.itemsize, writer.bytes[0] - count * writer.itemsize]


def _measured(path: Path, tokens: int, dtype: np.dtype[Any]) -> dict[str, Any]:
    """What meta.toml says about a token file, of which the first `tokens` count."""
    left, digest, highest = tokens * dtype.itemsize, hashlib.sha256(), 0
    with path.open("rb") as file:
        while left:
            block = file.read(min(left, 1 << 22))
            digest.update(block)
            ids: npt.NDArray[Any] = np.frombuffer(block, dtype)
            highest, left = max(highest, int(ids.max())), left - len(block)
    return {"tokens": tokens, "highest_id": highest, "sha256": digest.hexdigest(), "bytes": tokens * dtype.itemsize}


def _install(work: Path, folder: Path) -> dict[str, Any]:
    """Move finished files into place, metadata last. May be killed and run again at any point."""
    meta = tomllib.loads((work / META).read_text(encoding="utf-8"))
    (folder / META).unlink(missing_ok=True)  # a data set that is replaced: its marker goes first
    for split in SPLITS:
        part = work / f"{split}.bin"
        if part.exists():
            os.truncate(part, meta["splits"][split]["bytes"])
            part.replace(folder / f"{split}.bin")
    sync_folder(folder)
    (work / META).replace(folder / META)
    sync_folder(folder)
    shutil.rmtree(work)
    return meta


@contextlib.contextmanager
def _full_disk_told(work: Path) -> Iterator[None]:
    try:
        with disk_full_named(work):
            yield
    except DiskFullError as error:
        raise NanogptError(
            f"The disk of {work.parent} is full. What was written so far is kept: make room and run it again."
        ) from error


@contextlib.contextmanager
def _one_at_a_time(folder: Path, progress: Progress) -> Iterator[None]:
    """Let processes that make the same data set wait for each other, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:32]
    locks = user_cache() / "locks"
    locks.mkdir(exist_ok=True)
    with (locks / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"another process is making {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
