"""Validation while training: the same windows every time, shared out over the ranks."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nanogpt_cli.data.tokens.files import Tokens
from nanogpt_cli.machine.device import Compute, inference
from nanogpt_cli.machine.distributed import Processes


def windows_loss(
    model: nn.Module,
    tokens: Tokens,
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
    shape = (passes, processes.world_size, micro_batch)
    padded = np.resize(offsets, shape)[:, processes.rank]
    counts = (np.arange(passes * share).reshape(shape) < len(offsets))[:, processes.rank]
    dtype = torch.float32 if compute.device.type == "mps" else torch.float64  # which has no float64
    total = torch.zeros((), dtype=dtype, device=compute.device)
    with inference(model):
        for rows, weights in zip(padded, counts, strict=True):
            progress()
            block = torch.from_numpy(tokens.read(rows, block_size + 1)).to(compute.device)
            with compute.autocast():
                losses = model(block[:, :-1], block[:, 1:], reduction="none")
            weight = torch.from_numpy(weights).to(compute.device, dtype)
            total += (losses.mean(dim=1).to(dtype) * weight).sum()
    return float(processes.sum(total).item()) / len(offsets)
