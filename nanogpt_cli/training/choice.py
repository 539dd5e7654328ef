"""One dial in place of a preset: so many minutes here, or a depth, become the settings of a run.

For minutes this machine is timed for a few seconds: the law of config/family.py tells which depth is then expected to
reach the lowest loss, and the time of a step how many updates there are. What the user sets stands, and the rest is
chosen around it. All is decided once, before there is a run; what is kept of it are plain settings.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from nanogpt_cli.config.derived import split_rows
from nanogpt_cli.config.dial import DEPTHS, Dial, Told
from nanogpt_cli.config.family import (
    EVALUATION_SHARE,
    Text,
    best_tokens,
    block_weights,
    family_layer,
    law_of,
    most_tokens,
)
from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.schema import Config, settings
from nanogpt_cli.errors import UserError
from nanogpt_cli.inference.evaluate import UNASKED_SECONDS
from nanogpt_cli.machine.device import keep_freed_memory
from nanogpt_cli.machine.memory import memory_of
from nanogpt_cli.machine.rank_env import RankEnv
from nanogpt_cli.model.sizes import flops_per_token
from nanogpt_cli.progress import Progress
from nanogpt_cli.training.bench import measure
from nanogpt_cli.training.plan import compute_for, fill_gpu, find_peak, over_ranks, rows_that_fit

FIRST_SHARE = 0.15  # of the peak: the first depth to be timed is the best at this speed
TIMINGS = 2  # of the depth that is taken: what is left of a disturbance is halved
TIMING_SHARE, LONGEST_TIMING = 0.01, 6.0  # of the minutes, and in seconds
MEMORY_SHARE = 0.6  # that a choice of ours may be expected to take
CLOSING = 3.0  # seconds to begin, to read the best weights, to write a sample and a picture
FEWEST_UPDATES, LEAST_SECONDS = 20, 3.0  # of training


def choose(dial: Dial, layers: tuple[Layer, ...], text: Text, env: RankEnv, progress: Progress) -> tuple[Layer, Told]:
    """The settings to lie beneath the user's `layers`. With minutes the machine is timed meanwhile.

    Raises:
        UserError: the time is too short for anything.
    """
    choice, told = _Choice(layers, text, env, dial.for_good), {}
    if dial.minutes is None:
        assert dial.depth is not None
        depth = dial.depth
        tokens = best_tokens(choice.weights(depth), text)
    else:
        deadline = dial.began + 60 * dial.minutes - CLOSING
        longest = min(LONGEST_TIMING, TIMING_SHARE * 60 * dial.minutes)
        if deadline - time.perf_counter() < LEAST_SECONDS:
            raise UserError(f"{dial.minutes:g} minutes are over before anything is learned; take one or more.")
        while choice.timings[depth := choice.best(deadline - time.perf_counter())] < TIMINGS:
            progress.say(f"timing depth {depth}")
            choice.time(depth, deadline - time.perf_counter(), longest)
        if choice.timed[depth].compiles:  # each compilation takes a minute: one to be timed, and that of the run
            choice.time(depth, deadline - time.perf_counter(), longest, compiled=True)
            deadline -= choice.timed[depth].took_s
        seconds = deadline - time.perf_counter()
        tokens = choice.tokens(depth, seconds)
        updates = choice.config(depth, tokens).train.max_iters
        if updates < FEWEST_UPDATES:
            raise UserError(f"{dial.minutes:g} minutes are time for {updates} updates here: too few to learn anything.")
        timed = choice.timed[depth]  # with another batch, perhaps
        step_ms = 1000 * tokens / updates * timed.work / timed.flops_per_s
        others = (d for d in (depth - 1, depth + 1) if d in DEPTHS)
        rivals = "; ".join(f"depth {d}: {choice.loss(d, choice.tokens(d, seconds)):.2f}" for d in others)
        in_full = tokens < most_tokens(choice.weights(depth), text)
        told = {
            "minutes": (
                dial.minutes,
                "as asked" if in_full else "not all of them: so short a text is soon known by heart",
            ),
            "step_ms": (round(step_ms, 3), "timed here"),
            "depth": (depth, f"the lowest expected loss in this time; {rivals}"),
        }
    loss = choice.loss(depth, tokens)
    spread = f"+-{choice.law.spread:g} in runs of {choice.law.text}; another text may be far from it"
    return choice.layer(depth, tokens), {**told, "expected_loss": (round(loss, 3), spread)}


@dataclass(frozen=True)
class Timed:
    """What a depth does here, all ranks together."""

    work: float  # FLOPs of a token
    flops_per_s: float
    compiles: bool  # the run will; it was timed without
    took_s: float


class _Choice:
    """Depths as they would be trained on a text, beside what the user set."""

    def __init__(self, layers: tuple[Layer, ...], text: Text, env: RankEnv, for_good: bool) -> None:
        self.layers, self.text, self.env, self.law, self.for_good = layers, text, env, law_of(text), for_good
        layered = combine(*layers)
        user = layered.config
        self.given = {name: getattr(getattr(user, settings()[name].section), name) for name in layered.origins}
        self.ranks = env.world_size if env.distributed else user.system.gpus * env.machines
        self.timed: dict[int, Timed] = {}
        self.timings: Counter[int] = Counter()
        self.final_eval = user.log.final_eval

    @cached_property
    def first_guess(self) -> float:
        """FLOP/s, before anything is timed."""
        config = self.config(1, 1.0)
        peak = find_peak(config, compute_for(config, self.env.device_index))
        return FIRST_SHARE * (peak[0] if peak else 1e12)

    def weights(self, depth: int) -> float:
        return block_weights(depth, self.given)

    def layer(self, depth: int, tokens: float) -> Layer:
        return family_layer(depth, tokens, self.text, ranks=self.ranks, given=self.given)

    def config(self, depth: int, tokens: float) -> Config:
        config = combine(self.layer(depth, tokens), *self.layers).config
        return config if config.model.vocab_size else config.replace("model", vocab_size=self.text.vocab_size)

    def loss(self, depth: int, tokens: float) -> float:
        return self.law.expected(self.weights(depth), tokens, self.text.tokens)

    def tokens(self, depth: int, seconds: float) -> float:
        """As many as can be read in this time, as far as is known by now, with all that is evaluated."""
        nearest = min(self.timed, key=lambda d: abs(d - depth), default=None)
        speed = self.first_guess if nearest is None else self.timed[nearest].flops_per_s
        tokens = 1.0
        for _ in range(2):  # the context, and with it the work of a token, follows from the tokens
            work = flops_per_token(self.config(depth, tokens).model)
            closing = self.text.val_tokens * work / 3 / speed if self.final_eval else 0.0
            left = seconds - (closing if closing < UNASKED_SECONDS else 0.0)
            tokens = max(1.0, (1 - EVALUATION_SHARE) * left * speed / work)
        return min(tokens, most_tokens(self.weights(depth), self.text))

    def best(self, seconds: float) -> int:
        """The depth that is expected to reach the lowest loss in this time."""
        best, lowest = 1, float("inf")
        for depth in DEPTHS:
            tokens = self.tokens(depth, seconds)
            loss = self.loss(depth, tokens)
            if loss >= lowest or (depth > 1 and not self.fits(self.config(depth, tokens))):
                break  # deeper ones learn still less in the time
            best, lowest = depth, loss
        return best

    def fits(self, config: Config) -> bool:
        config, split = over_ranks(config, self.env)
        compute = compute_for(config, self.env.device_index)
        there = memory_of(compute.device)
        least = 1 if compute.device.type == "cuda" else split.micro_batch  # a GPU's micro-batches are made to fit
        return there is None or rows_that_fit(config, compute, MEMORY_SHARE * there, split.world_size) >= least

    def time(self, depth: int, seconds: float, longest: float, *, compiled: bool = False) -> None:
        """Note how long an update of this depth takes, measured for at most `longest` seconds or so."""
        config, split = over_ranks(self.config(depth, self.tokens(depth, seconds)), self.env)
        compute = compute_for(config, self.env.device_index)
        if compute.device.type == "cuda":
            config = fill_gpu(config, compute, split)
            split = split_rows(config, split.world_size)
        began = time.perf_counter()
        if self.for_good:
            keep_freed_memory(compute.device)  # as when it trains
        with compute.process_settings():
            step = replace(compute, compile=compiled)
            found = measure(config, step, batch_size=split.micro_batch, peak=None, seconds=longest)
        step_s = (split.micro_steps * found.micro_ms + (found.stages_ms["optimizer"] or 0)) / 1000
        if compute.device.type == "cpu":  # whose cores the ranks share
            step_s *= split.world_size
        work = flops_per_token(config.model)
        speed = split.rows * config.model.block_size * work / step_s
        if depth in self.timed and not compiled:
            speed = (speed + self.timed[depth].flops_per_s) / 2  # of two
        self.timed[depth] = Timed(work, speed, compute.compile, time.perf_counter() - began)
        self.timings[depth] += 1
