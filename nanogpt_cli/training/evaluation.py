"""Validation while training: the same windows every time, shared out over the ranks."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nanogpt_cli.training.device import Compute, inference
from nanogpt_cli.training.processes import Processes


class TokenReader(Protocol):
    """What is needed of a split's tokens."""

    def read(self, offsets: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]: ...


def windows_loss(
    model: nn.Module,
    tokens: TokenReader,
    offsets: npt.NDArray[np.int64],
    *,
    block_size: int,
    micro_batch: int,
    compute: Compute,
    processes: Processes,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss in nats over the windows that start at `offsets`, the same to rounding for any batch and ranks.

    Every rank makes the same number of forward passes of the same shape: a missing window is a repeated one that
    does not count. `progress` is called before each pass and may raise.
    """
    share = micro_batch * processes.world_size
    passes = -(-len(offsets) // share)
    padded = np.resize(offsets, passes * share).reshape(passes, processes.world_size, micro_batch)[:, processes.rank]
    counts = (np.arange(passes * share) < len(offsets)).reshape(passes, processes.world_size, micro_batch)
    counts = counts[:, processes.rank]
    total = torch.zeros(
        (), dtype=torch.float32 if compute.device.type == "mps" else torch.float64, device=compute.device
    )
    with inference(model):
        for rows, weights in zip(padded, counts, strict=True):
            progress()
            block = torch.from_numpy(tokens.read(rows, block_size + 1)).to(compute.device)
            with compute.autocast():
                losses = model(block[:, :-1], block[:, 1:], reduction="none")
            weight = torch.from_numpy(weights).to(compute.device, total.dtype)
            total += (losses.mean(dim=1).to(total.dtype) * weight).sum()
    return float(processes.sum(total).item()) / len(offsets)
