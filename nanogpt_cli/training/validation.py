"""What a run is judged by while it trains: the same windows of both splits every time, divided over the ranks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.data.tokens.rows import evaluation_offsets
from nanogpt_cli.inference.evaluate import windows_loss
from nanogpt_cli.training.step import TrainStep


@dataclass(frozen=True)
class Validation:
    """Mean losses of the model that `train_step` trains, over `windows` windows of each split, at most all."""

    data_set: DataSet
    windows: int
    train_step: TrainStep

    def losses(self, before_pass: Callable[[], None], show: Callable[[int, int], None]) -> tuple[float, float]:
        """Of validation and training data, in nats a token.

        Args:
            before_pass: called before each forward pass; may raise.
            show: hears how many passes are done, and of how many.
        """
        step, block_size = self.train_step, self.train_step.state.config.model.block_size
        splits = [
            (tokens, evaluation_offsets(tokens.count, block_size, self.windows))
            for tokens in (self.data_set.val, self.data_set.train)
        ]
        share = step.split.micro_batch * step.processes.world_size
        total, done = sum(-(-len(offsets) // share) for _, offsets in splits), itertools.count()

        def tick() -> None:
            before_pass()
            show(next(done), total)

        val_loss, train_loss = (
            windows_loss(
                step.model,
                tokens,
                offsets,
                block_size=block_size,
                micro_batch=step.split.micro_batch,
                compute=step.compute,
                processes=step.processes,
                progress=tick,
            )
            for tokens, offsets in splits
        )
        return val_loss, train_loss
