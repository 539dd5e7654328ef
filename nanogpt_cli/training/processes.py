"""The processes of one run: who this one is, and what they do together. One process is the plain case."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanogpt_cli.training.device import Compute


@dataclass(frozen=True)
class Processes:
    """This process among `world_size`; rank 0 writes, prints and decides by the clock."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there is anyone to talk to."""
        return self.world_size > 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        if self.several:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for everyone."""
        if self.several:
            dist.barrier()

    def wrap(self, model: nn.Module, compute: Compute) -> nn.Module:
        """The module to call in training: gradients are averaged over the ranks."""
        if not self.several:
            return model
        ids = [compute.device.index] if compute.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-step: only the last one of a step averages gradients over the ranks.

    DDP looks at the switch in the forward pass too, so both must be inside.
    """
    if last or not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def join(backend: str) -> Processes:
    """Join the process group that the launcher described in the environment; a lone process needs none."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Processes()
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    return Processes(dist.get_rank(), int(os.environ["LOCAL_RANK"]), world_size)
