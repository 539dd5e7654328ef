"""The loss over a whole split: every token but the first is predicted exactly once, whatever the batch size."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nanogpt_cli.data.tokens import Tokens, check_batch
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.device import Compute, inference

LOGITS = 1 << 27  # elements of one batch's logits that are sure to fit: 512 MB in float32
LARGEST_BATCH = 64

Progress = Callable[[int, int], None]  # tokens done, tokens in all


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


@dataclass
class _Sums:
    """Float64 sums over windows; each is a mean away from a result."""

    nats: float = 0.0
    nats_squared: float = 0.0
    nats_by_tokens: float = 0.0
    tokens: int = 0
    tokens_squared: int = 0
    text_nats: float = 0.0
    text_bytes: int = 0

    def add(self, losses: npt.NDArray[np.float64], bytes_of_targets: npt.NDArray[np.int32] | None) -> None:
        """Losses (B, T) of windows of T predictions each."""
        sums, length = losses.sum(axis=1), losses.shape[1]
        self.nats += float(sums.sum())
        self.nats_squared += float((sums * sums).sum())
        self.nats_by_tokens += float(sums.sum()) * length
        self.tokens += losses.size
        self.tokens_squared += len(sums) * length * length
        if bytes_of_targets is not None:  # end-of-text has no bytes: left out of both sums
            self.text_nats += float(losses[bytes_of_targets > 0].sum())
            self.text_bytes += int(bytes_of_targets.sum())

    def result(self, with_text: bool) -> SplitLoss:
        """Bits per byte = nats / ln 2 / UTF-8 bytes of the predicted tokens."""
        loss = self.nats / self.tokens
        # windows are the independent draws, not tokens: spread of (sum - loss * length) over all windows
        spread = self.nats_squared - 2 * loss * self.nats_by_tokens + loss * loss * self.tokens_squared
        bits = self.text_nats / math.log(2) / self.text_bytes if with_text and self.text_bytes else None
        return SplitLoss(
            loss, math.sqrt(max(0.0, spread)) / self.tokens, self.tokens, self.text_bytes if with_text else None, bits
        )


def default_batch_size(model: GPT) -> int:
    """Windows a batch whose logits fit into half a gigabyte."""
    return max(1, min(LARGEST_BATCH, LOGITS // (model.config.block_size * model.wte.weight.shape[0])))


def evaluate_split(
    model: GPT,
    tokens: Tokens,
    *,
    batch_size: int,
    compute: Compute,
    byte_lengths: npt.NDArray[np.int32] | None = None,
    progress: Progress = lambda done, total: None,
) -> SplitLoss:
    """Mean loss over all predictions of a split: windows of block_size that follow each other, the last one shorter.

    Args:
        tokens: the split.
        batch_size: windows a forward pass; changes the result by rounding at most.
        byte_lengths: UTF-8 bytes of each id, 0 for end-of-text; (size,).
        progress: called after each batch.

    Raises:
        UserError: fewer than two tokens, or an id that the model has no row for.
    """
    total = tokens.count - 1
    if total < 1:
        raise UserError(f"{tokens.paths[0]} has {tokens.count} tokens; at least 2 are needed to predict one.")
    block_size, sums = model.config.block_size, _Sums()
    windows, rest = divmod(total, block_size)
    with inference(model):
        for first in range(0, windows, batch_size):
            offsets = np.arange(first, min(first + batch_size, windows), dtype=np.int64) * block_size
            sums.add(*_losses(model, tokens, offsets, block_size, compute, byte_lengths))
            progress(sums.tokens, total)
        if rest:
            offsets = np.array([windows * block_size], dtype=np.int64)
            sums.add(*_losses(model, tokens, offsets, rest, compute, byte_lengths))
            progress(sums.tokens, total)
    return sums.result(byte_lengths is not None)


def _losses(
    model: GPT,
    tokens: Tokens,
    offsets: npt.NDArray[np.int64],
    length: int,
    compute: Compute,
    byte_lengths: npt.NDArray[np.int32] | None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32] | None]:
    """Losses (B, length) of the windows at `offsets` (B,), and the bytes of their targets."""
    block = tokens.read(offsets, length + 1)
    check_batch(block, offsets, tokens, model.wte.weight.shape[0])
    idx = torch.from_numpy(block).to(compute.device)
    with compute.autocast():
        losses = model(idx[:, :-1], idx[:, 1:], reduction="none")
    targets = block[:, 1:]
    known = None if byte_lengths is None else _bytes_of(targets, byte_lengths)
    return losses.float().cpu().numpy().astype(np.float64), known


def _bytes_of(targets: npt.NDArray[np.int64], byte_lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """UTF-8 bytes of each target; an id beyond the tokenizer has none."""
    table = np.append(byte_lengths, np.int32(0))
    found: npt.NDArray[np.int32] = table[np.minimum(targets, len(byte_lengths))]
    return found
