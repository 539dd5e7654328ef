"""What a run is judged by while it trains: the same windows of both splits every time, and a short sample."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from nanogpt_cli.data.tokenizers import Tokenizer
from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.data.tokens.rows import evaluation_offsets
from nanogpt_cli.inference.evaluate import windows_loss
from nanogpt_cli.inference.sample import Sample, start_of_text
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.training.step import TrainStep
from nanogpt_cli.view.plain import View

TOKENS = 100
SHARE = 0.01  # of the time since this start of the run
SHORTEST = 0.02  # seconds: with less to spend there is no sample


@dataclass(frozen=True)
class Validation:
    """Mean losses of the model that `train_step` trains, over `windows` windows of each split, at most all.

    The ranks share them out.
    """

    data_set: DataSet
    windows: int
    train_step: TrainStep

    def losses(self, before_pass: Callable[[], None], show: Callable[[int, int], None]) -> tuple[float, float]:
        """Of validation and training data, in nats a token.

        Before each pass `before_pass` is called, which may raise, and `show` with how many of how many are done.
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


class Samples:
    """Continues the same start with the same random numbers each time, for at most a hundredth of the time.

    The numbers are keyed by the seed and drawn outside of torch, and the model is only read, so that the weights of a
    run with samples and of one without are the same.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, seed: int, log: MetricsLog, view: View) -> None:
        self.model, self.tokenizer, self.log, self.view = model, tokenizer, log, view
        self.sampling = Sampling(TOKENS, seed=seed)
        self._began, self._spent, self._price = time.perf_counter(), 0.0, 0.0  # seconds: in all, of one sample

    def write(self, step: int) -> None:
        """One line {step, prompt, text} for the weights as they are after `step` updates, or none if time is short."""
        began = time.perf_counter()
        allowed = SHARE * (began - self._began) - self._spent
        if allowed < max(SHORTEST, self._price):
            return
        start, _ = start_of_text(self.tokenizer)
        sample = Sample(self.tokenizer)
        limit = min(self.tokenizer.size, self.model.wte.weight.shape[0])
        # without a cache: no graph is captured and no memory kept in the middle of a training
        for ids in generate(self.model, start, 1, self.sampling, token_limit=limit, cached=False):
            sample.add(ids[0] or 0)
            if sample.done or time.perf_counter() - began > allowed:
                break
        sample.finish("length")
        spent = time.perf_counter() - began
        self._spent += spent
        self._price = spent * TOKENS / sample.tokens  # of a whole one, also where this one was cut
        prompt = "" if start[0] == self.tokenizer.eot else self.tokenizer.decode(start)
        self.log.append({"step": step, "prompt": prompt, "text": sample.text})
        self.view.sampled(step, sample.text)
