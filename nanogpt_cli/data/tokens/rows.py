"""Which tokens a row of the run reads: a pure function of (seed, row number), the same for any number of ranks.

Row g is the g-th sequence of the whole run, counted from 0 over all updates and ranks. It is block_size + 1 tokens
long, so that inputs and targets both come from it. Nothing has to be stored but the count of rows consumed.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from nanogpt_cli.config.derived import Split
from nanogpt_cli.keyed import Permutation, Purpose, below, raw

Offsets = npt.NDArray[np.int64]

# substreams of Purpose.ROWS; frozen, they are part of the order
_RANDOM, _EPOCH_SHIFT = 0, 1
_BLOCK = 1024  # places of an epoch worked out at once: a call for a few costs as much as one for a thousand


class RowOrder:
    """Offsets of the rows of a split with `tokens` tokens (at least block_size + 1).

    "shuffled": an epoch cuts the stream into `windows` windows that do not overlap, shifted by a new offset each epoch,
    and visits each once. "random": offsets with replacement over all of 0 .. tokens - block_size - 1, nanoGPT's way.
    """

    def __init__(self, tokens: int, block_size: int, seed: int, sampling: Literal["shuffled", "random"]) -> None:
        if tokens < block_size + 1:
            raise ValueError(f"{tokens} tokens hold no row of {block_size} + 1")
        self.tokens, self.block_size, self.seed, self.sampling = tokens, block_size, seed, sampling
        # one window fewer than fit leaves the shift at least block_size places, so every window border moves
        self.windows = max(1, (tokens - 1) // block_size - 1)
        self._block = lru_cache(maxsize=4)(self._draw_block)

    def offsets(self, first_row: int, count: int) -> Offsets:
        """First token of rows first_row .. first_row + count - 1, int64 (count,)."""
        if self.sampling == "random":
            words = raw(self.seed, Purpose.ROWS, substream=_RANDOM, start=first_row, count=count)
            return below(words, self.tokens - self.block_size)
        row, end = first_row, first_row + count
        pieces = [np.empty(0, dtype=np.int64)]
        while row < end:
            epoch, place = divmod(row, self.windows)
            block, skip = divmod(place, _BLOCK)
            pieces.append(self._block(epoch, block)[skip : skip + end - row])
            row += len(pieces[-1])
        return np.concatenate(pieces)

    def epoch(self, row: int) -> float:
        """Passes over the data after `row` rows; for "random", rows x block_size / (tokens - 1)."""
        if self.sampling == "random":
            return row * self.block_size / (self.tokens - 1)
        return row / self.windows

    def _draw_block(self, epoch: int, block: int) -> Offsets:
        words = raw(self.seed, Purpose.ROWS, stream=epoch, substream=_EPOCH_SHIFT, count=1)
        shift = int(below(words, self.tokens - self.windows * self.block_size)[0])
        places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.windows), dtype=np.int64)
        return shift + Permutation(self.windows, self.seed, stream=epoch)(places) * self.block_size


def rank_rows(first_row: int, split: Split, rank: int, micro_step: int) -> range:
    """Row numbers of one micro-batch of the update that starts at `first_row`."""
    start = first_row + (micro_step * split.world_size + rank) * split.micro_batch
    return range(start, start + split.micro_batch)


def evaluation_offsets(tokens: int, block_size: int, count: int) -> Offsets:
    """Evenly spaced windows that do not overlap: `count` of them, at most all there are; int64, the same every time."""
    count = min(count, (tokens - 1) // block_size)
    last = tokens - 1 - block_size
    return np.arange(count, dtype=np.int64) * last // max(1, count - 1)
