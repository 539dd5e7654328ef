"""Models as Hugging Face keeps them, for GPT-2, Llama and Qwen3: a folder with config.json and safetensors.

Read and written without their library. What differs from our naming stands in layouts.toml: names, matrices that we
keep one above the other, and matrices stored (in, out).
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import count, field, read_json
from nanogpt_cli.model.build import check_shapes, parameter_shapes, shapes_of
from nanogpt_cli.model.gpt import matrix_heights
from nanogpt_cli.weights.pretrained import CONFIG, WEIGHTS, needs_extra

HEAD = "lm_head.weight"
OURS = "nanogpt"  # key of our settings in a config.json that we wrote, and model_type of what is no other's
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # masks and angles that old files carry

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text("utf-8"))
ACTIVATIONS: dict[str, Literal["gelu_tanh", "gelu"]] = _TABLES["activations"]


@dataclass(frozen=True)
class Layout:
    """Where a model type keeps our parameters; layouts.toml explains the fields."""

    architecture: str
    prefix: str
    blocks: str
    names: Mapping[str, Sequence[str]]
    fixed: Mapping[str, Sequence[Any]]
    transposed: tuple[str, ...]

    def oriented(self, name: str, tensor: Tensor) -> Tensor:
        """Our parameter `name` in their orientation, or theirs in ours."""
        return tensor.t().contiguous() if name.endswith(self.transposed) else tensor

    def parts(self, name: str) -> tuple[str, ...]:
        """Their names for our parameter `name`."""
        module, _, kind = name.rpartition(".")
        start = self.prefix
        if name == HEAD:
            return (HEAD,)
        if module.startswith("h."):
            _, number, module = module.split(".", 2)
            start += f"{self.blocks}.{number}."
        return tuple(f"{start}{part}.{kind}" for part in self.names.get(module, (module,)))

    def to_theirs(self, settings: ModelSettings, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors under their names and in their orientation."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            tensor, parts = self.oriented(name, tensor), self.parts(name)
            pieces = tensor.split(matrix_heights(settings, name, 0)) if len(parts) > 1 else (tensor,)
            found |= dict(zip(parts, pieces, strict=True))
        return found

    def from_theirs(self, names: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors under `names` of ours and in our orientation."""
        found = {}
        for name in names:
            pieces = [stored[part] for part in self.parts(name)]
            found[name] = self.oriented(name, torch.cat(pieces) if len(pieces) > 1 else pieces[0])
        return found


LAYOUTS: dict[str, Layout] = {
    kind: Layout(**{**table, "names": _TABLES["names"][table["names"]], "transposed": tuple(table["transposed"])})
    for kind, table in _TABLES["layouts"].items()
}


def plain(settings: ModelSettings) -> ModelSettings:
    """The same architecture with every size unset that follows from the others."""
    derived = {"n_kv_head": "kv_heads", "head_dim": "head_width", "n_inner": "inner_width", "norm_eps": "eps"}
    none: dict[str, Any] = dict.fromkeys(derived)
    unset = replace(settings, **none)
    same = {n: none[n] for n, value in derived.items() if getattr(settings, value) == getattr(unset, value)}
    return replace(settings, **same)


def leaves_as(settings: ModelSettings) -> tuple[str, list[str]]:
    """The model type that other programs know this architecture as, or "" and what stands in the way.

    The obstacles are settings, as `name = value`, that the nearest type does not have.
    """
    s = plain(settings)
    gpt2 = {
        "position": s.position == "learned",
        "norm": s.norm == "layernorm",
        "activation": s.activation in ACTIVATIONS.values(),
        "qk_norm": not s.qk_norm,
        "n_kv_head": s.n_kv_head is None,
        "head_dim": s.head_dim is None,
    }
    llama = {
        "position": s.position == "rotary",
        "rope_theta": s.rope_theta is not None,
        "norm": s.norm == "rmsnorm",
        "activation": s.activation == "swiglu",
        "bias": not s.bias,
        "qk_gain": s.qk_gain == s.qk_norm,
        "n_head": s.n_embd % s.n_head == 0,  # Transformers asks for it
    }
    both = {"embed_norm": not s.embed_norm, "logit_softcap": s.logit_softcap == 0}
    wrong = [[name for name, fits in (tests | both).items() if not fits] for tests in (gpt2, llama)]
    if not wrong[0]:
        return "gpt2", []
    if not wrong[1]:
        return ("qwen3" if s.qk_norm else "llama"), []
    return "", [f"{name} = {getattr(s, name)}" for name in min(wrong, key=len)]


def config_of(settings: ModelSettings, kind: str) -> dict[str, Any]:
    """What config.json says of an architecture of this model type, for Transformers 4 and 5."""
    s = settings
    common = {
        "model_type": kind,
        "architectures": [LAYOUTS[kind].architecture],
        "vocab_size": s.vocab_size,
        "tie_word_embeddings": s.tie_weights,
    }
    if kind == "gpt2":
        return common | {
            "n_positions": s.block_size,
            "n_ctx": s.block_size,  # llama.cpp's converter asks for it
            "n_embd": s.n_embd,
            "n_layer": s.n_layer,
            "n_head": s.n_head,
            "n_inner": s.n_inner,
            "activation_function": "gelu" if s.activation == "gelu" else "gelu_new",
            "layer_norm_epsilon": s.eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            OURS: asdict(s),
        }
    return common | {
        "hidden_size": s.n_embd,
        "intermediate_size": s.inner_width,
        "num_hidden_layers": s.n_layer,
        "num_attention_heads": s.n_head,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_width,
        "max_position_embeddings": s.block_size,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "attention_bias": False,
        "rope_theta": s.rope_theta,  # Transformers 4; 5 reads the table
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
    }


def settings_of(config: dict[str, Any], path: Path) -> ModelSettings:
    """Our settings for the config.json of a GPT-2, Llama or Qwen3; UserError names what our model does not have."""
    kind = config.get("model_type")
    if kind not in LAYOUTS:
        raise UserError(f"{path}: model_type is {kind!r}; {', '.join(LAYOUTS)} can be read.")
    for key, allowed in LAYOUTS[kind].fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {config[key]!r}; readable is {' or '.join(map(repr, allowed))}.")

    def size(key: str) -> int:
        return count(config, key, path)

    def optional(key: str) -> int | None:
        return None if config.get(key) is None else size(key)

    found: dict[str, Any]
    if kind == "gpt2":
        found = {
            "n_layer": size("n_layer"),
            "n_head": size("n_head"),
            "n_embd": size("n_embd"),
            "n_inner": optional("n_inner"),
            "block_size": size("n_positions" if "n_positions" in config else "n_ctx"),
            "activation": ACTIVATIONS[config.get("activation_function", "gelu_new")],
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        }
    else:
        found = {
            "n_layer": size("num_hidden_layers"),
            "n_head": size("num_attention_heads"),
            "n_kv_head": optional("num_key_value_heads"),
            "head_dim": 128 if kind == "qwen3" and "head_dim" not in config else optional("head_dim"),
            "n_embd": size("hidden_size"),
            "n_inner": size("intermediate_size"),
            "block_size": size("max_position_embeddings"),
            "bias": False,
            "activation": "swiglu",
            "position": "rotary",
            "rope_theta": _rope_theta(config, path),
            "norm": "rmsnorm",
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "qk_norm": kind == "qwen3",
            "qk_gain": kind == "qwen3",
        }
    tied = config.get("tie_word_embeddings", kind == "gpt2")
    try:
        settings = ModelSettings(vocab_size=size("vocab_size"), tie_weights=tied, **found)
    except UserError as error:
        raise UserError(f"{path}: not the description of a {kind}: {error}") from None
    for _, problem in settings.contradictions():
        raise UserError(f"{path}: {problem}")
    return plain(settings)


def _rope_theta(config: dict[str, Any], path: Path) -> float:
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = set(config.get("layer_types") or ["full_attention"])
    if not isinstance(table, dict) or table.get("rope_type", table.get("type", "default")) != "default":
        raise UserError(f"{path}: rotary positions are scaled ({table}); only plain ones can be read.")
    if layers != {"full_attention"}:
        raise UserError(f"{path}: layer_types has {', '.join(map(str, layers))}; only full_attention can be read.")
    return field({"rope_theta": 10000.0, **config, **table}, "rope_theta", float, path, lambda theta: theta > 1)


class ModelFolder(NamedTuple):
    """What `read_folder` finds, by our names and in our orientation."""

    settings: ModelSettings
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]  # what was left out or differs from what config.json says


def read_folder(folder: Path) -> ModelFolder:
    """Settings and weights of a GPT-2, Llama or Qwen3, or of what `export` wrote for another architecture.

    Every tensor of the files is used, or named in the notes.

    Raises:
        UserError: another model, or tensors that do not fit; names them.
    """
    path = folder / CONFIG
    config = read_json(path)
    stored = dict(_stored(folder))
    if config.get("model_type") == OURS:
        settings = _own_settings(config, path)
        check_shapes(shapes_of(stored), parameter_shapes(settings), str(folder))
        return ModelFolder(settings, stored, ())
    settings, notes = settings_of(config, path), []
    layout = LAYOUTS[config["model_type"]]
    stored = {n if n == HEAD or n.startswith(layout.prefix) else layout.prefix + n: t for n, t in stored.items()}
    if left := [name for name in stored if name.endswith(NO_WEIGHTS)]:
        notes.append(f"left out, since they are no weights: {left[0]} and {len(left) - 1} more of the kind")
    stored = {name: t for name, t in stored.items() if name not in left}
    if settings.tie_weights and HEAD in stored:
        table = stored.get(layout.parts("wte.weight")[0])
        if table is not None and torch.equal(stored[HEAD], table):
            del stored[HEAD]
        else:
            notes.append(f"{CONFIG} says that the head is the token table, but {HEAD} differs: it is read as its own")
            settings = replace(settings, tie_weights=False)
    if settings.n_layer > len(stored):
        raise UserError(f"{path}: {settings.n_layer:,} layers, but there are {len(stored):,} tensors in all.")
    names = parameter_shapes(settings)
    meta = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    check_shapes(shapes_of(stored), shapes_of(layout.to_theirs(settings, meta)), str(folder))
    tensors = layout.from_theirs(names, stored)
    if OURS in config and not _own_settings(config, path).bias:
        settings, tensors = _without_zero_biases(settings, tensors)
    return ModelFolder(settings, tensors, tuple(notes))


def _without_zero_biases(
    settings: ModelSettings, tensors: dict[str, Tensor]
) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Undo what export does for bias=False: every reader of GPT-2 expects biases, so zeros were written."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(".bias")}
    if any(bool(tensors[name].any()) for name in tensors.keys() - kept.keys()):
        return settings, tensors  # trained elsewhere since
    return replace(settings, bias=False), kept


def _own_settings(config: dict[str, Any], path: Path) -> ModelSettings:
    try:
        return ModelSettings(**config[OURS])
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{path}: the table {OURS!r} is damaged: {error}") from None


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of model.safetensors or of the shards that its index lists, as they lie there.

    Raises:
        UserError: neither is there; a pickle (pytorch_model.bin) is never read.
    """
    index, files = folder / f"{WEIGHTS}.index.json", [folder / WEIGHTS]
    if index.exists() and not files[0].exists():
        names = field(read_json(index), "weight_map", dict, index).values()
        files = [folder / Path(str(name)).name for name in sorted(set(map(str, names)))]
    elif not files[0].exists():
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        hint = f" {pickled[0]} is a pickle, which can run foreign code and is never read: save it again as safetensors."
        raise UserError(f"{folder}: no {WEIGHTS}.{hint if pickled else ''}")
    for path in files:
        yield from read_safetensors(path)


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file by name; UserError if it is missing or damaged, or the extra `hf` is."""
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
