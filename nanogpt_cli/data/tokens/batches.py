"""Batches for training: read ahead by one thread, checked, and on the device when they are asked for."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from nanogpt_cli.config.derived import Split
from nanogpt_cli.data.tokens.files import Tokens, check_batch
from nanogpt_cli.data.tokens.rows import RowOrder, rank_rows

DEPTH = 2  # batches read ahead of the one in use

# inputs and targets, and on CUDA the event after which they are there
Ready = tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """One rank's micro-batches from `first_row` on, for ever: (inputs, targets), int64 (micro_batch, block_size).

    Errors of the reading thread (UserError for an id outside the vocabulary, with file and place) are raised by `next`
    in their turn. The thread ends with `close`, with the object, and with the interpreter.
    """

    def __init__(
        self,
        tokens: Tokens,
        order: RowOrder,
        split: Split,
        rank: int,
        *,
        first_row: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self.tokens, self.order, self.split, self.rank = tokens, order, split, rank
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.waited_s = 0.0  # what the caller has spent waiting for batches
        self._first_row, self._micro_step = first_row, 0
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # an executor's thread is joined at exit and every task of it is finite: nothing here can hang
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: deque[Future[Ready]] = deque()
        for _ in range(DEPTH):
            self._submit()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._submit()
        began = time.perf_counter()
        x, y, copied = self._ahead.popleft().result()
        self.waited_s += time.perf_counter() - began
        if copied is None:
            return x.to(self.device), y.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for tensor in (x, y):  # made on the side stream: its memory may not be reused before the step is done with it
            tensor.record_stream(current)
        return x, y

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading thread; what it read ahead is dropped. Safe to call twice."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _submit(self) -> None:
        rows = rank_rows(self._first_row, self.split, self.rank, self._micro_step)
        self._ahead.append(self._reader.submit(self._make, rows))
        self._micro_step += 1
        if self._micro_step == self.split.micro_steps:
            self._first_row, self._micro_step = self._first_row + self.split.rows, 0

    def _make(self, rows: range) -> Ready:
        offsets = self.order.offsets(rows.start, len(rows))
        batch = self.tokens.read(offsets, self.order.block_size + 1)  # (B, T+1)
        check_batch(batch, offsets, self.tokens, self.vocab_size)
        both = torch.from_numpy(batch)
        if self._copies is None:
            return both[:, :-1].contiguous(), both[:, 1:].contiguous(), None
        with torch.cuda.stream(self._copies):
            both = both.pin_memory().to(self.device, non_blocking=True)
            x, y = both[:, :-1].contiguous(), both[:, 1:].contiguous()
            return x, y, self._copies.record_event()
