"""GPT-2 as Hugging Face keeps it: a folder with config.json and model.safetensors, read without their library.

Differences to our own naming: an optional prefix `transformer.`, mask buffers to skip, and the four matrices of a block
stored (in, out), the transpose of ours.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import check_shapes, parameter_shapes, shapes_of
from nanogpt_cli.weights.pretrained import CONFIG, WEIGHTS, needs_extra

PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
HEAD = "lm_head.weight"
OURS = "nanogpt"  # key of our settings in a config.json that we wrote, and model_type of what is no GPT-2

ACTIVATIONS: dict[str, Literal["gelu_tanh", "gelu"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: missing, or no JSON object.
    """
    path = folder / CONFIG
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: no {CONFIG}, so this is no Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is needed, found {type(content).__name__}.")
    return content


def read_folder(folder: Path) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Settings and weights, by our names and in our orientation, of a model folder.

    Reads Hugging Face's GPT-2 and what `export` wrote for other architectures.

    Raises:
        UserError: no GPT-2, a variant that computes something else, or tensors that do not fit; names them.
    """
    config = read_config(folder)
    if config.get("model_type") == OURS:
        settings = _own_settings(config, folder)
        tensors = dict(_stored(folder))
        check_shapes(shapes_of(tensors), parameter_shapes(settings), str(folder))
        return settings, tensors
    settings = gpt2_settings(config, folder / CONFIG)
    tensors = {name: t for name, t in _stored(folder) if name != HEAD or not settings.tie_weights}
    shapes = parameter_shapes(settings)
    expected = {name: shape[::-1] if name.endswith(TRANSPOSED) else shape for name, shape in shapes.items()}
    check_shapes(shapes_of(tensors), expected, str(folder))
    if OURS in config and not _own_settings(config, folder).bias:
        settings, tensors = _without_zero_biases(settings, tensors)
    return settings, {name: to_stored(name, t) for name, t in tensors.items()}


def _without_zero_biases(
    settings: ModelSettings, tensors: dict[str, Tensor]
) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Undo what export does for bias=False: every reader of GPT-2 expects biases, so zeros were written."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(".bias")}
    if any(bool(tensors[name].any()) for name in tensors.keys() - kept.keys()):
        return settings, tensors  # trained elsewhere since
    return replace(settings, bias=False), kept


def gpt2_settings(config: dict[str, Any], path: Path) -> ModelSettings:
    """Our settings for a GPT-2 config.json.

    Raises:
        UserError: another model type, or a switch that our model does not have; names key, value and what is read.
    """
    if config.get("model_type") != "gpt2":
        raise UserError(f"{path}: model_type is {config.get('model_type')!r}; gpt2 is what can be read.")
    width = config.get("n_embd")
    fixed: dict[str, tuple[Any, ...]] = {
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * width if isinstance(width, int) else None),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "activation_function": tuple(ACTIVATIONS),
    }
    for key, allowed in fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {config[key]!r}; readable is {' or '.join(map(repr, allowed))}.")
    try:
        return ModelSettings(
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            block_size=config["n_positions"] if "n_positions" in config else config["n_ctx"],
            vocab_size=config["vocab_size"],
            activation=ACTIVATIONS[config.get("activation_function", "gelu_new")],
            tie_weights=config.get("tie_word_embeddings", True),
        )
    except KeyError as error:
        raise UserError(f"{path}: {error} is missing.") from None
    except UserError as error:
        raise UserError(f"{path}: not the description of a GPT-2: {error}") from None


def _own_settings(config: dict[str, Any], folder: Path) -> ModelSettings:
    try:
        return ModelSettings(**config[OURS])
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{folder / CONFIG}: the table {OURS!r} is damaged: {error}") from None


def to_stored(name: str, tensor: Tensor) -> Tensor:
    """A parameter in Hugging Face's orientation, or back in ours."""
    return tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names without prefix, and tensors as they lie in the file or its shards; mask buffers left out."""
    for path in weight_files(folder):
        for name, tensor in read_safetensors(path):
            name = name.removeprefix(PREFIX)
            if not name.endswith(MASKS):
                yield name, tensor


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists.

    Raises:
        UserError: neither is there; a pickle (pytorch_model.bin) is never read.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not index.exists():
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        hint = f" {pickled[0]} is a pickle, which can run foreign code and is never read: save it again as safetensors."
        raise UserError(f"{folder}: no {WEIGHTS}.{hint if pickled else ''}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [folder / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of shards: {error!r}") from None


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file by name.

    Raises:
        UserError: missing, damaged, or the package safetensors (extra `hf`) is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise needs_extra("safetensors", f"Reading {path}") from None
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None
