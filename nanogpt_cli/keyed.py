"""Random numbers as pure functions of a key: no generator state exists, so none can be lost, shared or replayed.

Everything random in a run (rows, dropout, initial weights, samples) is drawn from Philox, a counter-based generator
(Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Only raw output is used: numpy promises its
stability for bit generators, not for the methods built on them.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a number is drawn for; part of the key, so that two purposes never share numbers. Values are frozen."""

    ROWS = 0
    ORDER = 1
    DROPOUT = 2
    INIT = 3
    SAMPLE = 4


def raw(seed: int, purpose: Purpose, *, stream: int = 0, substream: int = 0, start: int = 0, count: int) -> U64:
    """Words start .. start+count of the sequence that belongs to (seed, purpose, stream, substream), uint64."""
    block, skip = divmod(start, 4)  # one Philox-4x64 block is four words
    bits = np.random.Philox(key=[seed, int(purpose)], counter=[block, 0, substream, stream])
    words: U64 = bits.random_raw(skip + count)
    return words[skip:]


def seed32(seed: int, purpose: Purpose, *, stream: int = 0, substream: int = 0) -> int:
    """32 bits for a generator that cannot be keyed itself, such as torch's."""
    return int(raw(seed, purpose, stream=stream, substream=substream, count=1)[0] >> np.uint64(32))


def below(words: U64, bound: int) -> npt.NDArray[np.int64]:
    """Map uint64 words to 0 .. bound-1 by multiply-shift on their upper 32 bits, extended by the lower ones.

    Exact for bound up to 2**63; the bias against a uniform draw is below bound / 2**64.
    """
    b_hi, b_lo = divmod(bound, 1 << 32)
    w_hi, w_lo = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    # (w_hi*2^32 + w_lo) * (b_hi*2^32 + b_lo) >> 64, in 64-bit pieces with the carries kept
    low = w_lo * np.uint64(b_lo)
    mid1 = w_hi * np.uint64(b_lo) + (low >> np.uint64(32))
    mid2 = w_lo * np.uint64(b_hi) + (mid1 & np.uint64(0xFFFFFFFF))
    high = w_hi * np.uint64(b_hi) + (mid1 >> np.uint64(32)) + (mid2 >> np.uint64(32))
    result: npt.NDArray[np.int64] = high.astype(np.int64)
    return result


class Permutation:
    """A keyed permutation of 0 .. size-1 that needs no array: a Feistel network with cycle walking.

    `permutation(places)` maps an int64 array of places to an int64 array of the same shape.
    """

    ROUNDS = 8

    def __init__(self, size: int, seed: int, *, stream: int = 0) -> None:
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self.keys = raw(seed, Purpose.ORDER, stream=stream, count=self.ROUNDS)

    def __call__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        values = self._encrypt(places.astype(np.uint64))
        outside = values >= self.size
        while outside.any():  # the network permutes a power of four below 4*size: walk until inside
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _encrypt(self, values: U64) -> U64:
        half, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> half, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half) | right


def _mix(words: U64) -> U64:
    """Finaliser of SplitMix64 (Steele et al., 2014): every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
