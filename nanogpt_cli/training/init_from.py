"""What `init_from` brings: the architecture and the weights that a new run starts with."""

import dataclasses

import torch

from nanogpt_cli.config.layers import Layered
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import crop_block_size
from nanogpt_cli.weights.load import check_reads, load_model


def initial_weights(layered: Layered, data_set: DataSet) -> tuple[ModelSettings, dict[str, torch.Tensor]]:
    """The architecture of `init_from`, and its weights.

    The context may be cropped and dropout chosen. Architecture settings of a layer below the one that names init_from
    (a preset's below a flag) yield to the weights; any other that differs is refused, and so is data of another
    tokenizer.
    """
    config, origins = layered.config, layered.origins
    assert config.train.init_from is not None
    loaded = load_model(config.train.init_from, device="cpu")
    check_reads(loaded, data_set)
    theirs, weights = loaded.model.config, loaded.model.state_dict()
    ours = config.model
    meant = [f.name for f in dataclasses.fields(ours) if _height(origins, f.name) >= _height(origins, "init_from")]
    clashes = [
        f"{name} = {getattr(ours, name)} (the weights have {getattr(theirs, name)})"
        for name in meant
        if name not in ("dropout", "block_size") and getattr(ours, name) != getattr(theirs, name)
    ]
    if clashes:
        raise UserError(
            f"init_from {config.train.init_from} fixes the architecture; these settings contradict it: "
            f"{'; '.join(clashes)}. Leave them out."
        )
    if "block_size" in meant or ("block_size" in origins and ours.block_size < theirs.block_size):
        theirs, weights = crop_block_size(theirs, weights, ours.block_size, config.train.init_from)
    return dataclasses.replace(theirs, dropout=ours.dropout), weights


def _height(origins: dict[str, str], name: str) -> int:
    """The layer a setting comes from: 0 default, 1 preset, 2 config file, 3 flag."""
    origin = origins.get(name)
    return 0 if origin is None else 3 if origin == "flag" else 1 if origin.startswith("preset ") else 2
