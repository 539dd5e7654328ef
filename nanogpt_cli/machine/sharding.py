"""FSDP2: every rank keeps a share of each parameter, its gradient and its moments (ZeRO, Rajbhandari et al., 2020).

A tensor is cut along its first dimension into as many chunks as there are ranks. Outside of forward and backward only
the chunks are touched: the optimizer works on them, and a checkpoint is put together from them on rank 0 alone, whole
and under the names of the bare module.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.distributed import Processes
from nanogpt_cli.model.gpt import GPT


def shard(model: GPT, processes: Processes, compute: Compute) -> None:
    """Turn a model on the meta device into one whose chunk stands, with arbitrary values, on this rank's device.

    Blocks are gathered one at a time, the rest (embeddings, last norm, head) for the whole pass. With bfloat16 the
    gathered weights are bfloat16; chunks, gradients' sums and moments stay float32.
    """
    group = processes.group or dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, compute.device.type)
    mixed = compute.dtype != torch.float32
    policy = MixedPrecisionPolicy(compute.dtype, torch.float32) if mixed else MixedPrecisionPolicy()
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=compute.device)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's chunk, sharing memory; a tensor that is not sharded itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(full: Tensor, like: Tensor) -> Tensor:
    """The rows of a full tensor that this rank keeps of the parameter `like`."""
    if not isinstance(like, DTensor):
        return full
    chunks = full.chunk(like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full[:0]  # more ranks than rows


def full_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """Put a tensor together from the ranks' chunks of it, which lie as those of `like`: on the CPU of rank 0.

    The other ranks, which must call it too, get their chunk. Without sharding, the tensor itself.
    """
    if not isinstance(like, DTensor):
        return tensor
    chunk = to_local(tensor)
    mesh, placements = like.device_mesh, like.placements
    gathered = DTensor.from_local(
        chunk, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else chunk


@torch.no_grad()
def load_full_tensors(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's part of full weights into the model; of a memory-mapped file no more than that is read."""
    parameters = dict(model.named_parameters())
    for name, weight in weights:
        to_local(parameters[name]).copy_(local_rows(weight, parameters[name]))
