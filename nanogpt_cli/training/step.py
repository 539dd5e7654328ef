"""One update: forward and backward over every micro-batch, then the optimizer, and what came of it one step later.

Training takes it, and `mfu` times the same: the host only sends work to the device and never waits inside a step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanogpt_cli.config.derived import Split
from nanogpt_cli.machine.device import Compute, key_dropout
from nanogpt_cli.machine.distributed import Processes, gradient_sync
from nanogpt_cli.training.state import TrainingState

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (micro_batch, block_size) both


class InFlight:
    """An update that nobody has looked at; what `TrainStep` gave for it is on its way to the host."""

    def __init__(self, step: int, rate: float, tensor: Tensor) -> None:
        self.step, self.rate = step, rate
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = tensor

    def values(self) -> list[float]:
        """[loss, norm, skipped, stop, save, time is up]; waits only if the device is not done with them yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(v) for v in self._host.tolist()]


@dataclass
class TrainStep:
    """What an update works on; `forward`, `backward` and `update` are its parts."""

    state: TrainingState
    model: nn.Module  # what is called: the bare module, or its wrapper for several ranks
    split: Split
    compute: Compute
    processes: Processes

    def __call__(self, batches: Iterator[Batch], *, between: Callable[[], None], wishes: Sequence[bool]) -> Tensor:
        """Take the update after `state.progress.step`; returns what `update` does.

        `between` is called before each micro-step; what it raises leaves the update unfinished. `wishes` are this
        rank's; every rank learns the sum with the outcome.
        """
        config, step = self.state.config, self.state.progress.step
        if config.model.dropout:
            key_dropout(self.compute.device, config.train.seed, step, self.processes.rank)
        loss = torch.zeros((), device=self.compute.device)
        for micro_step in range(self.split.micro_steps):
            between()
            x, y = next(batches)
            with gradient_sync(self.model, last=micro_step == self.split.micro_steps - 1):
                micro_loss = self.forward(x, y)
                self.backward(micro_loss)
            loss += micro_loss.detach()
        return self.update(loss, wishes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a micro-batch, as its share of the update's mean."""
        with self.compute.autocast():
            loss: Tensor = self.model(x, y) / self.split.micro_steps
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add up the gradients of a micro-batch."""
        self.state.scaler.scale(loss).backward()

    def update(self, loss: Tensor, wishes: Sequence[bool] = ()) -> Tensor:
        """Clip and apply the gradients unless something is not finite; all on the device, nobody waits.

        Returns [loss, gradient norm before clipping, skipped, *wishes], the same on every rank.
        """
        optimizer, scaler = self.state.optimizer, self.state.scaler
        optimizer.take_gradients()
        if scaler.is_enabled():
            for part in optimizer.torch_optimizers():
                scaler.unscale_(part)
        norm = optimizer.clip(self.state.config.optim.grad_clip)
        # filled on the device: a tensor made of a list would be copied there, and the copy waits for all work before it
        flags = [torch.full_like(loss, float(wish)) for wish in wishes]
        shared = self.processes.sum(torch.stack([loss / self.processes.world_size, *flags]))
        skip = 1 - (torch.isfinite(norm) & torch.isfinite(shared[0])).float()
        optimizer.step(skip)
        if scaler.is_enabled():
            scaler.update()
        optimizer.zero_grad()
        return torch.cat([torch.stack([shared[0], norm, skip]), shared[1:]])


def what_went_bad(step: int, loss: float, norm: float, scaler: torch.amp.GradScaler) -> str:
    """Why a skipped update ends the run, and what to try; empty where float16 has only overflowed."""
    lower = "Try a lower --learning-rate"
    if not math.isfinite(loss):
        return f"the loss is {loss} at step {step}. {lower}"
    if not scaler.is_enabled():
        return f"the gradient norm is {norm} at step {step}. {lower}"
    if scaler.get_scale() >= 1:  # it was too high, and has been lowered
        return ""
    return f"the loss scale fell below 1 at step {step}: float16 cannot hold these gradients. Try --dtype bfloat16"
