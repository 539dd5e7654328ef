"""Text from a model: all samples of a prompt in one batch, one token of each at a time.

Sample i depends on (seed, i) alone: its random numbers are a pure function of them, whatever else is in the batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.keyed import Purpose, raw
from nanogpt_cli.model.decode import Decoder
from nanogpt_cli.model.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 takes the most likely one. `top_k` keeps the k most likely, `top_p` the fewest whose probabilities
    reach p; None keeps all. A sample ends with an id of `stop_ids`. UserError for a number out of its range.
    """

    max_new_tokens: int
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    seed: int = 1337
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, fits, needed in (
            ("max_new_tokens", self.max_new_tokens >= 0, "a whole number of at least 0"),
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "a whole number of at least 1, or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "a number above 0 and at most 1, or None"),
            ("seed", 0 <= self.seed < 1 << 63, "a whole number from 0 to 2**63 - 1"),
        ):
            if not fits:
                raise UserError(f"{name} is {getattr(self, name)}: {needed} is needed.")


def generate(
    model: GPT,
    prompt: Sequence[int],
    num_samples: int,
    sampling: Sampling,
    *,
    token_limit: int,
    cached: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[list[int | None]]:
    """Continue `prompt` (at least one id): yields one list a step, one id a sample, None once it has ended.

    When block_size positions are filled, the oldest half is dropped and the rest computed again.

    Args:
        token_limit: ids from here on are never drawn: rows of a padded table that no token uses.
        cached: keep keys and values. Without, every step computes all positions: the same tokens in float32, slowly.
        dtype: of the matrix products; None is float32.
    """
    decoder = Decoder(model, dtype)
    block_size = decoder.block_size
    rows = torch.tensor([list(prompt)[-block_size:]], device=decoder.device)  # (1 or num_samples, T)
    capacity = min(block_size, rows.shape[1] + sampling.max_new_tokens)
    logits = decoder.prefill(rows, num_samples, capacity) if cached else decoder.logits(rows)
    rows = rows.expand(num_samples, -1)
    ended = [False] * num_samples
    for step in range(sampling.max_new_tokens):
        ids = draw(logits[:, :token_limit].expand(num_samples, -1), sampling, step)
        yield [None if over else token for token, over in zip(ids, ended, strict=True)]
        ended = [over or token in sampling.stop_ids for token, over in zip(ids, ended, strict=True)]
        if all(ended) or step + 1 == sampling.max_new_tokens:
            return
        newest = torch.tensor(ids, device=decoder.device).unsqueeze(1)  # (num_samples, 1)
        rows = torch.cat((rows, newest), dim=1)
        if full := rows.shape[1] > block_size:
            rows = rows[:, -max(1, block_size // 2) :]
        if not cached:
            logits = decoder.logits(rows)
        else:
            logits = decoder.prefill(rows, num_samples, capacity) if full else decoder.step(newest)


def draw(logits: Tensor, sampling: Sampling, step: int) -> list[int]:
    """One id a row of logits (rows, V), by this step's random numbers; NanogptError for NaN, or if none is finite."""
    V = logits.shape[1]
    greedy = sampling.temperature == 0
    k = 1 if greedy else V if sampling.top_k is None else min(sampling.top_k, V)
    if k < V:
        values, ids = logits.topk(k, dim=-1)  # exactly k, also among equals
        ids, order = ids.sort(dim=-1)  # by id: a rounding that swaps two ranks must not swap what is drawn
        values = values.gather(1, order)
    else:
        values, ids = logits, torch.arange(V, device=logits.device).expand_as(logits)
    scores: npt.NDArray[np.float64] = values.cpu().double().numpy()
    best = scores.max(axis=1, keepdims=True)
    if not np.isfinite(best).all():
        raise NanogptError(
            "The model's logits are not finite: its weights are damaged, or the device computes wrongly."
        )
    if greedy:
        return [int(i) for i in ids[:, 0].tolist()]
    weights = np.exp((scores - best) / sampling.temperature)
    if sampling.top_p is not None and sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    words = [raw(sampling.seed, Purpose.SAMPLE, stream=i, start=step, count=1)[0] for i in range(len(weights))]
    uniforms = np.array([int(word) >> 11 for word in words], dtype=np.float64) * 2.0**-53  # in [0, 1)
    sums = np.cumsum(weights, axis=1)
    places = (sums <= (uniforms * sums[:, -1])[:, None]).sum(axis=1)
    last = (sums < sums[:, -1:]).sum(axis=1)  # rounding must not go beyond it
    chosen = torch.from_numpy(np.minimum(places, last)).to(ids.device)
    return [int(i) for i in ids.gather(1, chosen.unsqueeze(1)).flatten().tolist()]


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Zero what lies outside the fewest columns whose share of a row's sum reaches top_p."""
    order = np.argsort(-weights, axis=1, kind="stable")
    falling = np.take_along_axis(weights, order, axis=1)
    before = np.cumsum(falling, axis=1) - falling  # what the more likely ones reach without this one
    inside = before < top_p * falling.sum(axis=1, keepdims=True)
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, np.where(inside, falling, 0.0), axis=1)
    return kept
