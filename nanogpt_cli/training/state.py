"""Everything that makes up a run in progress, to a checkpoint and back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from nanogpt_cli.config.derived import Schedule
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.errors import NonFiniteError, UserError
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.model.weights import check_shapes, shapes_of
from nanogpt_cli.training.checkpoints import FORMAT, Checkpoint, non_finite
from nanogpt_cli.training.form import Progress
from nanogpt_cli.training.optimizers import Optimizer
from nanogpt_cli.training.processes import Processes
from nanogpt_cli.training.sharding import load_own, own, whole_state

ALONE = Processes()


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
        here = {name: own(tensor) for name, tensor in self.model.state_dict().items()}
        broken, problem = non_finite(here) or non_finite(self.optimizer.moments()), None
        if broken:
            problem = NonFiniteError(f"{broken} is not finite after step {self.progress.step}, which was not saved;")
        processes.agree(problem)
        block_size = self.facts.architecture.block_size
        return {
            "format": FORMAT,
            "model": whole_state(self.model),
            "optimizer": self.optimizer.state_by_name(),
            "scaler": self.scaler.state_dict(),
            "step": self.progress.step,
            "rows": self.progress.rows,
            "tokens": self.progress.rows * block_size,
            "progress": dataclasses.asdict(self.progress),
            "config": self.facts.config.to_toml(),
            "architecture": dataclasses.asdict(self.facts.architecture),
            "schedule": dataclasses.asdict(self.facts.schedule),
            "eval_windows": self.facts.eval_windows,
            "tokenizer": self.facts.tokenizer,
            "data": self.facts.data,
            "layout": self.facts.layout,
        }

    def restore(self, checkpoint: Checkpoint, source: str, *, adopt: bool = False) -> None:
        """Take weights, moments, scale and progress over; settings stay as they are here.

        Args:
            adopt: the moments may be kept as they are, not as copies: nobody else has or maps them.

        Raises:
            UserError: the checkpoint does not fit the model.
        """
        load_weights(self.model, checkpoint["model"], source)
        try:
            self.optimizer.load_state_by_name(checkpoint["optimizer"], adopt=adopt)
        except (KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise UserError(f"{source}: the optimizer state does not fit this run: {error}") from None
        broken = non_finite(self.optimizer.moments())
        if broken:
            raise UserError(f"{source}: the moments hold NaN or infinity ({broken}). Use an earlier checkpoint.")
        if checkpoint.get("scaler"):
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.progress = Progress(**checkpoint["progress"])


def load_weights(model: GPT, weights: dict[str, torch.Tensor], source: str) -> None:
    """Copy weights by name into the bare module.

    Raises:
        UserError: tensors are missing, too many, of another shape, or not finite; names them.
    """
    check_shapes(shapes_of(weights), shapes_of(model.state_dict()), source)
    broken = non_finite(weights)
    if broken:
        raise UserError(f"{source}: the weights hold NaN or infinity ({broken}). Use an earlier checkpoint.")
    load_own(model, weights)
