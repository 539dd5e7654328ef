"""A corpus in chunks, and chunks to token ids: any number of workers gives the same ids in the same order.

Workers are threads: tokenizers let go of Python's lock while they encode, and nothing has to be copied or started.
"""

import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from nanogpt_cli.data.fast import FastEngine, fast_engine
from nanogpt_cli.data.text.documents import Documents, Piece, ReadOptions
from nanogpt_cli.data.text.inputs import Inputs
from nanogpt_cli.data.text.splits import SplitRule
from nanogpt_cli.data.tokenizers import Tokenizer, code_points, utf8
from nanogpt_cli.errors import NanogptError

CHUNK = 1 << 19  # characters of a chunk, at least
# of train and val: ids, then 8 bytes of a hash of each document that starts in the chunk
Encoded = tuple[bytes, bytes, bytes, bytes]


class Cursor(NamedTuple):
    """How far the input has been read."""

    file: int = 0  # whole files
    piece: int = 0  # of the next file
    row: int = 0  # documents, empty ones too
    empty: int = 0
    characters: int = 0
    text_bytes: int = 0  # in UTF-8
    line_ends: int = 0  # CRLF and CR, which became LF; these three are of whole files
    nuls: int = 0
    written_ends: int = 0  # of text, spelled out

    @property
    def documents(self) -> int:
        """Those that are not empty."""
        return self.row - self.empty


class Chunk(NamedTuple):
    """Work for one worker: pieces in order, whether each belongs to val, and where the input stands after them."""

    pieces: list[Piece]
    val: list[bool]
    starts: bool  # whether the first piece starts a document
    after: Cursor
    share: float  # of the input's bytes read so far


@dataclass(frozen=True)
class Corpus:
    """Files, how they become documents, and which of these are for validation."""

    inputs: Inputs
    read_options: ReadOptions
    split: SplitRule

    def chunks(self, cursor: Cursor, cut: int | None = None) -> Iterator[Chunk]:
        """Everything from `cursor` on, a portion at a time. Empty documents are left out and counted.

        With `cut` val begins at that byte of the text, or at the character that it lies in, whatever the split says.
        """
        labels, sizes = self.inputs.labels, self.inputs.sizes
        before, total = sum(sizes[: cursor.file]), max(1, sum(sizes))
        held, flags, size, fresh = list[Piece](), list[bool](), 0, cursor.piece == 0
        _, skip, row, empty, characters, text_bytes, *oddities = cursor
        for index in range(cursor.file, len(labels)):
            starts, val = True, False  # of the document that the next piece belongs to
            with self.inputs.open(index) as path:
                documents = Documents(path, self.read_options, labels[index])
                for number, piece in enumerate(documents):
                    val = self.split.is_val(index, row, piece.text) if starts else val
                    is_empty, first, starts = starts and piece.ends and not piece.text, starts, piece.ends
                    if number < skip:
                        continue
                    fresh = first if not held else fresh
                    row, empty = row + piece.ends, empty + is_empty
                    for part in [] if is_empty else _split_at(piece, cut, text_bytes):
                        held.append(part)
                        size, characters = size + len(part.text), characters + len(part.text)
                        text_bytes += len(part.text) if part.text.isascii() else len(utf8(part.text))
                        flags.append(val if cut is None else text_bytes > cut)
                    if size >= CHUNK:
                        share = (before + documents.share * sizes[index]) / total
                        after = Cursor(index, number + 1, row, empty, characters, text_bytes, *oddities)
                        yield Chunk(held, flags, fresh, after, share)
                        held, flags, size = [], [], 0
            met = documents.line_ends, documents.nuls, documents.written_ends
            oddities = [sum(both) for both in zip(oddities, met, strict=True)]
            before, skip = before + sizes[index], 0
        after = Cursor(len(labels), 0, row, empty, characters, text_bytes, *oddities)
        if held or after != cursor:
            yield Chunk(held, flags, fresh, after, 1.0)

    def scan(self, alphabet_bytes: int | None) -> tuple[Cursor, dict[str, int]]:
        """The end, and how often each character stands in a text of up to `alphabet_bytes`; None: in any."""
        after, counts = Cursor(), np.zeros(0x110000, np.int64)  # by code point
        for chunk in self.chunks(Cursor()):
            after = chunk.after
            if alphabet_bytes is None or after.text_bytes <= alphabet_bytes:
                text = "".join(piece.text for piece in chunk.pieces)
                counts += np.bincount(code_points(text), minlength=len(counts))
        return after, {chr(point): int(counts[point]) for point in np.flatnonzero(counts)}

    def sample(self, cut: int | None, most: int, text_bytes: int) -> Iterator[str]:
        """Text of train alone, about `most` bytes of `text_bytes`: evenly spaced documents, or pieces of long ones."""
        seen, taken = 0, 0
        for chunk in self.chunks(Cursor(), cut):
            for (text, _), in_val in zip(chunk.pieces, chunk.val, strict=True):
                if not in_val and taken * text_bytes <= seen * most:
                    taken += len(utf8(text))
                    yield text
                seen += len(utf8(text))


def _split_at(piece: Piece, cut: int | None, before: int) -> list[Piece]:
    """The piece, in two if val begins inside it; `before` bytes come before it."""
    if cut is None or not before < cut < before + 4 * len(piece.text):  # a character has at most four bytes
        return [piece]
    place = len(utf8(piece.text)[: cut - before].decode("utf-8", "ignore"))
    if 0 < place < len(piece.text):
        return [Piece(piece.text[:place], False), Piece(piece.text[place:], piece.ends)]
    return [piece]


def _encoded(chunk: Chunk, tokenizer: Tokenizer, ending: str, fast: FastEngine | None) -> Encoded:
    ids: tuple[list[bytes], list[bytes]] = [], []
    hashes, starts, little = (bytearray(), bytearray()), chunk.starts, tokenizer.dtype.newbyteorder("<")
    encode = fast.encode if fast else tokenizer.encode
    if fast and chunk.pieces:
        fast.check(chunk.pieces[0].text)
    eot = np.array([tokenizer.eot], little).tobytes() if ending == "eot" else b""
    for (text, ends), in_val in zip(chunk.pieces, chunk.val, strict=True):
        if starts:
            hashes[in_val].extend(hashlib.blake2b(utf8(text), digest_size=8).digest())
        starts = ends
        if ends and ending == "newline" and not text.endswith("\n"):
            text += "\n"
        ids[in_val].extend([encode(text).astype(little, copy=False).tobytes(), eot if ends else b""])
    return b"".join(ids[0]), b"".join(ids[1]), bytes(hashes[0]), bytes(hashes[1])


def usual_workers() -> int:
    """One for each core this process may run on, as far as one reader can keep them busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, ending: str, workers: int
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Each chunk with its ids, in order; chunks are read in the caller's own thread."""
    reading, fast = iter(chunks), None
    failure: NanogptError | None = None
    pool, flight = ThreadPoolExecutor(workers), deque[tuple[Chunk, Future[Encoded]]]()
    try:
        for number in count():
            try:
                chunk = next(reading, None)
            except NanogptError as error:  # a network that dies: what was read before is written first
                chunk, failure = None, error
            if chunk is not None:
                if number == 0:
                    fast = fast_engine(tokenizer, "\n".join(piece.text for piece in chunk.pieces))
                flight.append((chunk, pool.submit(_encoded, chunk, tokenizer, ending, fast)))
            while flight and (chunk is None or len(flight) > 2 * workers):  # what bounds the memory
                first, future = flight.popleft()
                yield first, future.result()
            if chunk is None:
                break
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)
