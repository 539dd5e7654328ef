"""Text out of a model: ids become text as they come, also where a character spans several tokens."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.machine.memory import memory_of
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.weights.load import LoadedModel

UTF8 = codecs.getincrementaldecoder("utf-8")
Ended = Literal["length", "end of text", "stop"]


@dataclass
class Sample:
    """One sample, growing: `text` is what may be shown already."""

    tokenizer: Tokenizer | None
    stops: tuple[str, ...] = ()
    text: str = ""
    tokens: int = 0
    ended: Ended | None = None
    _held: str = ""  # may be the beginning of a stop text
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: UTF8(errors="replace"))

    @property
    def done(self) -> bool:
        return self.ended is not None

    def add(self, token: int) -> str:
        """Take the next id; the text that became certain by it."""
        self.tokens += 1
        if self.tokenizer is None:
            return self._release(f"{token} ")
        if token == self.tokenizer.eot:
            return self.finish("end of text")
        return self._release(self._decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self, ended: Ended) -> str:
        """No more ids come; the text held back so far, half a character as U+FFFD."""
        if self.done:
            return ""
        piece = self._release(self._decoder.decode(b"", final=True), last=True)
        self.ended = self.ended or ended
        return piece

    def _release(self, piece: str, last: bool = False) -> str:
        held = self._held + piece
        found = [place for stop in self.stops if (place := held.find(stop)) >= 0]
        if found:
            self.ended = "stop"
            ready, self._held = held[: min(found)], ""
        else:
            # the longest end of the text with which some stop text begins
            begins = [n for stop in self.stops for n in range(1, len(stop)) if held.endswith(stop[:n])]
            keep = 0 if last else max(begins, default=0)
            ready, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += ready
        return ready


def start_of_text(tokenizer: Tokenizer | None) -> tuple[list[int], str]:
    """What to begin with when there is no prompt, and that in words."""
    if tokenizer is None:
        return [0], "id 0"
    if tokenizer.eot is not None:
        return [tokenizer.eot], "end of text"
    if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.alphabet:
        start = tokenizer.most_frequent
        return prompt_ids(start, tokenizer, tokenizer.size), f"{start!r}, the most frequent character"
    return prompt_ids("\n", tokenizer, tokenizer.size), "a newline"


def prompt_ids(text: str, tokenizer: Tokenizer | None, limit: int) -> list[int]:
    """The ids of a prompt, each below `limit`; UserError lists what the model does not know."""
    if tokenizer is not None:
        return [int(number) for number in tokenizer.encode(text)]
    words = text.split()
    if not all(word.isdecimal() and int(word) < limit for word in words):
        needed = f"a prompt must be ids from 0 to {limit - 1}, such as --prompt '12 7'"
        raise UserError(f"--prompt {text!r}: this model has no tokenizer, so {needed}.")
    return [int(word) for word in words]


def write_samples(
    loaded: LoadedModel,
    prompt: Sequence[int],
    num_samples: int,
    sampling: Sampling,
    *,
    stops: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    on_text: Callable[[str], object] = lambda piece: None,
) -> list[Sample]:
    """Continue a prompt `num_samples` times, all in one batch; `on_text` hears the first sample as it is written.

    UserError if so many cannot be held.
    """
    _check_room(loaded, num_samples, len(prompt) + sampling.max_new_tokens)
    samples = [Sample(loaded.tokenizer, stops) for _ in range(num_samples)]
    limit = loaded.token_limit
    if loaded.tokenizer is not None and loaded.tokenizer.eot is not None:
        sampling = replace(sampling, stop_ids=sampling.stop_ids | {loaded.tokenizer.eot})
    for ids in generate(loaded.model, prompt, num_samples, sampling, token_limit=limit, dtype=dtype):
        for number, (sample, token) in enumerate(zip(samples, ids, strict=True)):
            if sample.done:
                continue
            if token is None:
                piece = sample.finish("end of text")
            elif 0 <= token < limit:
                piece = sample.add(token)
            else:
                where = (
                    f"The device {loaded.model.wte.weight.device} returned token id {token}, outside 0 to {limit - 1}"
                )
                fault = "a fault of this backend or its driver, not of the model"
                raise NanogptError(f"{where}: {fault}. Try --device cpu, or another torch version.")
            if number == 0 and piece:
                on_text(piece)
        if all(sample.done for sample in samples):
            break
    for number, sample in enumerate(samples):
        piece = sample.finish("length")
        if number == 0 and piece:
            on_text(piece)
    return samples


def _check_room(loaded: LoadedModel, num_samples: int, length: int) -> None:
    c, there = loaded.model.config, memory_of(loaded.model.wte.weight.device)
    # keys and values, at least 16 bits each
    needed = num_samples * min(length, c.block_size) * c.n_layer * c.kv_heads * c.head_width * 2 * 2
    if there is not None and needed > there:
        raise UserError(
            f"--num-samples {num_samples}: the keys and values of so many take {needed / 2**30:,.1f} GiB, "
            f"{there / 2**30:,.1f} GiB are there. Draw fewer at a time, with other seeds."
        )
