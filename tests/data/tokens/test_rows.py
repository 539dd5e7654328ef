"""The order of rows: every window once an epoch, the same rows for any number of ranks, nothing out of bounds."""

import hashlib
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.config.derived import Split
from nanogpt_cli.data.tokens.rows import RowOrder, evaluation_offsets, rank_rows

SIZES = st.integers(1, 40).flatmap(lambda T: st.tuples(st.integers(T + 1, 30 * T + 50), st.just(T)))  # (tokens, T)
SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(0, 5), st.sampled_from(["shuffled", "random"]))
def test_no_row_reaches_past_the_data(
    size: tuple[int, int], seed: int, start: int, sampling: Literal["shuffled", "random"]
) -> None:
    tokens, block_size = size
    offsets = RowOrder(tokens, block_size, seed, sampling).offsets(start, 200)
    assert offsets.shape == (200,)
    assert offsets.dtype == np.int64
    assert offsets.min() >= 0
    assert offsets.max() + block_size + 1 <= tokens


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(0, 2**40))
def test_an_epoch_covers_each_window_once(size: tuple[int, int], seed: int, epoch: int) -> None:
    tokens, block_size = size
    order = RowOrder(tokens, block_size, seed, "shuffled")
    assert order.windows == max(1, (tokens - 1) // block_size - 1)
    offsets = np.sort(order.offsets(epoch * order.windows, order.windows))
    assert 0 <= offsets[0] <= tokens - 1 - order.windows * block_size
    assert (np.diff(offsets) == block_size).all()
    assert order.epoch((epoch + 1) * order.windows) == epoch + 1


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(0, 300), st.integers(0, 100), st.sampled_from(["shuffled", "random"]))
def test_a_row_does_not_depend_on_how_it_is_asked_for(
    size: tuple[int, int], seed: int, first: int, count: int, sampling: Literal["shuffled", "random"]
) -> None:
    order = RowOrder(*size, seed, sampling)
    together = order.offsets(first, count)
    one_by_one = [int(RowOrder(*size, seed, sampling).offsets(row, 1)[0]) for row in range(first, first + count)]
    assert together.tolist() == one_by_one


def test_rows_cross_the_blocks_in_which_an_epoch_is_worked_out() -> None:
    order = RowOrder(40_000, 8, 3, "shuffled")  # 4,998 windows
    whole = order.offsets(0, 2 * order.windows)
    for first, count in ((1000, 100), (4990, 20), (2047, 2), (0, 1025)):
        assert (order.offsets(first, count) == whole[first : first + count]).all()


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(0, 10), SIZES, SEEDS)
def test_ranks_are_disjoint_and_together_read_the_same_rows_as_one(
    micro_batch: int, micro_steps: int, ranks: int, step: int, size: tuple[int, int], seed: int
) -> None:
    rows = micro_batch * micro_steps * ranks
    split = Split(micro_batch, micro_steps, ranks)
    parts = [rank_rows(step * rows, split, rank, m) for m in range(micro_steps) for rank in range(ranks)]
    assert all(len(part) == micro_batch for part in parts)
    assert [row for part in parts for row in part] == list(range(step * rows, (step + 1) * rows))
    order = RowOrder(*size, seed, "shuffled")
    alone = order.offsets(step * rows, rows)
    assert np.concatenate([order.offsets(part.start, len(part)) for part in parts]).tolist() == alone.tolist()


@pytest.mark.parametrize("sampling", ["shuffled", "random"])
@pytest.mark.parametrize("tokens", [9, 10, 16, 17, 18, 25, 33, 34, 40])
def test_first_and_last_legal_window_are_reached(tokens: int, sampling: Literal["shuffled", "random"]) -> None:
    offsets = RowOrder(tokens, 8, 1, sampling).offsets(0, 3000)
    assert offsets.min() == 0
    assert offsets.max() == tokens - 1 - 8


def test_every_token_is_predicted_in_the_long_run() -> None:
    order = RowOrder(1000, 10, 7, "shuffled")
    offsets = order.offsets(0, 300 * order.windows)
    predicted = np.unique(offsets[:, None] + np.arange(1, 11))
    assert predicted.tolist() == list(range(1, 1000))


def test_two_epochs_differ_in_order_and_in_shift() -> None:
    order = RowOrder(10_000, 10, 7, "shuffled")
    first, second = order.offsets(0, order.windows), order.offsets(order.windows, order.windows)
    assert set(first.tolist()) != set(second.tolist())
    assert (np.argsort(first) != np.argsort(second)).any()


def test_seeds_differ() -> None:
    draws = {tuple(RowOrder(10_000, 10, seed, s).offsets(0, 20)) for seed in range(20) for s in ("shuffled", "random")}
    assert len(draws) == 40


@pytest.mark.parametrize(
    ("sampling", "tokens", "block_size", "seed", "first", "expected"),
    [
        ("shuffled", 1_003_854, 128, 1337, 0, "7c5b7bc0dcb47137aa8aaccf671c55a0"),
        ("shuffled", 1_003_854, 128, 1337, 7_000, "71490426ad509d0819e581e0f216c1bb"),
        ("shuffled", 9_035_582_198, 1024, 1337, 123_456_789, "254254a7686c4081b17c990f95747651"),
        ("shuffled", 100, 16, 5, 0, "ca1839de21b71f940e3a1cbea39f0595"),
        ("random", 1_003_854, 64, 1337, 0, "d56c5b0a0d24be3a579051a7c2f732f1"),
        ("random", 9_035_582_198, 1024, 2**63 - 1, 123_456_789, "0a92634506ae1e23c7a7ed6e8379976f"),
    ],
)
def test_the_order_is_frozen(
    sampling: Literal["shuffled", "random"], tokens: int, block_size: int, seed: int, first: int, expected: str
) -> None:
    # a change here breaks the resume of every run there is: it needs a new name for `sampling`, not a new hash
    offsets = RowOrder(tokens, block_size, seed, sampling).offsets(first, 3000)
    assert hashlib.sha256(offsets.astype("<i8").tobytes()).hexdigest()[:32] == expected


def test_too_few_tokens_are_refused() -> None:
    RowOrder(17, 16, 0, "shuffled")
    with pytest.raises(ValueError, match="16 tokens"):
        RowOrder(16, 16, 0, "shuffled")


@settings(deadline=None)
@given(SIZES, st.integers(1, 60))
def test_evaluation_windows_are_spread_and_do_not_overlap(size: tuple[int, int], count: int) -> None:
    tokens, block_size = size
    offsets = evaluation_offsets(tokens, block_size, count)
    assert len(offsets) == min(count, (tokens - 1) // block_size)
    assert offsets[0] == 0
    assert (np.diff(offsets) >= block_size).all()
    assert offsets[-1] + block_size + 1 <= tokens
    if len(offsets) > 1:
        assert offsets[-1] + block_size + 1 == tokens
        assert np.ptp(np.diff(offsets)) <= 1
