"""`nanogpt sample`: text from a model."""

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Checkpoint, Device, Dtype, Json, Model, flag, load, move_to_device
from nanogpt_cli.cli.prompt import read_prompts
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    from nanogpt_cli.model.generate import Sampling
    from nanogpt_cli.weights.load import LoadedModel

RULE = "-" * 40
STDIN = "-"

# kind, least, most, and that in words
NUMBERS: dict[str, tuple[type[int | float], float, float, str]] = {
    "max-new-tokens": (int, 1, math.inf, "a whole number of at least 1"),
    "temperature": (float, 0, sys.float_info.max, "a number of at least 0"),
    "top-k": (int, 1, math.inf, "a whole number of at least 1, or none"),
    "top-p": (float, sys.float_info.min, 1, "a number above 0 and at most 1, or none"),
    "seed": (int, 0, 2**63 - 1, "a whole number of at least 0 and below 2**63"),
}


def sample(
    model: Model,
    prompt: Annotated[list[str] | None, flag("TEXT", "What to continue; may be repeated, - reads stdin.")] = None,
    prompt_file: Annotated[list[Path] | None, flag("FILE", "A UTF-8 file to continue; - reads stdin.")] = None,
    num_samples: Annotated[int, flag("N", "Samples of each prompt.", min=1)] = 1,
    max_new_tokens: Annotated[str, flag("N", "Length of a sample at most.")] = "500",
    temperature: Annotated[str, flag("X", "0 always takes the most likely token.")] = "0.8",
    top_k: Annotated[str, flag("N|none", "Draw from the N most likely tokens only.")] = "200",
    top_p: Annotated[str, flag("P|none", "Draw from the most likely tokens that add up to P.")] = "none",
    seed: Annotated[str, flag("N", "Sample i depends on seed and i alone.")] = "1337",
    stop: Annotated[list[str] | None, flag("TEXT", "End a sample before this text; may be repeated.")] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    dtype: Dtype = "auto",
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Continue what is typed, line by line.")
    ] = False,
    json: Json = False,
) -> None:
    """Write text with a model. Text goes to stdout, everything else to stderr."""
    if interactive and (json or prompt or prompt_file):
        raise UserError("-i reads the prompts itself: leave --json, --prompt and --prompt-file out.")
    given = dict(zip(NUMBERS, (max_new_tokens, temperature, top_k, top_p, seed), strict=True))
    sampling = _sampling(given)
    stops = tuple(stop or ())
    if "" in stops:
        raise UserError("--stop '': an empty text would end every sample at once.")
    prompts = [_text(text) for text in prompt or ()] + [_read(path) for path in prompt_file or ()]
    from nanogpt_cli.inference.sample import write_samples
    from nanogpt_cli.machine.memory import explain_out_of_memory

    loaded = load(model, checkpoint)
    encoded = [] if interactive else _encode(loaded, prompts)
    compute = move_to_device(loaded, device, dtype)
    if interactive:

        def continue_line(line: str, typed: dict[str, str]) -> None:
            ((_, ids),) = _encode(loaded, [line])
            write_samples(loaded, ids, 1, _sampling(typed, "/"), stops=stops, dtype=compute.dtype, on_text=show.stream)
            show.stream("\n")

        read_prompts(given, lambda typed: _sampling(typed, "/"), continue_line)
        return
    write: Callable[[str], None] = (lambda _: None) if json else show.stream
    found = []
    for number, (text, ids) in enumerate(encoded):
        write(f"\n{RULE}\n{text}" if number else text)
        with explain_out_of_memory("All samples of a prompt are drawn together: a smaller --num-samples needs less."):
            samples = write_samples(loaded, ids, num_samples, sampling, stops=stops, dtype=compute.dtype, on_text=write)
        write("\n")
        for one in samples[1:]:  # the first one was written as it came
            write(f"{RULE}\n{text}{one.text}\n")
        for i, one in enumerate(samples):
            found.append({"prompt": text, "sample": i, "text": one.text, "tokens": one.tokens, "ended": one.ended})
    if json:
        settings = {key: value for key, value in asdict(sampling).items() if key != "stop_ids"}
        show.document({"model": loaded.source, "step": loaded.step, **settings, "samples": found})


def _sampling(typed: dict[str, str], sign: str = "--") -> "Sampling":
    """The numbers from texts, as they are typed as flags, or after -i behind `sign`."""
    from nanogpt_cli.model.generate import Sampling

    found: dict[str, Any] = {}
    for name, (kind, least, most, needed) in NUMBERS.items():
        text = typed[name]
        try:
            value = None if text.lower() == "none" and needed.endswith("none") else kind(text)
        except ValueError:
            value = math.nan
        if value is not None and not least <= value <= most:
            raise UserError(f"{sign}{name} {text}: {needed}.")
        found[name.replace("-", "_")] = value
    return Sampling(**found)


def _text(text: str) -> str:
    if text == STDIN:
        return _read(Path(STDIN))
    # surrogates: bytes that are no text in the console's encoding
    return _decode(os.fsencode(text), "--prompt") if re.search("[\udc80-\udcff]", text) else text


def _read(path: Path) -> str:
    if str(path) == STDIN:
        return _decode(sys.stdin.buffer.read(), "stdin")
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"--prompt-file {path}: {error.strerror}.") from None


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text (byte {error.start:,}). Convert it first.") from None


def _encode(loaded: "LoadedModel", prompts: list[str]) -> list[tuple[str, list[int]]]:
    """Each prompt with its ids; what stands for the lack of one."""
    from nanogpt_cli.inference.sample import prompt_ids, start_of_text

    start, words = start_of_text(loaded.tokenizer)
    encoded = [(text, prompt_ids(text, loaded.tokenizer, loaded.token_limit) or start) for text in prompts or [""]]
    if any(not text for text, _ in encoded):
        show.say(f"no prompt: starting from {words}")
    room = loaded.model.config.block_size
    for _, ids in encoded:
        if len(ids) > room:
            show.warn(f"a prompt has {len(ids):,} tokens; the model reads the last {room:,} of them")
    return encoded
