"""Losses over windows of tokens: the evenly spaced ones of validation while training, and a whole split."""

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.data.tokens.files import Tokens, check_batch
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.machine.device import Compute, inference
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.weights.load import LoadedModel

BATCH_TOKENS = 1 << 14  # keep a GPU busy, and take less than a gigabyte with GPT-2 XL
UNASKED_SECONDS = 60.0  # after a run; an evaluation that is expected to take longer is left to the user
PUBLISHED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))

Losses = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class TextTokens(Tokens):
    """Ids in memory (count,), read as a split is."""

    def __init__(self, ids: Ids) -> None:
        super().__init__((), "int64")
        self.ids, self.count = ids, len(ids)

    def read(self, offsets: Ids, length: int) -> Ids:
        found: Ids = self.ids[offsets[:, None] + np.arange(length)]
        return found


def token_losses(
    model: nn.Module,
    tokens: Tokens,
    offsets: Ids,
    length: int,
    *,
    batch_size: int,
    compute: Compute,
    processes: Processes = ALONE,
    before_pass: Callable[[Ids, Ids], None] = lambda block, offsets: None,
) -> Iterator[tuple[Losses, Ids]]:
    """Nats and targets, both (B, length), of this rank's share of the windows that start at `offsets`, pass by pass.

    Every rank makes the same number of forward passes of the same shape, as collectives and compiled code want it: a
    missing window is a repeated one that is not given out.

    Args:
        batch_size: windows a forward pass at most; changes the result by rounding only.
        before_pass: hears ids (batch_size, length + 1) and their offsets; may raise.
    """
    passes = -(-len(offsets) // (batch_size * processes.world_size))
    if not compute.compile:  # which would compile again for another shape
        batch_size = -(-len(offsets) // (passes * processes.world_size))  # as few repeated ones as can be
    shape = (passes, processes.world_size, batch_size)
    padded = np.resize(offsets, shape)[:, processes.rank]
    counts = (np.arange(math.prod(shape)).reshape(shape) < len(offsets))[:, processes.rank].sum(axis=1)
    with inference(model):
        for rows, count in zip(padded, counts.tolist(), strict=True):
            block = tokens.read(rows, length + 1)
            before_pass(block, rows)
            ids = torch.from_numpy(block).to(compute.device)
            with compute.autocast():
                losses = model(ids[:, :-1], ids[:, 1:], reduction="none")
            yield losses[:count].float().cpu().numpy().astype(np.float64), block[:count, 1:]  # MPS has no float64


def windows_loss(
    model: nn.Module,
    tokens: Tokens,
    offsets: Ids,
    *,
    block_size: int,
    micro_batch: int,
    compute: Compute,
    processes: Processes,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss in nats over the windows that start at `offsets`, the same to rounding for any batch and ranks.

    `progress` is called before each pass and may raise.
    """
    passes = token_losses(
        model,
        tokens,
        offsets,
        block_size,
        batch_size=micro_batch,
        compute=compute,
        processes=processes,
        before_pass=lambda block, offsets: progress(),
    )
    total = sum(float(losses.sum()) for losses, _ in passes)
    if processes.distributed:
        total = processes.sum(torch.tensor(total, dtype=torch.float64, device=compute.device)).item()
    return total / (len(offsets) * block_size)


@dataclass(frozen=True)
class SplitLoss:
    """Cross-entropy over a split."""

    loss: float  # nats a token
    perplexity: float  # exp(loss); infinite where that is no number of the machine's
    standard_error: float  # of the loss, from the spread of the windows' sums
    tokens: int  # predicted
    text_bytes: int | None  # UTF-8 bytes of the predicted tokens; None without a tokenizer
    bits_per_byte: float | None


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
        byte_lengths: UTF-8 bytes of each id, 0 for end-of-text; (size,).

    Raises:
        UserError: fewer than two tokens, or an id that the model has no row for.
    """
    total = tokens.count - 1
    if total < 1:
        raise UserError(f"{tokens.paths[0]} has {tokens.count} tokens; at least 2 are needed to predict one.")
    block_size, rows = model.config.block_size, model.wte.weight.shape[0]
    windows, rest = divmod(total, block_size)
    starts = np.arange(windows + 1, dtype=np.int64) * block_size
    # an id beyond the tokenizer has no bytes
    table = None if byte_lengths is None else np.append(byte_lengths, np.int32(0))
    sums: list[Losses] = []  # nats of each window
    text_nats, text_bytes, done = 0.0, 0, 0
    for offsets, length in ((starts[:-1], block_size), (starts[-1:], rest)):
        if not length or not len(offsets):
            continue
        for losses, targets in token_losses(
            model,
            tokens,
            offsets,
            length,
            batch_size=batch_size,
            compute=compute,
            before_pass=lambda block, offsets: check_batch(block, offsets, tokens, rows),
        ):
            sums.append(losses.sum(axis=1))
            if table is not None:  # end-of-text has no bytes: left out of both sums
                known = table[np.minimum(targets, len(table) - 1)]
                text_nats += float(losses[known > 0].sum())
                text_bytes += int(known.sum())
            done += losses.size
            progress.at("evaluating", done, total, f"{done:,} of {total:,} tokens")
    lengths = np.full(windows + bool(rest), block_size)
    lengths[-1] = rest or block_size
    nats = np.concatenate(sums)
    loss = float(nats.sum() / total)
    # windows are the independent draws, not tokens
    error = float(np.sqrt(np.square(nats - loss * lengths).sum()) / total)
    bits = text_nats / math.log(2) / text_bytes if text_bytes else None
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return SplitLoss(loss, perplexity, error, total, None if byte_lengths is None else text_bytes, bits)


def evaluate(
    loaded: LoadedModel,
    data_set: DataSet,
    split: str,
    *,
    compute: Compute,
    batch_size: int | None = None,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """What a model makes of "train" or "val": the numbers of SplitLoss by name, and what was read.

    `published` is the loss that nanoGPT gives for these weights on this data, if it does. Why bits per byte stay
    unknown is said to `progress`. UserError as for `evaluate_split`.
    """
    reader, lengths = loaded.tokenizer or data_set.tokenizer, None
    try:
        lengths = None if reader is None else reader.byte_lengths()
    except NanogptError as error:  # the loss needs no text
        progress.say(f"bits per byte stay unknown: {error}")
    result = evaluate_split(
        loaded.model,
        data_set.train if split == "train" else data_set.val,
        batch_size=batch_size or default_batch_size(loaded.model),
        compute=compute,
        byte_lengths=lengths,
        progress=progress,
    )
    published = None
    if loaded.released and data_set.name == "openwebtext":
        published = {"loss": PUBLISHED["loss"][loaded.released][split], "source": "published by nanoGPT"}
    return {
        "model": loaded.source,
        "step": loaded.step,
        "data": data_set.name,
        "folder": str(data_set.folder),
        "split": split,
        **asdict(result),
        "published": published,
    }
