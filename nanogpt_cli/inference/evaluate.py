"""The loss over a whole split: every token but the first is predicted exactly once, whatever the batch size."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nanogpt_cli.data.tokens.files import Tokens, check_batch
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.device import Compute, inference
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.progress import QUIET, Progress

BATCH_TOKENS = 1 << 14  # keep a GPU busy, and take less than a gigabyte with GPT-2 XL


@dataclass(frozen=True)
class SplitLoss:
    """Cross-entropy over a split."""

    loss: float  # nats a token
    standard_error: float  # of the loss, from the spread of the windows' sums
    tokens: int  # predicted
    text_bytes: int | None  # UTF-8 bytes of the predicted tokens; None without a tokenizer
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is no number of the machine's."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def default_batch_size(model: GPT) -> int:
    """Windows a forward pass."""
    return max(1, BATCH_TOKENS // model.config.block_size)


def evaluate_split(
    model: GPT,
    tokens: Tokens,
    *,
    batch_size: int,
    compute: Compute,
    byte_lengths: npt.NDArray[np.int32] | None = None,
    progress: Progress = QUIET,
) -> SplitLoss:
    """Mean loss over all predictions of a split: windows of block_size that follow each other, the last one shorter.

    Bits per byte = nats / ln 2 / UTF-8 bytes of the predicted tokens.

    Args:
        tokens: the split.
        batch_size: windows a forward pass; changes the result by rounding at most.
        byte_lengths: UTF-8 bytes of each id, 0 for end-of-text; (size,).
        progress: hears of each batch.

    Raises:
        UserError: fewer than two tokens, or an id that the model has no row for.
    """
    total = tokens.count - 1
    if total < 1:
        raise UserError(f"{tokens.paths[0]} has {tokens.count} tokens; at least 2 are needed to predict one.")
    block_size = model.config.block_size
    windows, rest = divmod(total, block_size)
    # an id beyond the tokenizer has no bytes
    table = None if byte_lengths is None else np.append(byte_lengths, np.int32(0))
    sums: list[npt.NDArray[np.float64]] = []  # nats of each window
    text_nats, text_bytes = 0.0, 0
    batches = [(first, min(batch_size, windows - first), block_size) for first in range(0, windows, batch_size)]
    with inference(model):
        for first, count, length in batches + ([(windows, 1, rest)] if rest else []):
            offsets = np.arange(first, first + count, dtype=np.int64) * block_size
            losses, targets = _losses(model, tokens, offsets, length, compute)  # both (count, length)
            sums.append(losses.sum(axis=1))
            if table is not None:  # end-of-text has no bytes: left out of both sums
                known = table[np.minimum(targets, len(table) - 1)]
                text_nats += float(losses[known > 0].sum())
                text_bytes += int(known.sum())
            done = first * block_size + count * length
            progress.at("evaluating", done, total, f"{done:,} of {total:,} tokens")
    lengths = np.full(windows + bool(rest), block_size)
    lengths[-1] = rest or block_size
    nats = np.concatenate(sums)
    loss = float(nats.sum() / total)
    # windows are the independent draws, not tokens
    error = float(np.sqrt(np.square(nats - loss * lengths).sum()) / total)
    bits = text_nats / math.log(2) / text_bytes if text_bytes else None
    return SplitLoss(loss, error, total, None if byte_lengths is None else text_bytes, bits)


def _losses(
    model: GPT, tokens: Tokens, offsets: npt.NDArray[np.int64], length: int, compute: Compute
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Losses and targets, both (B, length), of the windows at `offsets` (B,)."""
    block = tokens.read(offsets, length + 1)
    check_batch(block, offsets, tokens, model.wte.weight.shape[0])
    idx = torch.from_numpy(block).to(compute.device)
    with compute.autocast():
        losses = model(idx[:, :-1], idx[:, 1:], reduction="none")
    return losses.float().cpu().numpy().astype(np.float64), block[:, 1:]
