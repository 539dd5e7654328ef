"""Everything that makes up a run in progress: made for its settings, to a checkpoint and back."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanogpt_cli.config.schema import Config
from nanogpt_cli.errors import NonFiniteError, UserError
from nanogpt_cli.keyed import Purpose, seed32
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.machine.sharding import full_tensor, load_full_tensors, shard, to_local
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import FORMAT, Checkpoint, RunProgress, non_finite, refuse_non_finite
from nanogpt_cli.training.optimizer import Optimizer


@dataclass
class TrainingState:
    """The live objects of a run and how far they are."""

    config: Config  # [model] is the architecture, with vocab_size
    model: GPT  # the bare module, whatever wraps it for the forward pass
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    progress: RunProgress
    lasting: dict[str, Any]  # of a checkpoint: eval_windows, tokenizer, data and layout

    def checkpoint(self, processes: Processes = ALONE) -> Checkpoint:
        """A complete training state; its tensors are the live ones, so write it before the next update.

        Every rank must call it; of a sharded model the state is complete on rank 0 only. NonFiniteError if a weight or
        a moment is NaN or infinite: such a state is never saved.
        """
        here = {name: to_local(tensor) for name, tensor in self.model.state_dict().items()}
        broken, problem = non_finite(here) or non_finite(self.optimizer.moments()), None
        if broken:
            problem = NonFiniteError(f"{broken} is not finite after step {self.progress.step}, which was not saved;")
        processes.agree(problem)
        return as_checkpoint(
            self.config,
            self.progress,
            **self.lasting,
            model={name: full_tensor(tensor, tensor) for name, tensor in self.model.state_dict().items()},
            optimizer=self.optimizer.state_by_name(),
            scaler=self.scaler.state_dict(),
        )

    def restore(self, checkpoint: Checkpoint, source: str, *, adopt: bool = False) -> None:
        """Take weights, moments, scale and progress over; settings stay as they are here.

        With `adopt` the moments are kept as they are, not as copies: nobody else has or maps them. UserError if the
        optimizer state does not fit this run, or something is not finite.
        """
        refuse_non_finite(checkpoint["model"], source, "weights")
        load_full_tensors(self.model, checkpoint["model"].items())
        try:
            self.optimizer.load_state_by_name(checkpoint["optimizer"], adopt=adopt)
        except (KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise UserError(f"{source}: the optimizer state does not fit this run: {error}") from None
        refuse_non_finite(self.optimizer.moments(), source, "moments")
        if checkpoint.get("scaler"):
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.progress = RunProgress(**checkpoint["progress"])


def as_checkpoint(config: Config, progress: RunProgress, **parts: Any) -> Checkpoint:
    """A complete training state, as it is saved; `parts` are what lasts, model, optimizer and scaler."""
    return {
        "format": FORMAT,
        "step": progress.step,
        "rows": progress.rows,
        "tokens": progress.rows * config.model.block_size,
        "progress": dataclasses.asdict(progress),
        "config": config.to_toml(),
        **parts,
    }


def out_of_patience(config: Config, progress: RunProgress) -> bool:
    """Whether the last evaluations, as many as `patience` says, brought nothing better."""
    return 0 < config.train.patience <= progress.not_better


def is_sharded(config: Config, ranks: int) -> bool:
    """Whether the ranks share the model out among them (FSDP)."""
    return config.system.parallel == "fsdp" and ranks > 1


def build_state(
    config: Config,
    compute: Compute,
    processes: Processes = ALONE,
    *,
    weights: Mapping[str, Tensor] | None = None,
    lasting: dict[str, Any] | None = None,
) -> TrainingState:
    """Model, optimizer and progress of a run at step 0; the one place where they are made, for training and for `mfu`.

    Args:
        weights: full ones to start with, by parameter name; empty if others are about to follow; drawn if None.
    """
    with torch.device("meta"):
        model = GPT(config.model, activation_checkpointing=config.system.activation_checkpointing)
    if is_sharded(config, processes.world_size):
        shard(model, processes, compute)
    else:
        model.to_empty(device=compute.device)
    if weights is None:  # drawn on the CPU, so that a seed means the same start on any device and any number of ranks
        generator = torch.Generator().manual_seed(seed32(config.train.seed, Purpose.INIT))
        load_full_tensors(model, model.initial_weights(generator))
    else:
        load_full_tensors(model, weights.items())
    optimizer = Optimizer(model, config.optim, compute.device, processes)
    scaler = torch.amp.GradScaler(compute.device.type, enabled=compute.dtype == torch.float16)
    return TrainingState(config, model, optimizer, scaler, RunProgress(), lasting or {})
