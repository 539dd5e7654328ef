"""From named tensors to a model: whatever is missing, extra or of another shape is named before anything is built."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.gpt import GPT

Shape = tuple[int, ...]
SHOWN = 6  # names a message lists of each kind


def parameter_shapes(settings: ModelSettings) -> dict[str, Shape]:
    """Name and shape of every parameter of the model these settings describe; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(settings).named_parameters()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Name and shape of every tensor."""
    return {name: tuple(t.shape) for name, t in tensors.items()}


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> None:
    """Compare what a file holds with what the model needs; UserError names what is missing, unexpected or misshapen."""
    problems = []
    for text, names in (
        ("missing", [n for n in expected if n not in found]),
        ("unexpected", [n for n in found if n not in expected]),
        (
            "of another shape",
            [f"{n} {found[n]}, needed {s}" for n, s in expected.items() if n in found and found[n] != s],
        ),
    ):
        if names:
            more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            problems.append(f"{text}: {', '.join(names[:SHOWN])}{more}")
    if problems:
        raise UserError(f"{source}: the tensors do not fit the model it describes. " + "; ".join(problems) + ".")


def build_model(settings: ModelSettings, tensors: Mapping[str, Tensor], source: str) -> GPT:
    """The model of these settings with these weights (float32, on the CPU), in evaluation mode; nothing is drawn.

    Raises:
        UserError: the tensors are not exactly the model's parameters.
    """
    check_shapes(shapes_of(tensors), parameter_shapes(settings), source)
    with torch.device("meta"):
        model = GPT(settings)
    model.load_state_dict({n: t.float() for n, t in tensors.items()}, assign=True)
    return model.eval()


def crop_block_size(
    settings: ModelSettings, tensors: Mapping[str, Tensor], block_size: int, source: str
) -> tuple[ModelSettings, dict[str, Tensor]]:
    """A shorter context: the first `block_size` rows of the position table; UserError if there are not so many."""
    if block_size > settings.block_size:
        raise UserError(
            f"block_size = {block_size} is longer than the {settings.block_size} positions that {source} knows. "
            f"Set --block-size {settings.block_size} or less."
        )
    cropped = {n: t[:block_size].clone() if n == "wpe.weight" else t for n, t in tensors.items()}
    return replace(settings, block_size=block_size), cropped
