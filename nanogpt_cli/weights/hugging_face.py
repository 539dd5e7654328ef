"""Models as Hugging Face keeps them, for GPT-2, Llama and Qwen3: a folder with config.json and safetensors.

Read and written without their library. What differs from our naming stands in layouts.toml: names, matrices that we
keep one above the other, and matrices stored (in, out).
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.config.schema import settings as all_settings
from nanogpt_cli.errors import UserError, package
from nanogpt_cli.foreign import count, field, read_json
from nanogpt_cli.model.build import check_tensors, meta_parameters
from nanogpt_cli.model.gpt import matrix_heights
from nanogpt_cli.weights.pretrained import CONFIG, weight_files

HEAD = "lm_head.weight"
OURS = "nanogpt"  # key of our settings in a config.json that we wrote, and model_type of what is no other's
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # masks and angles that old files carry

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text("utf-8"))
ACTIVATIONS: dict[str, str] = _TABLES["activations"]
DERIVED = {"n_kv_head": "kv_heads", "head_dim": "head_width", "n_inner": "inner_width", "norm_eps": "eps"}


@dataclass(frozen=True)
class Layout:
    """Where a model type keeps our parameters; layouts.toml explains the fields."""

    family: str
    architecture: str
    prefix: str
    blocks: str
    names: Mapping[str, Sequence[str]]
    transposed: Sequence[str]
    sizes: Mapping[str, str]
    eps: str
    fixed: Mapping[str, Sequence[Any]]
    ours: Mapping[str, Sequence[Any]]

    def oriented(self, name: str, tensor: Tensor) -> Tensor:
        """Our parameter `name` in their orientation, or theirs in ours."""
        return tensor.t().contiguous() if name.endswith(tuple(self.transposed)) else tensor

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
    kind: Layout(**{**table, **{part: _TABLES[part][table["names"]] for part in ("names", "sizes")}})
    for kind, table in _TABLES["layouts"].items()
}


def plain(settings: ModelSettings) -> ModelSettings:
    """The same architecture with every size unset that follows from the others."""
    none: dict[str, Any] = dict.fromkeys(DERIVED)
    unset = replace(settings, **none)
    same = {n: none[n] for n, value in DERIVED.items() if getattr(settings, value) == getattr(unset, value)}
    return replace(settings, **same)


def leaves_as(settings: ModelSettings) -> tuple[str, list[str]]:
    """The model type that other programs know this architecture as, or "" and what stands in the way.

    An obstacle is a setting, as `name = value`, with the flag that makes a new run fit the nearest type.
    """
    s, wrong = plain(settings), {}
    for kind in ("gpt2", "qwen3" if s.qk_norm else "llama"):
        needed = {name: allowed[0] for name, allowed in LAYOUTS[kind].ours.items() if getattr(s, name) not in allowed}
        if kind == "gpt2":
            needed |= {name: None for name in ("n_kv_head", "head_dim") if getattr(s, name) is not None}
        else:
            needed |= {} if s.rope_theta else {"rope_theta": 10000}
            needed |= {"n_head": "N, a divisor of n_embd"} if s.n_embd % s.n_head else {}  # Transformers asks for it
        if not needed:
            return kind, []
        wrong[kind] = [f"{name} = {getattr(s, name)} ({_flag(name, value)})" for name, value in needed.items()]
    return "", min(wrong.values(), key=len)


def _flag(name: str, value: Any) -> str:
    flag = all_settings()[name].flag
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {'none' if value is None else value}"


def config_of(settings: ModelSettings, kind: str) -> dict[str, Any]:
    """What config.json says of an architecture of this model type, for Transformers 4 and 5."""
    layout, s = LAYOUTS[kind], asdict(settings)
    sizes = s | {name: getattr(settings, value) for name, value in DERIVED.items()}
    found = {
        "model_type": kind,
        "architectures": [layout.architecture],
        "tie_word_embeddings": settings.tie_weights,
        layout.eps: settings.eps,
        **{theirs: sizes[ours] for ours, theirs in layout.sizes.items()},
        **{key: allowed[0] for key, allowed in layout.fixed.items()},
    }
    if kind == "gpt2":
        found |= {
            "n_ctx": settings.block_size,  # llama.cpp's converter asks for it
            "activation_function": "gelu" if settings.activation == "gelu" else "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            OURS: s,
        }
    else:
        theta = {"rope_theta": settings.rope_theta}  # Transformers 4; 5 reads the table
        found |= {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    return found


def settings_of(config: dict[str, Any], path: Path) -> ModelSettings:
    """Our settings for the config.json of a GPT-2, Llama or Qwen3; UserError names what our model does not have."""
    kind = config.get("model_type")
    if kind not in LAYOUTS:
        raise UserError(f"{path}: model_type is {kind!r}; {', '.join(LAYOUTS)} can be read.")
    layout = LAYOUTS[kind]
    for key, allowed in layout.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {config[key]!r}; readable is {' or '.join(map(repr, allowed))}.")
    found: dict[str, Any] = {name: allowed[0] for name, allowed in layout.ours.items()}
    if kind == "gpt2":
        found["activation"] = ACTIVATIONS[config.get("activation_function", "gelu_new")]
        config = {"n_positions": config.get("n_ctx"), **config}
    else:
        found["rope_theta"] = _rope_theta(config, path)
        config = ({"head_dim": 128} if kind == "qwen3" else {}) | config  # as their class has it
    for ours, theirs in layout.sizes.items():
        if ours not in DERIVED or config.get(theirs) is not None:
            found[ours] = count(config, theirs, path)
    found |= {"norm_eps": config.get(layout.eps), "tie_weights": config.get("tie_word_embeddings", kind == "gpt2")}
    try:
        settings = ModelSettings(**found)
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

    Every tensor of the files is used, or named in the notes; UserError names another model, or what does not fit.
    """
    path = folder / CONFIG
    config = read_json(path)
    stored = dict(pair for file in weight_files(folder) for pair in read_safetensors(file))
    if config.get("model_type") == OURS:
        settings = _own_settings(config, path)
        check_tensors(stored, meta_parameters(settings), str(folder))
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
    names = meta_parameters(settings)
    check_tensors(stored, layout.to_theirs(settings, names), str(folder))
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


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file by name; UserError if it is missing or damaged, or the extra `hf` is."""
    safetensors = package("safetensors", f"Reading {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None
