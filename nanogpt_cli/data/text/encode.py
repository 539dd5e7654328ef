"""Pieces of documents to token ids in worker processes: any number of them gives the same ids in the same order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

import numpy as np

from nanogpt_cli.data.text.documents import Piece
from nanogpt_cli.data.tokenizers import Ids, Tokenizer, tokenizer_from_toml
from nanogpt_cli.errors import NanogptError


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


class Unit(NamedTuple):
    """Work for one worker: pieces in order, whether each belongs to val, and where the input stands after them."""

    pieces: list[Piece]
    val: list[bool]
    after: Cursor
    share: float  # of the input's bytes read so far


class Encoded(NamedTuple):
    """The ids of a unit as bytes of token files, and the bytes of its text in UTF-8."""

    train: bytes
    val: bytes
    text_bytes: int


class Encoder:
    """How pieces become ids: the tokenizer, and what is put after a document."""

    def __init__(self, tokenizer: Tokenizer, ending: str) -> None:
        self.tokenizer = tokenizer
        self.newline = ending == "newline"
        self.eot: Ids = np.array([tokenizer.eot] if ending == "eot" else [], tokenizer.dtype)

    def __call__(self, unit: Unit) -> Encoded:
        """The ids of a unit."""
        train, val, text_bytes = list[Ids](), list[Ids](), 0
        for (text, ends), in_val in zip(unit.pieces, unit.val, strict=True):
            part = val if in_val else train
            text_bytes += len(text) if text.isascii() else len(text.encode())
            if ends and self.newline and not text.endswith("\n"):
                text += "\n"
            part.append(self.tokenizer.encode(text))
            if ends:
                part.append(self.eot)
        return Encoded(self._bytes(train), self._bytes(val), text_bytes)

    def _bytes(self, parts: list[Ids]) -> bytes:
        little = self.tokenizer.dtype.newbyteorder("<")
        return b"".join(part.astype(little, copy=False).tobytes() for part in parts)


def usual_workers() -> int:
    """One for each core this process may run on, as far as one reader can keep them busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def encoded(
    units: Iterable[Unit], tokenizer: Tokenizer, ending: str, workers: int
) -> Generator[tuple[Unit, Encoded], None, None]:
    """Each unit with its ids, in order; `workers` of 1 stays in this process.

    Raises:
        NanogptError: a worker was killed.
    """
    if workers == 1:
        encode = Encoder(tokenizer, ending)
        yield from ((unit, encode(unit)) for unit in units)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer.to_toml(), ending))
    flight: deque[tuple[Unit, Future[Encoded]]] = deque()
    try:
        for unit in units:
            flight.append((unit, pool.submit(_work, unit)))
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


def _work(unit: Unit) -> Encoded:
    return _encoder(unit)
