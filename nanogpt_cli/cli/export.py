"""`nanogpt export`: a model as a folder for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Checkpoint, Model, flag, load, unwritable_named
from nanogpt_cli.cli.progress import ProgressBar


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    checkpoint: Checkpoint = "best",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        flag("float32|bfloat16|float16", "Number format of the stored weights."),
    ] = "float32",
) -> None:
    """Write a Hugging Face folder, GPT-2, Llama or Qwen3, verified before success is told.

    An architecture that is none of them gets a safetensors folder with our own description.
    """
    import torch

    from nanogpt_cli.weights import export as exporting

    loaded = load(model, checkpoint)
    with unwritable_named(folder, "Name another folder."), ProgressBar() as progress:
        done = exporting.export(loaded, folder, getattr(torch, dtype), progress)
    for note in done.notes:
        show.say(note)
    show.say("read back and compared: every number is the same")
    size = f"{done.tensors} tensors, {done.parameters:,} parameters, {done.bytes / 1e6:,.1f} MB"
    show.stream(f"{done.folder}: {size}, {dtype}\n")
