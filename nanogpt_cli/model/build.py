"""From named tensors to a model: whatever is missing, extra or of another shape is named before anything is built."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.gpt import GPT

SHOWN = 6  # names a message lists of each kind


def meta_parameters(settings: ModelSettings) -> dict[str, Tensor]:
    """Every parameter of the model these settings describe, on the meta device: shapes, and nothing allocated."""
    with torch.device("meta"):
        return dict(GPT(settings).named_parameters())


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str) -> None:
    """Compare what a file holds with what the model needs; UserError names what is missing, unexpected or misshapen."""
    shapes = {n: (tuple(found[n].shape), tuple(t.shape)) for n, t in expected.items() if n in found}
    kinds = {
        "missing": [n for n in expected if n not in found],
        "unexpected": [n for n in found if n not in expected],
        "of another shape": [
            f"{n} {there}, needed {needed}" for n, (there, needed) in shapes.items() if there != needed
        ],
    }
    problems = []
    for kind, names in kinds.items():
        if names:
            more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            problems.append(f"{kind}: {', '.join(names[:SHOWN])}{more}")
    if problems:
        raise UserError(f"{source}: the tensors do not fit the model it describes. " + "; ".join(problems) + ".")


def build_model(settings: ModelSettings, tensors: Mapping[str, Tensor], source: str) -> GPT:
    """The model of these settings with exactly these weights (float32, on the CPU), in evaluation mode."""
    check_tensors(tensors, meta_parameters(settings), source)
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
