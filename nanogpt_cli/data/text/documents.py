"""Documents out of files: txt, jsonl, json, csv, tsv and parquet, each also compressed, in bounded memory.

A document comes as one or more pieces of about half a million characters at most, cut where a byte pair encoding parts
the text anyway, so that the ids of the pieces are the ids of the whole.
"""

import codecs
import contextlib
import csv
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

from nanogpt_cli.data.tokenizers import END_OF_TEXT, without_surrogates
from nanogpt_cli.data.tokens.formats import LFS_POINTER
from nanogpt_cli.errors import UserError, package

PIECE = 1 << 19  # characters
WINDOW = 1 << 16  # characters after PIECE in which a place to cut is looked for; without one the cut is hard
LINE_LIMIT = 1 << 26  # characters of a jsonl line or a json file, which have to be in memory as a whole
BLOCK = 1 << 20  # bytes

KINDS = {
    ".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
COMPRESSED = (".gz", ".zst")

UNPACK = "Unpack it, and give the files or the folder"
CONVERT = "Save it as plain text, and give that"
TOKEN_FILES = (
    "It holds numbers, not text: for token ids see nanogpt train --data-dir, which reads train.bin and val.bin"
)
# what is no text though a name may say so: place, first bytes, what it is, what to do
NO_TEXT = [
    (0, LFS_POINTER, "a Git LFS pointer, not the file itself", "Fetch it: git lfs pull"),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"PK\x03\x04", "a zip archive, or a document or array in one (docx, xlsx, odt, epub, npz)", UNPACK),
    (0, b"7z\xbc\xaf", "a 7z archive", UNPACK),
    (0, b"Rar!", "a rar archive", UNPACK),
    (0, b"BZh", "compressed by bzip2", "Unpack it: bunzip2"),
    (0, b"\xfd7zXZ", "compressed by xz", "Unpack it: unxz"),
    (0, b"\x1f\x8b", "compressed by gzip", "Let its name end in .gz"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", "Let its name end in .zst"),
    (0, b"%PDF", "a PDF", "Take the text out of it, for instance with pdftotext, and give that"),
    (0, b"{\\rtf", "a rich text document", CONVERT),
    (0, b"\xd0\xcf\x11\xe0", "an old Office document", CONVERT),
    (0, b"PAR1", "a parquet file", "Let its name end in .parquet, or add --format parquet"),
    (0, b"\x93NUMPY", "a numpy array", TOKEN_FILES),
    (0, b"MMIDIDX", "an index of Megatron's token files", TOKEN_FILES),
]
WEB_PAGE = re.compile(rb"\s*(<!doctype html|<html)", re.IGNORECASE)

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

    format: str | None = None  # a value of KINDS; None: by the name's ending, else txt
    encoding: str = "utf-8"
    replace_bad_bytes: bool = False
    separator: str | None = None  # between the documents of a txt file; None: the file is one document
    text_field: str = "text"
    raw_bytes: bool = False  # bytes that are no UTF-8 come through, as the surrogates of Python's surrogateescape

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding)
        except (LookupError, UnicodeError) as error:
            raise UserError(f"--encoding {self.encoding}: Python knows no such encoding of text.") from error

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        usual = ReadOptions.__dataclass_fields__
        changed = {name: value for name, value in vars(self).items() if value != usual[name].default}
        return {name: value for name, value in changed.items() if name != "raw_bytes"}  # the tokenizer says it


def file_kind(path: Path) -> str | None:
    """A value of KINDS by the ending, compressed or not; None for any other."""
    stem = path.stem if path.suffix in COMPRESSED else path.name
    return KINDS.get(Path(stem).suffix.lower())


class Documents:
    """The pieces of one file. `share` says how much of it has been read, 0 to 1.

    Line ends are LF whatever they were. Iterating raises UserError for a file that is not what it should be: bad bytes,
    bad JSON, no text field, damage, no text at all.
    """

    def __init__(self, path: Path, read_options: ReadOptions, label: str | None = None) -> None:
        self.path = path
        self.read_options = read_options
        self.label = label or str(path)
        self.kind = read_options.format or file_kind(path) or "txt"
        self.share = 0.0
        # met so far: CRLF and CR; NULs; ends of text that are spelled out, plain text here
        self.line_ends = self.nuls = self.written_ends = 0

    def __iter__(self) -> Iterator[Piece]:
        try:
            with self.path.open("rb") as raw:
                if self.kind != "parquet":
                    self._check_head()
                for piece in self._pieces(raw):
                    self.written_ends += piece.text.count(END_OF_TEXT.decode())
                    yield piece
        except (EOFError, ValueError, OSError, zlib.error) as error:  # the libraries do not say which file is broken
            if isinstance(error, OSError) and error.errno is not None:  # the system's own, which name the file
                raise
            raise UserError(
                f"{self.label} is damaged, cut short or no {self.kind} file ({error}). Get it again."
            ) from error
        self.share = 1.0

    def _pieces(self, raw: BinaryIO) -> Iterator[Piece]:
        if self.kind == "txt":
            yield from pieces(self._blocks(raw), self.read_options.separator)
            return
        read = {"jsonl": self._json_lines, "json": self._json, "csv": self._csv, "tsv": self._csv}
        texts = self._parquet(self._stream(raw)) if self.kind == "parquet" else read[self.kind](self._blocks(raw))
        for text in texts:
            if "\r" in text:  # as in a txt file
                self.line_ends += text.count("\r")
                text = text.replace("\r\n", "\n").replace("\r", "\n")
            yield from pieces([text])

    def _check_head(self) -> None:
        """Refuse what is no text, whatever its name says: UserError naming it."""
        with self.path.open("rb") as raw:
            head = self._stream(raw).read(1024)
        for place, magic, what, remedy in NO_TEXT:
            if head[place:].startswith(magic):
                raise UserError(f"{self.label} is no text: it is {what}. {remedy}.")
        if self.read_options.format is None and WEB_PAGE.match(head):
            raise UserError(
                f"{self.label} is a web page. Take the text out of it; to train on its code too add --format txt."
            )
        wide = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if self._is_utf8 and not wide and len(head) > 3 and head.count(0) * 4 > len(head):
            order = "le" if head[1::2].count(0) > head[::2].count(0) else "be"
            raise UserError(f"{self.label} looks like UTF-16 without a mark. Say so: --encoding utf-16-{order}.")

    @property
    def _is_utf8(self) -> bool:
        return codecs.lookup(self.read_options.encoding).name == "utf-8"

    def _stream(self, raw: BinaryIO) -> BinaryIO:
        """The file's content, decompressed."""
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        if self.path.suffix == ".zst":
            return cast(BinaryIO, package("pyarrow", self.label).CompressedInputStream(raw, "zstd"))
        return raw

    def _blocks(self, raw: BinaryIO) -> Iterator[str]:
        """Decoded text; a byte order mark is dropped, CRLF and CR become LF, as when Python opens a text file."""
        how = self.read_options
        errors = "replace" if how.replace_bad_bytes else "surrogateescape" if how.raw_bytes else "strict"
        decoder = codecs.getincrementaldecoder("utf-8-sig" if self._is_utf8 else how.encoding)(errors)
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
            self.line_ends += text.count("\r")
            self.nuls += text.count("\0")
            yield line_ends.decode(text, final=not block)

    def _json_lines(self, blocks: Iterable[str]) -> Iterator[str]:
        for number, line in enumerate(_lines(blocks, self.label), 1):
            if line.strip():
                yield self._json_text(self._parsed(line, f", line {number:,}"), f", line {number:,}", "\\u" in line)

    def _json(self, blocks: Iterable[str]) -> Iterator[str]:
        """A list of objects or texts, or lines with an object each."""
        parts, size = list[str](), 0
        for block in blocks:
            parts.append(block)
            _bound(size := size + len(block), f"{self.label}: it is")
        text = "".join(parts)
        if not text.lstrip().startswith("["):
            yield from self._json_lines([text])
            return
        for number, row in enumerate(self._parsed(text, ""), 1):
            yield self._json_text(row, f", entry {number:,}", escapes=True)

    def _parsed(self, text: str, place: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            what = "A line is one JSON object" if place else "It is a list of objects, or an object a line"
            raise UserError(f"{self.label}{place}: no JSON ({error}). {what}.") from error

    def _json_text(self, row: Any, place: str, escapes: bool) -> str:
        field = self.read_options.text_field
        if isinstance(row, str) and self.kind == "json":
            text = row
        elif not isinstance(row, dict):
            raise UserError(self._no_text(place, f"it is a {type(row).__name__}"))
        elif field not in row:
            raise UserError(self._no_text(place, _fields("fields", row)))
        else:
            text = "" if row[field] is None else row[field]  # null is an empty document, as in parquet
        if not isinstance(text, str):
            raise UserError(self._no_text(place, f"{field} holds a {type(text).__name__} there"))
        return without_surrogates(text) if escapes else text  # an escape can name half a surrogate pair

    def _csv(self, blocks: Iterable[str]) -> Iterator[str]:
        """The column of the text field, which the first line names."""
        csv.field_size_limit(LINE_LIMIT)
        lines = (line + "\n" for line in _lines(blocks, self.label))
        rows = csv.reader(lines, delimiter="\t" if self.kind == "tsv" else ",", strict=True)
        field, names = self.read_options.text_field, next(rows, [])
        if field not in names:
            raise UserError(self._no_text("", _fields("columns, by its first line,", names)))
        column = names.index(field)
        try:
            for row in rows:
                if row and len(row) <= column:
                    raise UserError(f"{self.label}, line {rows.line_num:,}: {len(row)} fields, {len(names)} expected.")
                if row:
                    yield row[column]
        except csv.Error as error:
            raise UserError(
                f"{self.label}, line {rows.line_num:,}: no {self.kind} ({error}). "
                "To read the file as it stands, as one text: --format txt."
            ) from error

    def _parquet(self, stream: BinaryIO) -> Iterator[str]:
        pyarrow = package("pyarrow", self.label)
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
                raise UserError(self._no_text("", _fields("columns", names)))
            kind = file.schema_arrow.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(self._no_text("", f"the column {field} holds {kind}"))
            done = 0
            for batch in file.iter_batches(256, columns=[field], use_threads=False):
                done += batch.num_rows
                self.share = done / file.metadata.num_rows
                for text in batch.column(0).to_pylist():
                    yield text or ""

    def _bad_bytes(self, error: UnicodeDecodeError, offset: int) -> UserError:
        shown = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end][:4])
        return UserError(
            f"{self.label}: {shown} at byte {offset:,} is no {self.read_options.encoding} ({error.reason}). "
            "Name the file's encoding, such as --encoding latin-1, cp1252, gb18030 or utf-16, "
            "or put U+FFFD in place of bad bytes with --replace-bad-bytes."
        )

    def _no_text(self, place: str, found: str) -> str:
        return f"{self.label}{place}: no text in {self.read_options.text_field!r}; {found}. Name it with --text-field."


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
            begun = held.lstrip("\n")  # unless the line breaks may be the start of a separator
            held = begun if fresh and (separator[0] != "\n" or len(begun) >= len(separator)) else held
        done = 0
        for place in _places_to_cut(held, len(separator or "")):  # the end may be the start of a separator
            yield Piece(held[done:place], False)
            done, fresh = place, False
        held = held[done:]
    if separator is not None and fresh:
        held = held.lstrip("\n")
    if held or not fresh or separator is None:
        yield from _cut(held, strip=separator is not None)


def _cut(text: str, *, strip: bool) -> Iterator[Piece]:
    done = 0
    for place in _places_to_cut(text):
        yield Piece(text[done:place], False)
        done = place
    rest = text[done:]
    yield Piece(rest.rstrip("\n") if strip else rest, True)


def _places_to_cut(text: str, kept: int = 0) -> Iterator[int]:
    """Where pieces of a long text end; what follows the last place is short, but for `kept` characters."""
    place = 0
    while len(text) - place > PIECE + WINDOW + kept:
        safe = SAFE_CUT.search(text, place + PIECE, place + PIECE + WINDOW)
        place = safe.start() if safe else place + PIECE + WINDOW
        yield place


def _lines(blocks: Iterable[str], label: str) -> Iterator[str]:
    held: list[str] = []
    for block in blocks:
        first, *rest = block.split("\n")
        held.append(first)
        if rest:
            yield "".join(held)
            yield from rest[:-1]
            held = rest[-1:]
        _bound(sum(map(len, held)), f"{label}: a line is")
    if any(held):
        yield "".join(held)


def _bound(characters: int, what: str) -> None:
    if characters > LINE_LIMIT:
        raise UserError(f"{what} longer than {LINE_LIMIT:,} characters, too long to be read as one: write more lines.")


def _fields(what: str, names: Iterable[str], most: int = 10) -> str:
    shown = [f"{name:.40}" for name in names]
    return f"its {what} are {', '.join(shown[:most])}" + (
        f" and {len(shown) - most:,} more" if len(shown) > most else ""
    )
