"""`nanogpt sample`: text from a model."""

import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.model_options import Checkpoint, Device, Dtype, Model, place
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    import torch

    from nanogpt_cli.model.generate import Sampling
    from nanogpt_cli.training.loading import LoadedModel
    from nanogpt_cli.training.sampling import Sample

RULE = "-" * 40
STDIN = "-"
MAX_NEW_TOKENS, TEMPERATURE, TOP_K, SEED = 500, 0.8, 200, 1337
LARGEST_SEED = 2**63 - 1


def sample(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to continue; may be repeated, - reads stdin.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A UTF-8 file to continue; - reads stdin.")
    ] = None,
    num_samples: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each prompt.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Length of a sample at most.")
    ] = MAX_NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0, help="0 always takes the most likely token.")
    ] = TEMPERATURE,
    top_k: Annotated[str, typer.Option(metavar="N|none", help="Draw from the N most likely tokens only.")] = str(TOP_K),
    top_p: Annotated[
        str, typer.Option(metavar="P|none", help="Draw from the most likely tokens that add up to P.")
    ] = "none",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=LARGEST_SEED, help="Sample i depends on seed and i alone.")
    ] = SEED,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End a sample before this text; may be repeated.")
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Write text with a model. Text goes to stdout, everything else to stderr."""
    sampling = _sampling(max_new_tokens, temperature, top_k, top_p, seed)
    stops = tuple(stop or ())
    if "" in stops:
        raise UserError("--stop '': an empty text would end every sample at once.")
    prompts = [_text(text) for text in prompt or ()] + [_read(path) for path in prompt_file or ()]
    from nanogpt_cli.training import out_of_memory
    from nanogpt_cli.training.loading import load_model

    loaded = load_model(model, checkpoint)
    encoded = _encode(loaded, prompts)
    compute = place(loaded, device, dtype)
    found = []
    for number, (text, ids) in enumerate(encoded):
        if number and not json:
            print(f"\n{RULE}")
        with out_of_memory.named("All samples of a prompt are drawn together: a smaller --num-samples needs less."):
            samples = _write(loaded, text, ids, num_samples, sampling, stops, show_text=not json, dtype=compute.dtype)
        for i, one in enumerate(samples):
            found.append({"prompt": text, "sample": i, "text": one.text, "tokens": one.tokens, "ended": one.ended})
    if json:
        settings = {key: value for key, value in asdict(sampling).items() if key != "stop_ids"}
        show.document({"model": loaded.source, "step": loaded.step, **settings, "samples": found})


def _sampling(max_new_tokens: int, temperature: float, top_k: str, top_p: str, seed: int) -> "Sampling":
    from nanogpt_cli.model.generate import Sampling

    if not math.isfinite(temperature):
        raise UserError(f"--temperature {temperature}: a number of at least 0.")
    k = _number("--top-k", top_k, int, "a whole number of at least 1, or none")
    p = _number("--top-p", top_p, float, "a number above 0 and at most 1, or none")
    if p is not None and p > 1:
        raise UserError(f"--top-p {top_p}: a number above 0 and at most 1, or none.")
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=None if k is None else int(k),
        top_p=p,
        seed=seed,
        stop_ids=frozenset(),
    )


def _number(flag: str, text: str, kind: type[int] | type[float], needed: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise UserError(f"{flag} {text}: {needed}.")
    return value


def _text(text: str) -> str:
    if text == STDIN:
        return _decode(sys.stdin.buffer.read(), "stdin")
    if any(
        "\udc80" <= character <= "\udcff" for character in text
    ):  # bytes that the console's encoding has no words for
        return _decode(os.fsencode(text), "--prompt")
    return text


def _read(path: Path) -> str:
    if str(path) == STDIN:
        return _text(STDIN)
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
    from nanogpt_cli.training.sampling import prompt_ids, start_of_text

    start, words = start_of_text(loaded.tokenizer)
    encoded = [(text, prompt_ids(text, loaded.tokenizer, loaded.token_limit) or start) for text in prompts] or [
        ("", start)
    ]
    if any(not text for text, _ in encoded):
        show.say(f"no prompt: starting from {words}")
    room = loaded.model.config.block_size
    for _, ids in encoded:
        if len(ids) > room:
            show.warn(f"a prompt has {len(ids):,} tokens; the model reads the last {room:,} of them")
    return encoded


def _write(
    loaded: "LoadedModel",
    text: str,
    ids: list[int],
    num_samples: int,
    sampling: "Sampling",
    stops: tuple[str, ...],
    *,
    show_text: bool = True,
    dtype: "torch.dtype | None" = None,
) -> "list[Sample]":
    """Stream the first sample, then print the others under a rule."""
    from nanogpt_cli.training.sampling import write_samples

    def stream(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    if show_text:
        stream(text)
    samples = write_samples(
        loaded, ids, num_samples, sampling, stops=stops, dtype=dtype, on_text=stream if show_text else lambda _: None
    )
    if show_text:
        print()
        for one in samples[1:]:
            print(f"{RULE}\n{text}{one.text}")
        sys.stdout.flush()
    return samples
