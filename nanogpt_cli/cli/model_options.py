"""What eval, sample and export have in common: which model, and where it is computed with."""

from typing import TYPE_CHECKING, Annotated

import typer

from nanogpt_cli.cli import complete, show
from nanogpt_cli.cli.options import flag

if TYPE_CHECKING:
    from nanogpt_cli.machine.device import Compute
    from nanogpt_cli.weights.load import LoadedModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, a checkpoint file, a nanoGPT out_dir, a Hugging Face folder, or gpt2, gpt2-medium...",
        autocompletion=complete.runs,
    ),
]
Checkpoint = Annotated[str, flag("best|last|FILE", "Which weights of a run.")]
Device = Annotated[str, flag("auto|cpu|cuda|mps", "Where to compute.")]
Dtype = Annotated[str, flag("float32|bfloat16|float16|auto", "Number format of matrix products.")]


def load(model: str, checkpoint: str) -> "LoadedModel":
    """The model, after saying what it is."""
    from nanogpt_cli.weights.load import load_model

    loaded = load_model(model, checkpoint)
    show.say(f"model: {loaded.source}")
    show.notes(loaded.notes)
    return loaded


def place(loaded: "LoadedModel", device: str, dtype: str) -> "Compute":
    """Move a model to where it is computed with, and say so."""
    import torch

    from nanogpt_cli.config.schema import SystemSettings
    from nanogpt_cli.machine.device import choose_compute

    system = SystemSettings(device=device, dtype=dtype, compile="off")  # type: ignore[arg-type]
    compute = choose_compute(system, loaded.model.config, long_run=False)
    compute.prepare()
    if compute.dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")  # TF32 would not be what was asked for
    loaded.model.to(compute.device)
    show.say(f"device: {compute.describe()}, {compute.dtype_name}")
    return compute
