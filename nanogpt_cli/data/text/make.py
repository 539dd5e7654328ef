"""Text to token files, in bounded memory, with the same bytes for any number of workers and after any interruption.

    files -> documents -> pieces -> chunks -> (workers) -> ids -> .prepare/{train,val}.bin -> data/NAME, meta.toml last

While it runs everything lies in the folder `.prepare` of the data set, with a note of how far the input is written.
The same command again goes on from there; another one starts afresh.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanogpt_cli import foreign
from nanogpt_cli.data.bpe import SAMPLE_BYTES, bpe_size, train_bpe
from nanogpt_cli.data.fast import OtherIdsError
from nanogpt_cli.data.text.documents import ReadOptions
from nanogpt_cli.data.text.encode import Corpus, Cursor, encode_chunks, usual_workers
from nanogpt_cli.data.text.inputs import Inputs
from nanogpt_cli.data.text.splits import SplitRule
from nanogpt_cli.data.text.writer import SPLITS, STATE, Writer, read_note
from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer, get_tokenizer
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.data.tokens.files import FORMAT, META, WORK, DamagedError, read_meta
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import make_folder, open_own, refuse_link, sync_folder, user_cache, write_toml
from nanogpt_cli.progress import QUIET, Progress

SMALL_BYTES, MOST_CHARACTERS = 10_000_000, 10_000  # own text up to this size and alphabet is taken by characters
UNSEEN_SHARE = 0.05  # of val, in tokens that train has not, that is worth a word
Counts = npt.NDArray[np.int64]
EOT_RULES = {
    "eot": "id {eot} after every document",
    "newline": "a line break after every document that does not end in one",
    "none": "none",
}

FORM: dict[str, type] = {  # of meta.toml, as far as it is reported
    **dict.fromkeys(("name", "dtype", "eot_rule", "split_rule"), str),
    **dict.fromkeys(("splits", "tokenizer", "source", "statistics"), dict),
    "vocab_size": int,
    "warnings": list,
}


@dataclass(frozen=True)
class DataSetSpec:
    """What is to be made, where, and out of which text."""

    name: str
    folder: Path
    inputs: Inputs
    source: dict[str, Any]  # for meta.toml
    arguments: list[str]  # of the command that makes it
    tokenizer: str  # "auto", "char", "bytes", "bpe:SIZE", an encoding of tiktoken, or where `given` comes from
    split: SplitRule
    read_options: ReadOptions = field(default_factory=ReadOptions)
    end_of_text: bool = True  # after every document
    expect: dict[str, int] = field(default_factory=dict)  # tokens by split
    given: Tokenizer | None = None  # one that is there already

    def settings(self) -> str:
        """Names what is done with the text."""
        tokenizer = self.given.to_toml() if self.given else self.tokenizer
        return hashed([FORMAT, tokenizer, self.end_of_text, asdict(self.split), asdict(self.read_options)])

    def request(self) -> str:
        """Names the work: two specs that make different files differ in it."""
        return hashed([self.inputs.identity(), self.settings()])

    def line(self, *more: str) -> str:
        """The command that makes it, with more words."""
        return " ".join(["nanogpt prepare", *map(typed, [*self.arguments, *more])])


def hashed(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


@dataclass(frozen=True)
class Prepared:
    """A complete data set: its folder, what meta.toml says, and whether it was there already."""

    folder: Path
    meta: dict[str, Any]
    already: bool
    seconds: float


def make_data_set(
    spec: DataSetSpec, *, workers: int | None = None, force: bool = False, progress: Progress = QUIET
) -> Prepared:
    """Make the data set, or go on making it, or find that it is complete.

    Raises:
        UserError: the text cannot be read or is too short, or the folder holds something else; nothing was changed.
        NanogptError: the disk is full; the same call goes on from there.
    """
    started = time.perf_counter()
    if spec.folder.exists() and not spec.folder.is_dir():
        raise UserError(
            f"{spec.folder} is a file, where the token files need a folder. Give them another: --name NAME."
        )
    with _one_at_a_time(spec.folder, progress):
        found = None if force else _already(spec, progress)
        if (meta := found) is not None:
            shutil.rmtree(spec.folder / WORK, ignore_errors=True)  # of a process killed when all but this was done
        else:
            with _work_folder(spec, progress) as work:
                if not whole_meta(work / META):  # else nothing but the last renames is missing
                    write_toml(work / META, _make(spec, work, workers, progress))
                meta = _install(work, spec.folder)
    return Prepared(spec.folder, meta, found is not None, time.perf_counter() - started)


def _already(spec: DataSetSpec, progress: Progress) -> dict[str, Any] | None:
    """The metadata if the data set is complete, undamaged and the same; UserError if the folder holds another one."""
    path = spec.folder / META
    if path.is_file():
        meta = whole_meta(path)
        if meta.get("settings") == spec.settings() and same_text(spec.inputs, meta):
            if meta["source"].get("identity") != hashed(spec.inputs.identity()):  # so that next time nothing is read
                meta["source"]["identity"] = hashed(spec.inputs.identity())
                write_toml(path, meta)
            try:
                open_data_set(spec.folder, progress=progress)
                return meta
            except DamagedError as error:
                progress.say(f"{error.fault}: it is made again")
                return None
        found = _difference(spec, meta)
    elif any(spec.folder.glob("*.bin")) and not (spec.folder / WORK).exists():
        found = f"{spec.folder} holds token files that nanogpt did not make"
    else:
        return None
    replace, keep = spec.line("--force"), spec.line("--name", f"{spec.name}-2")
    raise UserError(f"{found}. To replace it: {replace}. To keep it, give this one another name: {keep}")


def whole_meta(path: Path) -> dict[str, Any]:
    """What meta.toml says; nothing where it is not there, damaged, or lacks what is reported of a data set."""
    meta = read_meta(path)
    try:
        for key, kind in FORM.items():
            foreign.field(meta, key, kind, path)
        foreign.field(meta["tokenizer"], "kind", str, path)
        for split in SPLITS:
            foreign.count(meta["splits"].get(split), "tokens", path, high=foreign.HIGHEST)
        for key in ("documents", "empty_documents", "characters"):
            foreign.count(meta["statistics"], key, path, low=0, high=foreign.HIGHEST)
    except UserError:
        return {}
    return meta


def same_text(inputs: Inputs, meta: dict[str, Any]) -> bool:
    """Whether a data set was made from just these files, whatever they are called and however old they are."""
    source: dict[str, Any] = meta.get("source", {})
    if source.get("identity") == hashed(inputs.identity()):
        return True
    return source.get("bytes") == sum(inputs.sizes) and source.get("sha256") == inputs.content()


def _difference(spec: DataSetSpec, meta: dict[str, Any]) -> str:
    if not meta:
        return f"{spec.folder / META} is damaged, so that it cannot be said what the token files beside it are"
    kind = meta["tokenizer"]["kind"]
    if meta.get("settings") == spec.settings() and meta["source"].get("paths") == _readable(spec.inputs.labels):
        return f"{_few(spec.inputs.labels)} has changed since {spec.folder} was made from it"
    return f"{spec.folder} holds a data set made from other text or with other settings (tokenizer {kind})"


@contextlib.contextmanager
def _work_folder(spec: DataSetSpec, progress: Progress) -> Iterator[Path]:
    """The folder of the unfinished files. After a failure it stays if there is something to go on from."""
    work = spec.folder / WORK
    refuse_link(work)
    made = [folder for folder in (spec.folder, *spec.folder.parents) if not folder.exists()]
    if _request_of(work) not in (None, spec.request()):
        progress.say("unfinished files of another text, or of other settings, or damaged ones, are dropped")
        shutil.rmtree(work)
    try:
        make_folder(work)
        if not sync_folder(work):
            progress.say("this file system syncs no folders: after a power cut, not a kill, make the data set again")
    except OSError as error:
        raise UserError(
            f"{spec.folder}: cannot be made: {error.strerror}. Choose a folder that can be written: --data-dir DIR."
        ) from None
    try:
        yield work
    except BaseException as error:
        if isinstance(error, OtherIdsError):
            (work / STATE).unlink(missing_ok=True)
        if not (work / STATE).exists() and not (work / META).exists():
            shutil.rmtree(work)
            for folder in made:
                folder.rmdir()
        raise


def _request_of(work: Path) -> str | None:
    """Which job the unfinished files belong to; None if there are none, nothing if what is noted of them is damaged."""
    if (work / META).is_file():
        return str(read_meta(work / META).get("request"))
    try:
        return str(read_note(work)["request"]) if (work / STATE).is_file() else None
    except UserError:
        return ""


def _make(spec: DataSetSpec, work: Path, workers: int | None, progress: Progress) -> dict[str, Any]:
    """Write both token files and return what meta.toml says about them."""
    corpus = Corpus(spec.inputs, spec.read_options, spec.split)
    tokenizer, ending, cut = _choose_tokenizer(spec, corpus, progress)
    head = spec.split.tokens if spec.split.rule == "head" else 0
    with Writer(work, spec.request(), tokenizer.dtype.itemsize, head) as writer:
        if spec.inputs.remote:
            writer.save()  # so that a download that fails is kept, and goes on
        if writer.cursor != Cursor():
            progress.say(f"going on after {sum(writer.tokens):,} tokens that are written already")
        chunks = corpus.chunks(writer.cursor, cut)
        with contextlib.closing(encode_chunks(chunks, tokenizer, ending, workers or usual_workers())) as encoded:
            for chunk, ids in encoded:
                writer.add(chunk, ids)
                done = f"{writer.cursor.documents:,} documents, {writer.cursor.text_bytes / 1e6:,.0f} MB"
                progress.at("preparing", chunk.share, 1.0, f"{done}, {sum(writer.tokens):,} tokens")
        if not all(writer.tokens):
            train, val = writer.tokens
            raise UserError(
                f"{_few(spec.inputs.labels)}: too little text: {train:,} tokens for train and {val:,} for val "
                f"({spec.split.words()}). Use more text, or another --val-fraction or --split."
            )
        writer.save()
        return _meta(spec, tokenizer, ending, writer)


def _choose_tokenizer(spec: DataSetSpec, corpus: Corpus, progress: Progress) -> tuple[Tokenizer, str, int | None]:
    """The tokenizer, what ends a document, and the byte val begins at where a text is cut."""
    kind, given, source = spec.tokenizer, spec.given, _few(spec.inputs.labels)
    by_char = kind == "char" if given is None else isinstance(given, CharTokenizer)
    after, characters = Cursor(), dict[str, int]()
    scanned = by_char or (given is None and (kind == "auto" or kind.startswith("bpe")))
    if scanned or spec.split.rule == "tail":
        progress.at("looking through the text", 0, 1)
        after, characters = corpus.scan(None if by_char else SMALL_BYTES if kind == "auto" else 0)
        if not after.characters:
            raise UserError(f"{source}: there is no text in it.")
    cut = spec.split.cut(after.text_bytes) if spec.split.rule == "tail" else None
    if kind == "auto":
        by_char = after.text_bytes <= SMALL_BYTES and len(characters) <= MOST_CHARACTERS
        kind = "char" if by_char else "gpt2"
        limits = f"10 MB of text and {MOST_CHARACTERS:,} different characters"
        progress.say(f"tokenizer: {kind} ({'at most' if by_char else 'more than'} {limits})")
    if by_char:
        newline = ["\n"] * (after.documents > 1)
        if given is None:
            given = CharTokenizer([*characters, *newline], max(characters, key=lambda one: characters[one]))
        elif isinstance(given, CharTokenizer):
            given.check(characters, f"{source}: ")
            newline = newline if "\n" in given.alphabet else []
        return given, "newline" if newline else "none", cut
    ending = "eot" if spec.end_of_text else "none"
    if given is None and kind.startswith("bpe"):
        given = _trained(bpe_size(kind), corpus, cut, after.text_bytes, progress)
    return given or get_tokenizer(kind, progress), ending, cut


def _trained(size: int, corpus: Corpus, cut: int | None, text_bytes: int, progress: Progress) -> Tokenizer:
    progress.at("learning merges", 0, 1)
    tokenizer = train_bpe(corpus.sample(cut, SAMPLE_BYTES, text_bytes), size)
    of = f"about {SAMPLE_BYTES / 1e6:.0f} MB of train, evenly spaced" if text_bytes > SAMPLE_BYTES else "all of train"
    fewer = "" if tokenizer.size == size else f": this text has no more pairs to merge for the {size:,} asked for"
    progress.say(f"tokenizer: {tokenizer.size:,} ids, learnt from {of}{fewer}")
    return tokenizer


def _meta(spec: DataSetSpec, tokenizer: Tokenizer, ending: str, writer: Writer) -> dict[str, Any]:
    counts, cursor = dict(zip(SPLITS, writer.tokens, strict=True)), writer.cursor
    dtype, labels = tokenizer.dtype.newbyteorder("<"), spec.inputs.labels
    tables, seen = {}, {}
    for split, path in zip(SPLITS, writer.paths, strict=False):
        tables[split], seen[split] = _split_table(path, counts[split], dtype, tokenizer.size)
    duplicates = writer.duplicates()
    unseen = int(seen["val"][seen["train"] == 0].sum()) / counts["val"]
    warnings = [
        f"{split} has {counts[split]:,} tokens, {expected:,} were expected"
        for split, expected in spec.expect.items()
        if counts[split] != expected
    ]
    if unseen >= UNSEEN_SHARE:
        warnings.append(
            f"{unseen:.0%} of val are tokens that never stand in train: is the end of the text of another kind?"
        )
    if duplicates:
        warnings.append(f"{duplicates:,} documents of val stand in train too: the validation loss will flatter")
    if cursor.nuls:
        warnings.append(f"the text holds {cursor.nuls:,} NUL characters: is all of it text?")
    if cursor.written_ends and tokenizer.eot is not None:
        warnings.append(
            f"<|endoftext|> is written out {cursor.written_ends:,} times and taken as plain text; where it parts "
            "documents of a txt file add --separator '<|endoftext|>'"
        )
    notes = {"line_ends": f"{cursor.line_ends:,} CRLF or CR became LF"} if cursor.line_ends else {}
    return {
        "format": FORMAT,
        "name": spec.name,
        "dtype": tokenizer.dtype.name,
        "vocab_size": tokenizer.size,
        "eot_rule": EOT_RULES[ending].format(eot=tokenizer.eot),
        "split_rule": spec.split.words(),
        "request": writer.request,
        "settings": spec.settings(),
        "arguments": _readable(spec.arguments),
        "warnings": warnings,
        **notes,
        "splits": tables,
        "tokenizer": tokenizer.to_toml(),
        "source": {**spec.source, **_content(spec, writer.request), "files": len(labels), "paths": _readable(labels)},
        "statistics": {
            "documents": cursor.documents,
            "empty_documents": cursor.empty,
            "characters": cursor.characters,
            "text_bytes": cursor.text_bytes,
        },
    }


def _content(spec: DataSetSpec, request: str) -> dict[str, Any]:
    """What tells the text again when its files have other names or time stamps; nothing if they changed meanwhile."""
    content = spec.inputs.content()
    if spec.request() != request:
        return {}
    identity = {"identity": hashed(spec.inputs.identity())}
    return identity if content is None else {**identity, "bytes": sum(spec.inputs.sizes), "sha256": content}


def _readable(labels: list[str]) -> list[str]:
    """The first hundred; also paths that the console's encoding could not read."""
    return [os.fsencode(label).decode("utf-8", "replace") for label in labels[:100]]


def _few(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _split_table(path: Path, tokens: int, dtype: np.dtype[Any], size: int) -> tuple[dict[str, Any], Counts]:
    """What meta.toml says about a token file, and how often each id stands in it."""
    digest, counts = hashlib.sha256(), np.zeros(size, np.int64)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            counts += np.bincount(np.frombuffer(block, dtype), minlength=size)
    highest = int(np.flatnonzero(counts)[-1])
    table = {"tokens": tokens, "highest_id": highest, "sha256": digest.hexdigest(), "bytes": tokens * dtype.itemsize}
    return table, counts


def _install(work: Path, folder: Path) -> dict[str, Any]:
    """Move finished files into place, metadata last. May be killed and run again at any point."""
    meta = read_meta(work / META)
    (folder / META).unlink(missing_ok=True)  # of a data set that is replaced, the marker goes first
    (work / STATE).unlink(missing_ok=True)  # the note is of files that are about to leave
    for split in SPLITS:
        part = work / f"{split}.bin"
        if part.exists():
            part.replace(folder / f"{split}.bin")
    sync_folder(folder)
    (work / META).replace(folder / META)
    sync_folder(folder)
    shutil.rmtree(work)
    return meta


@contextlib.contextmanager
def _one_at_a_time(folder: Path, progress: Progress) -> Iterator[None]:
    """Let processes that make the same data set wait for each other, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        try:
            locks = user_cache() / "locks"
            locks.mkdir(exist_ok=True)
            file = stack.enter_context(open_own(locks / name))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.say(f"another process is making {folder}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a home that cannot be written to, or has no locks
            progress.say(f"no lock in the user's cache ({error.strerror}): let nobody else make {folder} meanwhile")
        yield
