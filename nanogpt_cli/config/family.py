"""One family of models, a depth each: the settings of a depth, and how well such a model is expected to do.

The family is the quick start's. Width, heads, context, batch and rates follow from depth, tokens and text.
What is fitted was measured: benchmarks/LOG.md tells how well it holds, `python benchmarks/law.py` repeats the runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanogpt_cli.config.layers import Layer, Rank
from nanogpt_cli.config.presets import preset_layer

BASE = "shakespeare_char_cpu"
ADAMW_RATE = 3e-3  # where the user wants it for all weights: the best of those tried at the base's width
BASE_WIDTH, BASE_TOKENS, BASE_TOKENS_A_STEP = 128, 1.84e6, 3072.0  # which its rates and its batch were tuned for
WIDTH = 64  # of a layer
BLOCK_SIZES = {128: 1e7, 256: 2e8, 512: 2e9, 1024: math.inf}  # with the most tokens of a run
EVALUATIONS, EVALUATION_SHARE = 8, 0.04  # in all, and what they may take of a run's work


@dataclass(frozen=True)
class Text:
    """What of a data set decides how it is learned."""

    tokens: int  # of the train split
    val_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Law:
    """Expected loss in nats a token: floor + by_size / N^size_power + by_tokens / D^tokens_power.

    N: weights of the blocks. D: tokens, of which repeated ones count less and less (Muennighoff et al., 2023): e
    epochs of U tokens are worth U (1 + R (1 - exp(-(e - 1) / R))) of them, with R = `worth`.
    """

    floor: float
    by_size: float
    size_power: float
    by_tokens: float
    tokens_power: float
    worth: float
    text: str  # that it was measured on
    spread: float  # of the runs about the fit, in nats; a text of another kind may be further off

    def expected(self, weights: float, tokens: float, text_tokens: int) -> float:
        epochs = tokens / text_tokens
        if epochs > 1:
            tokens = text_tokens * (1 + self.worth * -math.expm1((1 - epochs) / self.worth))
        size, length = self.by_size / weights**self.size_power, self.by_tokens / tokens**self.tokens_power
        return float(self.floor + size + length)


CHARACTERS = Law(1.13, 5.96, 0.25, 136.6, 0.45, 8.0, "Shakespeare by characters", 0.03)
WORDS = Law(1.24, 9.22, 0.2, 326.0, 0.4, 8.0, "documentation by a BPE of 2,048 ids", 0.04)


def most_tokens(weights: float, text: Text) -> float:
    """What a model of this size may read of a text before it learns it by heart, and the loss rises again.

    Seen on 200,000 characters between 5 and 10 epochs: a model with a quarter as many weights went on learning, one
    with twice as many gained nothing, one with 7 times as many lost much. The power is a guess that fits all three.
    """
    return float(text.tokens * 10 * (text.tokens / weights) ** 0.4)


def best_tokens(weights: float, text: Text) -> float:
    """Where a model of this size has learned so much that the same work would do more in a larger one.

    Of N D = const the minimum of N's and D's terms; less where a short text ends it.
    """
    law = law_of(text)
    by_size = law.size_power * law.by_size / weights**law.size_power
    tokens = (law.tokens_power * law.by_tokens / by_size) ** (1 / law.tokens_power)
    return float(min(tokens, most_tokens(weights, text)))


def law_of(text: Text) -> Law:
    """By the size of the vocabulary: characters and bytes, or parts of words."""
    return CHARACTERS if text.vocab_size < 512 else WORDS


def block_weights(depth: int, given: Mapping[str, Any]) -> int:
    """Weights of the blocks: attention has 4, an MLP 8 times the width squared."""
    return int(12 * given.get("n_layer", depth) * given.get("n_embd", WIDTH * depth) ** 2)


def family_layer(depth: int, tokens: float, text: Text, *, ranks: int, given: Mapping[str, Any]) -> Layer:
    """The settings of a model of this depth that is trained on about so many tokens.

    Args:
        tokens: in all; the last update is whole.
        ranks: processes that share the rows of an update.
        given: settings by name that stand whatever is chosen; the others are chosen around them.
    """
    tables = {section: dict(table) for section, table in preset_layer(BASE).tables.items() if section != "data"}
    width = given.get("n_embd", WIDTH * depth)
    block_size = given.get("block_size") or _block_size(tokens, text)
    rows = given.get("batch_size") or _rows(tokens, block_size, ranks)
    updates = max(1, round(tokens / (rows * given.get("gradient_accumulation_steps", 1) * block_size)))
    slower = (BASE_WIDTH / width) ** 0.5
    windows = EVALUATION_SHARE * 3 * tokens / (2 * EVALUATIONS * block_size)  # forward passes are a third of the work
    tables["model"] |= {"n_layer": depth, "n_head": _heads(width), "n_embd": width, "block_size": block_size}
    rate = ADAMW_RATE if given.get("optimizer") == "adamw" else tables["optim"]["learning_rate"]
    tables["optim"] |= {"learning_rate": rate * slower}  # Muon's own is good for any width
    tables["train"] |= {"batch_size": rows, "max_iters": updates}
    tables["train"] |= {"eval_interval": -(-updates // EVALUATIONS), "eval_iters": max(1, round(windows / rows))}
    return Layer(f"depth {depth}", tables, Rank.PRESET)


def _heads(width: int) -> int:
    """Heads of 64, of 32 in narrow models; as many as divide the width where that does not."""
    head = 32 if width <= BASE_WIDTH else 64
    return next((n for n in range(max(1, width // head), 1, -1) if width % (2 * n) == 0), 1)


def _block_size(tokens: float, text: Text) -> int:
    """Longer for longer runs; a short text has eight windows to be judged by."""
    size = next(size for size, most in BLOCK_SIZES.items() if tokens <= most)
    while size > 8 and 8 * size > text.val_tokens:
        size //= 2
    return size


def _rows(tokens: float, block_size: int, ranks: int) -> int:
    """Of an update: with the root of the run's length, in whole rows of every rank."""
    tokens_a_step = BASE_TOKENS_A_STEP * (tokens / BASE_TOKENS) ** 0.5
    return ranks * max(1, round(float(tokens_a_step) / block_size / ranks))
