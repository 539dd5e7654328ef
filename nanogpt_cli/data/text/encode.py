"""A corpus in chunks, and chunks to token ids: any number of worker processes gives the same ids in the same order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanogpt_cli.data.text.documents import Documents, Piece, ReadOptions
from nanogpt_cli.data.text.inputs import Inputs
from nanogpt_cli.data.text.splits import SplitRule
from nanogpt_cli.data.tokenizers import TokenIds, Tokenizer, code_points, tokenizer_from_toml
from nanogpt_cli.errors import NanogptError

CHUNK = 1 << 19  # characters of a chunk, at least
CODE_POINTS = 0x110000


class Cursor(NamedTuple):
    """How far the input has been read."""

    file: int = 0  # whole files
    piece: int = 0  # of the next file
    row: int = 0  # documents, empty ones too
    empty: int = 0
    characters: int = 0

    @property
    def documents(self) -> int:
        """Those that are not empty."""
        return self.row - self.empty


class Chunk(NamedTuple):
    """Work for one worker: pieces in order, whether each belongs to val, and where the input stands after them."""

    pieces: list[Piece]
    val: list[bool]
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

        With `cut` val begins at that character, whatever the split says.
        """
        labels, sizes = self.inputs.labels, self.inputs.sizes
        before, total = sum(sizes[: cursor.file]), max(1, sum(sizes))
        held, flags, size = list[Piece](), list[bool](), 0
        _, skip, row, empty, characters = cursor
        for index in range(cursor.file, len(labels)):
            starts, val = True, False  # of the document that the next piece belongs to
            with self.inputs.open(index) as path:
                documents = Documents(path, self.read_options, labels[index])
                for number, piece in enumerate(documents):
                    val = self.split.is_val(index, row, piece.text) if starts else val
                    is_empty, starts = starts and piece.ends and not piece.text, piece.ends
                    if number < skip:
                        continue
                    row, empty = row + piece.ends, empty + is_empty
                    for part in [] if is_empty else _split_at(piece, cut, characters):
                        held.append(part)
                        flags.append(val if cut is None else characters >= cut)
                        size, characters = size + len(part.text), characters + len(part.text)
                    if size >= CHUNK:
                        share = (before + documents.share * sizes[index]) / total
                        yield Chunk(held, flags, Cursor(index, number + 1, row, empty, characters), share)
                        held, flags, size = [], [], 0
            before, skip = before + sizes[index], 0
        if held:
            yield Chunk(held, flags, Cursor(len(labels), 0, row, empty, characters), 1.0)

    def scan(self, most_bytes: int | None) -> "Scan | None":
        """Count characters and documents; None if the text is longer than `most_bytes` in UTF-8."""
        scan, text_bytes = Scan(), 0
        for chunk in self.chunks(Cursor()):
            text = "".join(piece.text for piece in chunk.pieces)
            scan.counts += np.bincount(code_points(text), minlength=CODE_POINTS)
            scan.characters, scan.documents = chunk.after.characters, chunk.after.documents
            text_bytes += len(text.encode())
            if most_bytes is not None and text_bytes > most_bytes:
                return None
        return scan


@dataclass
class Scan:
    """What a text consists of."""

    characters: int = 0
    documents: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CODE_POINTS, np.int64))  # by code point

    @property
    def alphabet(self) -> list[str]:
        """The different characters, in code point order."""
        return [chr(point) for point in np.flatnonzero(self.counts)]

    @property
    def most_frequent(self) -> str:
        """The most frequent character; the first of several."""
        return chr(int(self.counts.argmax()))


def _split_at(piece: Piece, cut: int | None, characters: int) -> list[Piece]:
    """The piece, in two if val begins inside it; `characters` come before it."""
    place = -1 if cut is None else cut - characters
    if 0 < place < len(piece.text):
        return [Piece(piece.text[:place], False), Piece(piece.text[place:], piece.ends)]
    return [piece]


class EncodedChunk(NamedTuple):
    """The ids of a chunk as bytes of token files, and the bytes of its text in UTF-8."""

    train: bytes
    val: bytes
    text_bytes: int


class Encoder:
    """How pieces become ids: the tokenizer, and what is put after a document."""

    def __init__(self, tokenizer: Tokenizer, ending: str) -> None:
        self.tokenizer = tokenizer
        self.newline = ending == "newline"
        self.eot: TokenIds = np.array([tokenizer.eot] if ending == "eot" else [], tokenizer.dtype)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """The ids of a chunk."""
        train, val, text_bytes = list[TokenIds](), list[TokenIds](), 0
        for (text, ends), in_val in zip(chunk.pieces, chunk.val, strict=True):
            part = val if in_val else train
            text_bytes += len(text) if text.isascii() else len(text.encode())
            if ends and self.newline and not text.endswith("\n"):
                text += "\n"
            part.append(self.tokenizer.encode(text))
            if ends:
                part.append(self.eot)
        return EncodedChunk(self._bytes(train), self._bytes(val), text_bytes)

    def _bytes(self, parts: list[TokenIds]) -> bytes:
        little = self.tokenizer.dtype.newbyteorder("<")
        return b"".join(part.astype(little, copy=False).tobytes() for part in parts)


def usual_workers() -> int:
    """One for each core this process may run on, as far as one reader can keep them busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, ending: str, workers: int
) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Each chunk with its ids, in order; `workers` of 1 stays in this process.

    Raises:
        NanogptError: a worker was killed.
    """
    if workers == 1:
        encode = Encoder(tokenizer, ending)
        yield from ((chunk, encode(chunk)) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer.to_toml(), ending))
    flight: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
    try:
        for chunk in chunks:
            flight.append((chunk, pool.submit(_work, chunk)))
            if len(flight) > 2 * workers:  # what bounds the memory
                first, future = flight.popleft()
                yield first, future.result()
        for first, future in flight:
            yield first, future.result()
    except BrokenProcessPool as error:
        raise NanogptError(
            "A worker process was killed, perhaps for want of memory. Run it again to go on from here; "
            "--workers 1 needs the least."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder


def _start_worker(tokenizer: dict[str, Any], ending: str) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(tokenizer_from_toml(tokenizer), ending)


def _end_with_parent() -> None:
    """A main process that is killed closes no pool, and its workers would wait for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(chunk: Chunk) -> EncodedChunk:
    return _encoder(chunk)
