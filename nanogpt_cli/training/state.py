"""Everything that makes up a run in progress, to a checkpoint and back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from nanogpt_cli.config.derived import Schedule
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.errors import NonFiniteError, UserError
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.machine.sharding import full_state_dict, load_full_state_dict, to_local
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import FORMAT, Checkpoint, non_finite, refuse_non_finite
from nanogpt_cli.runs.form import Progress
from nanogpt_cli.training.optimizer import Optimizer


@dataclass
class Facts:
    """What stays the same while a run goes on and stands in each of its checkpoints."""

    config: Config
    architecture: ModelSettings  # with vocab_size set
    schedule: Schedule
    eval_windows: int
    tokenizer: dict[str, Any] | None
    data: dict[str, Any]
    layout: dict[str, Any]


def as_checkpoint(
    facts: Facts, progress: Progress, *, model: dict[str, Any], optimizer: dict[str, Any], scaler: dict[str, Any]
) -> Checkpoint:
    """A complete training state, as it is saved."""
    return {
        "format": FORMAT,
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "step": progress.step,
        "rows": progress.rows,
        "tokens": progress.rows * facts.architecture.block_size,
        "progress": dataclasses.asdict(progress),
        "config": facts.config.to_toml(),
        "architecture": dataclasses.asdict(facts.architecture),
        "schedule": dataclasses.asdict(facts.schedule),
        "eval_windows": facts.eval_windows,
        "tokenizer": facts.tokenizer,
        "data": facts.data,
        "layout": facts.layout,
    }


@dataclass
class TrainingState:
    """The live objects of a run and how far they are."""

    model: GPT  # the bare module, whatever wraps it for the forward pass
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    facts: Facts

    def checkpoint(self, processes: Processes = ALONE) -> Checkpoint:
        """A complete training state; its tensors are the live ones, so write it before the next update.

        Every rank must call it; of a sharded model the state is complete on rank 0 only.

        Raises:
            NonFiniteError: a weight or a moment is NaN or infinite: such a state is never saved.
        """
        here = {name: to_local(tensor) for name, tensor in self.model.state_dict().items()}
        broken, problem = non_finite(here) or non_finite(self.optimizer.moments()), None
        if broken:
            problem = NonFiniteError(f"{broken} is not finite after step {self.progress.step}, which was not saved;")
        processes.agree(problem)
        return as_checkpoint(
            self.facts,
            self.progress,
            model=full_state_dict(self.model),
            optimizer=self.optimizer.state_by_name(),
            scaler=self.scaler.state_dict(),
        )

    def restore(self, checkpoint: Checkpoint, source: str, *, adopt: bool = False) -> None:
        """Take weights, moments, scale and progress over; settings stay as they are here.

        Args:
            adopt: the moments may be kept as they are, not as copies: nobody else has or maps them.

        Raises:
            UserError: the optimizer state does not fit this run, or something is not finite.
        """
        refuse_non_finite(checkpoint["model"], source, "weights")
        load_full_state_dict(self.model, checkpoint["model"])
        try:
            self.optimizer.load_state_by_name(checkpoint["optimizer"], adopt=adopt)
        except (KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise UserError(f"{source}: the optimizer state does not fit this run: {error}") from None
        refuse_non_finite(self.optimizer.moments(), source, "moments")
        if checkpoint.get("scaler"):
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.progress = Progress(**checkpoint["progress"])
