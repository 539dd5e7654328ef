"""`nanogpt export`: a model as a folder for other programs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Checkpoint, Model, flag, load, unwritable_named
from nanogpt_cli.cli.progress import ProgressBar

if TYPE_CHECKING:
    from nanogpt_cli.data.tokenizers import Tokenizer


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    checkpoint: Checkpoint = "best",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        flag("float32|bfloat16|float16", "Number format of the stored weights."),
    ] = "float32",
) -> None:
    """Write a Hugging Face GPT-2 folder, verified before success is told.

    An architecture that is no GPT-2 gets a safetensors folder with our own description.
    """
    import torch

    from nanogpt_cli.weights.export import export_model
    from nanogpt_cli.weights.hugging_face import leaves_as

    loaded = load(model, checkpoint)
    kind, _ = leaves_as(loaded.model.config)
    files, remark = _tokenizer_files(loaded.tokenizer, loaded.model.config.block_size, kind == "gpt2")
    with unwritable_named(folder, "Name another folder."):
        done = export_model(
            loaded.model,
            folder,
            tokenizer_size=None if loaded.tokenizer is None else loaded.token_limit,
            tokenizer_files=files,
            eot=None if loaded.tokenizer is None else loaded.tokenizer.eot,
            dtype=getattr(torch, dtype),
        )
    for note in [*done.notes, *([remark] if remark else [])]:
        show.say(note)
    show.say("read back and compared: every number is the same")
    show.result(
        f"{done.folder}: {done.tensors} tensors, {done.parameters:,} parameters, {done.bytes / 1e6:,.1f} MB, {dtype}"
    )


def _tokenizer_files(tokenizer: "Tokenizer | None", context: int, gpt2: bool) -> tuple[dict[str, bytes], str]:
    """Files that turn text into ids, by name, and what has to be said about them."""
    import tomli_w

    if tokenizer is None:
        return {}, "There is no tokenizer to go with the model: readers have to work with ids."
    own = {"tokenizer.toml": tomli_w.dumps(tokenizer.to_toml()).encode()}
    if not gpt2:
        return own, ""
    if tokenizer.kind != "gpt2":
        return own, (
            f"Other programs load the weights, but not the {tokenizer.kind} tokenizer, which has no format of Hugging "
            "Face's: tokenizer.toml describes it, and `nanogpt` reads it."
        )
    from nanogpt_cli.data.tokenizers import gpt2_files

    description: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "model_max_length": context,
    }
    config = json.dumps(description, indent=2) + "\n"
    return {**own, **gpt2_files(ProgressBar()), "tokenizer_config.json": config.encode()}, ""
