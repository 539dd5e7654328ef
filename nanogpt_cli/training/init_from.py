"""What `init_from` brings: the architecture and the weights that a new run starts with."""

import dataclasses

from torch import Tensor

from nanogpt_cli.config.layers import Layered
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import crop_block_size
from nanogpt_cli.weights.load import LoadedModel, check_reads, load_model

NAMES = [field.name for field in dataclasses.fields(ModelSettings)]


def initial_architecture(layered: Layered, data_set: DataSet) -> tuple[ModelSettings, LoadedModel]:
    """The architecture of a run that starts from `init_from`, and what that is.

    The context may be cropped and dropout chosen. Architecture settings of a layer below the one that names init_from
    (a preset's below a flag) yield to the weights; any other that differs is refused, and so is data of another
    tokenizer.
    """
    word, ours = layered.config.train.init_from, layered.config.model
    assert word is not None
    loaded = load_model(word)
    check_reads(loaded, data_set, word)
    theirs = loaded.model.config
    meant = [name for name in NAMES if not yields(layered, name)]
    clashes = [
        f"{name} = {getattr(ours, name)} (the weights have {getattr(theirs, name)})"
        for name in meant
        if name not in ("dropout", "block_size") and getattr(ours, name) != getattr(theirs, name)
    ]
    if clashes:
        raise UserError(
            f"init_from {word} fixes the architecture; these settings contradict it: {'; '.join(clashes)}. "
            "Leave them out."
        )
    if "block_size" in meant or ("block_size" in layered.origins and ours.block_size < theirs.block_size):
        theirs, _ = crop_block_size(theirs, {}, ours.block_size, word)
    return dataclasses.replace(theirs, dropout=ours.dropout), loaded


def yields(layered: Layered, name: str) -> bool:
    """Whether a setting of [model] gives way to the weights of init_from: it stands in a lower layer."""
    return name in NAMES and layered.rank(name) < layered.rank("init_from")


def initial_weights(config: Config) -> dict[str, Tensor]:
    """The weights of `init_from` for the architecture that the settings have now."""
    assert config.train.init_from is not None
    model = load_model(config.train.init_from).model
    _, weights = crop_block_size(model.config, model.state_dict(), config.model.block_size, config.train.init_from)
    return weights
