"""A short sample at evaluations, so that one can watch the model learn, for at most a hundredth of the time."""

import time

from nanogpt_cli.data.tokenizers import Tokenizer
from nanogpt_cli.inference.sample import Sample, start_of_text
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.view.plain import View

TOKENS = 100
SHARE = 0.01  # of the time since this start of the run
SHORTEST = 0.02  # seconds: with less to spend there is no sample


class Samples:
    """Continues the same start with the same random numbers each time: what differs is what was learned.

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
