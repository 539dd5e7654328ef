"""`nanogpt export`: a model as a folder for other programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Checkpoint, Json, Model, flag, load, unwritable_named
from nanogpt_cli.cli.progress import ProgressBar
from nanogpt_cli.errors import UserError


def export(
    model: Model,
    to: Annotated[Path, typer.Argument(metavar="DIR | FILE.gguf", help="A new folder, or a new file for llama.cpp.")],
    checkpoint: Checkpoint = "best",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        flag("float32|bfloat16|float16", "Number format of a folder's weights [default: float32].", show_default=False),
    ] = None,
    type: Annotated[
        Literal["f32", "f16", "q8_0"] | None,
        flag("f32|f16|q8_0", "Number format of a GGUF file's matrices [default: f16].", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Write a Hugging Face folder, GPT-2, Llama or Qwen3, or a GGUF file, verified before success is told.

    An architecture that is none of them gets a safetensors folder with our own description.
    """
    import torch

    from nanogpt_cli.weights import export as exporting

    gguf = to.suffix == ".gguf"
    if (dtype if gguf else type) is not None:
        raise UserError("--dtype belongs to a folder, --type f32, f16 or q8_0 to a FILE.gguf.")
    loaded = load(model, checkpoint)
    with unwritable_named(to, "Name another place."), ProgressBar() as progress:
        if gguf:
            done = exporting.export_file(loaded, to, type or "f16", progress)
        else:
            done = exporting.export(loaded, to, getattr(torch, dtype or "float32"), progress)
    for note in done.notes:
        show.say(note)
    show.say("read back and compared: every number is the same")
    stored = (type or "f16") if gguf else (dtype or "float32")
    if json:
        told = {key: value for key, value in asdict(done).items() if key != "path"}
        show.document({"path": str(done.path), "model": loaded.source, "step": loaded.step, "dtype": stored, **told})
        return
    size = f"{done.tensors} tensors, {done.parameters:,} parameters, {done.bytes / 1e6:,.1f} MB"
    show.stream(f"{done.path}: {size}, {stored}\n")
