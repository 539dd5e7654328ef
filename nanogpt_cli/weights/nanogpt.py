"""nanoGPT's ckpt.pt: weights, AdamW moments and settings, translated into our names.

Its model has the exact GELU and a tied head. Its keys carry `transformer.`, and before that `_orig_mod.` or `module.`
when they come from a compiled or a DDP model.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, InstanceOf, ValidationError
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.foreign import brief
from nanogpt_cli.model.build import check_tensors, meta_parameters
from nanogpt_cli.runs.checkpoint import Count

WRAPPERS = ("module.", "_orig_mod.")
PREFIX = "transformer."
HEAD = "lm_head.weight"  # the same tensor as the token table
MASK = ".attn.bias"
Moments = dict[str, dict[str, Tensor]]


class Moment(BaseModel):  # of AdamW, of one parameter
    step: InstanceOf[Tensor]
    exp_avg: InstanceOf[Tensor]
    exp_avg_sq: InstanceOf[Tensor]


class OptimizerState(BaseModel):
    state: dict[int, Moment] = {}


class Content(BaseModel):
    """What nanoGPT saves, as far as it is read."""

    model: dict[str, InstanceOf[Tensor]]
    model_args: dict[str, Any]
    optimizer: OptimizerState | None = None
    iter_num: Count = 0
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class NanoGPTCheckpoint:
    """What a nanoGPT checkpoint holds."""

    settings: ModelSettings
    tensors: dict[str, Tensor]
    adamw: Moments | None  # by our parameter names: exp_avg, exp_avg_sq, step; None if the file has no moments
    step: int  # completed updates
    dataset: str | None
    tables: dict[str, dict[str, Any]]  # its training settings, as a layer for our configuration


def from_nanogpt(content: dict[str, Any], source: str) -> NanoGPTCheckpoint:
    """Translate the dict that nanoGPT saved; UserError names missing parts, wrong types and tensors that do not fit."""
    try:
        found = Content.model_validate(content)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{source}: its {brief(place)} is not what nanoGPT writes there.") from None
    settings = _settings(found.model_args, source)
    named = {_our_name(name): tensor for name, tensor in found.model.items()}
    tensors = {name: tensor for name, tensor in named.items() if name != HEAD and not name.endswith(MASK)}
    check_tensors(tensors, meta_parameters(settings), source)
    config = found.config or {}
    return NanoGPTCheckpoint(
        settings=settings,
        tensors=tensors,
        adamw=_moments(found.optimizer.state, tensors, source) if found.optimizer and found.optimizer.state else None,
        step=found.iter_num,
        dataset=config.get("dataset"),
        tables=training_tables(config),
    )


def _settings(args: dict[str, Any], source: str) -> ModelSettings:
    try:
        return ModelSettings(
            n_layer=args["n_layer"],
            n_head=args["n_head"],
            n_embd=args["n_embd"],
            block_size=args["block_size"],
            vocab_size=args["vocab_size"],
            bias=args.get("bias", True),  # checkpoints from before the switch have biases
            dropout=float(args.get("dropout", 0.0)),
            activation="gelu",
        )
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{source}: model_args do not describe a nanoGPT model: {error}") from None


def _our_name(name: str) -> str:
    while name.startswith(WRAPPERS):  # compiled and wrapped in DDP: either may be outermost
        name = name.split(".", 1)[1]
    return name.removeprefix(PREFIX)


def _moments(numbered: dict[int, Moment], tensors: dict[str, Tensor], source: str) -> Moments:
    """AdamW's state by parameter name; torch numbers it by group: first all matrices, then all vectors."""
    order = [n for n, t in tensors.items() if t.dim() >= 2] + [n for n, t in tensors.items() if t.dim() < 2]
    fits = list(numbered) == list(range(len(order))) and all(
        numbered[i].exp_avg.shape == numbered[i].exp_avg_sq.shape == tensors[name].shape and numbered[i].step.ndim == 0
        for i, name in enumerate(order)
    )
    if not fits:
        raise UserError(
            f"{source}: the optimizer state does not belong to these weights (another order of parameters?). "
            f"To start a new run from the weights alone: nanogpt train --init-from {typed(source)}"
        )
    return {name: vars(numbered[i]) for i, name in enumerate(order)}


def training_tables(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """nanoGPT's training settings under our sections; what has no meaning here is left out.

    Its accumulation counts over all ranks, as ours does. It makes one update more than max_iters says.
    """
    kept = {
        "data": "dataset",
        "optim": "learning_rate min_lr warmup_iters lr_decay_iters weight_decay beta1 beta2 grad_clip",
        "train": "batch_size gradient_accumulation_steps max_iters eval_interval eval_iters log_interval",
        "log": "wandb_project wandb_run_name",
    }
    tables = {section: {k: config[k] for k in keys.split() if k in config} for section, keys in kept.items()}
    tables["data"]["sampling"] = "random"
    if config.get("dtype") in ("float32", "bfloat16"):  # float16 was a GPU's; what is best here follows from the device
        tables["system"] = {"dtype": config["dtype"]}
    if config.get("decay_lr") is False:
        for key in ("min_lr", "warmup_iters", "lr_decay_iters"):
            tables["optim"].pop(key, None)
        tables["optim"]["schedule"] = "constant"
    return tables
