"""What a checkpoint of this program holds, key by key: who reads one that passed need not look again."""

import dataclasses
import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from nanogpt_cli.config.derived import Schedule
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import check_shapes, parameter_shapes, shapes_of


@dataclass
class Progress:
    """How far a run is. `step` counts completed updates, `rows` the rows they consumed."""

    step: int = 0
    rows: int = 0
    best_loss: float | None = None  # lowest validation loss, nats
    best_step: int | None = None
    evaluated_step: int = 0  # the last step that was evaluated
    window_sum: float = 0.0  # losses since the last log line
    window_count: int = 0
    skipped: int = 0  # float16 updates that overflowed
    time_s: float = 0.0  # training time


@dataclass
class Scaler:
    """State of torch's GradScaler."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass
class SplitPrint:
    """What tells one split of a data set from another."""

    tokens: int
    dtype: str
    digest: str
    sha256: str = ""


@dataclass
class DataPrint:
    """The same of a data set."""

    name: str
    folder: str
    train: SplitPrint
    val: SplitPrint


@dataclass
class Nothing:
    """An empty table."""


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "muon": ("momentum_buffer",)}
Table = dict[str, Any]
WEIGHTS: dict[str, Any] = {  # best.pt
    "format": int,
    "model": dict[str, Tensor],
    "step": int,
    "config": dict[str, Table],
    "architecture": ModelSettings,
    "tokenizer": Table | None,
    "data": DataPrint | Nothing,
}
TRAINING: dict[str, Any] = {  # ckpt.pt
    **WEIGHTS,
    "optimizer": dict[str, dict[str, dict[str, Tensor]]],
    "scaler": Scaler | Nothing,
    "rows": int,
    "progress": Progress,
    "schedule": Schedule,
    "eval_windows": int,
    "layout": dict[str, int | str | bool],
}


def check_form(content: dict[str, Any], form: dict[str, Any], source: str) -> None:
    """Compare the content of a file with WEIGHTS or TRAINING, and its tensors with the architecture it names.

    Raises:
        UserError: names what is not as it should be.
    """
    for key, kind in form.items():
        if not fits(content[key], kind):
            raise _damaged(source, key)
    architecture, weights = ModelSettings(**content["architecture"]), content["model"]
    blocks = {name.split(".")[1] for name in weights if name.startswith("h.")}
    if architecture.vocab_size is None or len(blocks) != architecture.n_layer:
        raise _damaged(source, "architecture")
    check_shapes(shapes_of(weights), parameter_shapes(architecture), source)
    if form is not TRAINING:
        return
    for part, states in content["optimizer"].items():
        for name, moments in states.items():
            shape = weights[name].shape if name in weights else None
            shapes = {key: () if key == "step" else shape for key in MOMENTS.get(part, ())}
            if {key: moment.shape for key, moment in moments.items()} != shapes:
                raise _damaged(source, f"optimizer state of {name}")
    for key, fine in (
        ("schedule", content["schedule"]["learning_rate"] > 0),
        ("eval_windows", content["eval_windows"] > 0),
        ("layout", all(type(content["layout"].get(key, 1)) is int for key in ("ranks", "threads"))),
    ):
        if not fine:
            raise _damaged(source, key)


def _damaged(source: str, key: str) -> UserError:
    return UserError(f"{source}: damaged, or not written by this program: its {key} is not what it should be.")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from a file is of a type; whole numbers are counts, and numbers are finite."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        return (
            isinstance(value, dict)
            and needed <= value.keys() <= hints.keys()
            and all(fits(item, hints[name]) for name, item in value.items())
        )
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return kind is Any or (value is None if kind is NoneType else isinstance(value, kind))
