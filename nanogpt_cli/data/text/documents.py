"""Documents out of files: txt, jsonl and parquet, each also compressed, in bounded memory.

A document comes as one or more pieces of about half a million characters at most, cut where a byte pair encoding parts
the text anyway, so that the ids of the pieces are the ids of the whole.
"""

import codecs
import contextlib
import gzip
import io
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from nanogpt_cli.data.tokenizers import without_surrogates
from nanogpt_cli.errors import NanogptError, UserError

PIECE = 1 << 19  # characters
WINDOW = 1 << 16  # characters after PIECE in which a place to cut is looked for; without one the cut is hard
LINE_LIMIT = 1 << 26  # characters of a jsonl line, which has to be in memory as a whole
BLOCK = 1 << 20  # bytes

KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")

# every pattern of tiktoken starts a new word at a blank that follows something printed; at a line break only after a
# letter or digit, since newer patterns keep punctuation and the line breaks after it together
SAFE_CUT = re.compile(r"(?<=\S)[ \t\u3000]|(?<=[^\W_])\n")


class Piece(NamedTuple):
    """A part of a document; `ends` marks its last one."""

    text: str
    ends: bool


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents."""

    format: str | None = None  # txt, jsonl or parquet; None: by the name's ending, else txt
    encoding: str = "utf-8"
    replace_bad_bytes: bool = False
    separator: str | None = None  # between the documents of a txt file; None: the file is one document
    text_field: str = "text"

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise UserError(f"--encoding {self.encoding}: Python knows no such encoding of text.") from error

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        usual = ReadOptions.__dataclass_fields__
        return {name: value for name, value in vars(self).items() if value != usual[name].default}


def file_kind(path: Path) -> str | None:
    """txt, jsonl or parquet by the ending, compressed or not; None for any other."""
    stem = path.stem if path.suffix in COMPRESSED else path.name
    return KINDS.get(Path(stem).suffix.lower())


class Documents:
    """The pieces of one file. `share` says how much of it has been read, 0 to 1.

    Iterating raises UserError for a file that is not what it should be: bad bytes, bad JSON, no text field, damage.
    """

    def __init__(self, path: Path, read_options: ReadOptions, label: str | None = None) -> None:
        self.path = path
        self.read_options = read_options
        self.label = label or str(path)
        self.kind = read_options.format or file_kind(path) or "txt"
        self.share = 0.0

    def __iter__(self) -> Iterator[Piece]:
        with self.path.open("rb") as raw, self._damage_named():
            if self.kind == "parquet":
                for text in self._parquet(self._stream(raw)):
                    yield from pieces([text])
            elif self.kind == "jsonl":
                for text in self._json_lines(self._blocks(raw)):
                    yield from pieces([text])
            else:
                yield from pieces(self._blocks(raw), self.read_options.separator)
        self.share = 1.0

    def _stream(self, raw: BinaryIO) -> BinaryIO:
        """The file's content, decompressed."""
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        if self.path.suffix == ".zst":
            return cast(BinaryIO, pyarrow_for(self.label).CompressedInputStream(raw, "zstd"))
        return raw

    def _blocks(self, raw: BinaryIO) -> Iterator[str]:
        """Decoded text; a byte order mark is dropped, CRLF and CR become LF, as when Python opens a text file."""
        utf8 = codecs.lookup(self.read_options.encoding).name == "utf-8"
        errors = "replace" if self.read_options.replace_bad_bytes else "strict"
        decoder = codecs.getincrementaldecoder("utf-8-sig" if utf8 else self.read_options.encoding)(errors)
        line_ends = io.IncrementalNewlineDecoder(None, translate=True)
        stream, size, done = self._stream(raw), max(1, self.path.stat().st_size), 0
        block = b"start"
        while block:
            block = stream.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise self._bad_bytes(error, done - (len(error.object) - len(block)) + error.start) from error
            done += len(block)
            self.share = raw.tell() / size
            yield line_ends.decode(text, final=not block)

    def _json_lines(self, blocks: Iterable[str]) -> Iterator[str]:
        for number, line in enumerate(_lines(blocks, self.label), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{self.label}, line {number:,}: no JSON ({error}). A line is one JSON object."
                ) from error
            text = row.get(self.read_options.text_field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                found = f"its fields are {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
                raise UserError(self._no_text(f", line {number:,}", found))
            yield without_surrogates(text) if "\\u" in line else text  # an escape can name half a surrogate pair

    def _parquet(self, stream: BinaryIO) -> Iterator[str]:
        pyarrow = pyarrow_for(self.label)
        from pyarrow import parquet

        field = self.read_options.text_field
        with contextlib.ExitStack() as stack:
            if self.path.suffix in COMPRESSED:  # parquet is read from its end
                plain = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, plain, BLOCK)
                stream = cast(BinaryIO, plain)
            # pre_buffer, the default, reads the column of the whole file at once
            file = stack.enter_context(parquet.ParquetFile(stream, pre_buffer=False, buffer_size=BLOCK))
            names = file.schema_arrow.names
            if field not in names:
                raise UserError(self._no_text("", f"its columns are {', '.join(names)}"))
            kind = file.schema_arrow.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(self._no_text("", f"the column {field} holds {kind}"))
            done = 0
            for batch in file.iter_batches(256, columns=[field], use_threads=False):
                done += batch.num_rows
                self.share = done / file.metadata.num_rows
                for text in batch.column(0).to_pylist():
                    yield text or ""

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        """Say which file is cut short or broken; the libraries do not."""
        try:
            yield
        except (EOFError, ValueError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's own, which name the file
                raise
            raise UserError(
                f"{self.label} is damaged, cut short or no {self.kind} file ({error}). Get it again."
            ) from error

    def _bad_bytes(self, error: UnicodeDecodeError, offset: int) -> UserError:
        shown = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end][:4])
        return UserError(
            f"{self.label}: {shown} at byte {offset:,} is no {self.read_options.encoding} ({error.reason}). "
            "Name the file's encoding, such as --encoding latin-1, cp1252, gb18030 or utf-16, "
            "or put U+FFFD in place of bad bytes with --replace-bad-bytes."
        )

    def _no_text(self, place: str, found: str) -> str:
        return f"{self.label}{place}: no text in {self.read_options.text_field!r}; {found}. Name it with --text-field."


def pyarrow_for(label: str) -> Any:
    """The module pyarrow; NanogptError saying how to get it, and what for, if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise NanogptError(f"{label} needs pyarrow: pip install 'nanogpt-cli[hf]'") from error
    return pyarrow


def pieces(blocks: Iterable[str], separator: str | None = None) -> Iterator[Piece]:
    """Part a stream of text into documents at `separator`, and long documents into pieces.

    The result does not depend on the size of the blocks. Line breaks around a separator are dropped.
    """
    held, fresh = "", True  # what has no end yet, and whether it starts a document
    for block in blocks:
        held += block
        if separator is not None:
            *complete, held = held.split(separator)
            for text in complete:
                yield from _cut(text.lstrip("\n") if fresh else text, strip=True)
                fresh = True
            held = held.lstrip("\n") if fresh else held
        while len(held) > PIECE + WINDOW + len(separator or ""):  # the end may be the start of a separator
            place = _place_to_cut(held)
            yield Piece(held[:place], False)
            held, fresh = held[place:], False
    if held or not fresh or separator is None:
        yield from _cut(held, strip=separator is not None)


def _cut(text: str, *, strip: bool) -> Iterator[Piece]:
    while len(text) > PIECE + WINDOW:
        place = _place_to_cut(text)
        yield Piece(text[:place], False)
        text = text[place:]
    yield Piece(text.rstrip("\n") if strip else text, True)


def _place_to_cut(text: str) -> int:
    safe = SAFE_CUT.search(text, PIECE, PIECE + WINDOW)
    return safe.start() if safe else PIECE + WINDOW


def _lines(blocks: Iterable[str], label: str) -> Iterator[str]:
    held = ""
    for block in blocks:
        *complete, held = (held + block).split("\n")
        yield from complete
        if len(held) > LINE_LIMIT:
            raise UserError(f"{label}: a line is longer than {LINE_LIMIT:,} characters, too long for one JSON object.")
    if held:
        yield held
