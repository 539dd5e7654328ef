"""nanoGPT's ckpt.pt: weights, AdamW moments and settings, translated into our names.

Its model has the exact GELU and a tied head. Its keys carry `transformer.`, and before that `_orig_mod.` or `module.`
when they come from a compiled or a DDP model.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.model.build import check_tensors, meta_parameters

WRAPPERS = ("module.", "_orig_mod.")
PREFIX = "transformer."
HEAD = "lm_head.weight"  # the same tensor as the token table
MASK = ".attn.bias"
Moments = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class NanoGPTCheckpoint:
    """What a nanoGPT checkpoint holds."""

    settings: ModelSettings
    tensors: dict[str, Tensor]
    adamw: Moments | None  # by our parameter names: exp_avg, exp_avg_sq, step; None if the file has no moments
    step: int  # completed updates
    best_loss: float | None
    dataset: str | None
    tables: dict[str, dict[str, Any]]  # its training settings, as a layer for our configuration


def from_nanogpt(content: dict[str, Any], source: str) -> NanoGPTCheckpoint:
    """Translate the dict that nanoGPT saved; UserError names missing parts, wrong types and tensors that do not fit."""
    settings = _settings(content["model_args"], source)
    named = {_our_name(name): tensor for name, tensor in content["model"].items()}
    tensors = {name: tensor for name, tensor in named.items() if name != HEAD and not name.endswith(MASK)}
    check_tensors(tensors, meta_parameters(settings), source)
    config = content.get("config") or {}
    best = content.get("best_val_loss")
    return NanoGPTCheckpoint(
        settings=settings,
        tensors=tensors,
        adamw=_moments(content["optimizer"], tensors, source) if content.get("optimizer") else None,
        step=int(content.get("iter_num", 0)),
        best_loss=None if best is None or float(best) >= 1e9 else float(best),  # 1e9 is its "none yet"
        dataset=config.get("dataset"),
        tables=training_tables(config),
    )


def _settings(args: Any, source: str) -> ModelSettings:
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
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{source}: model_args do not describe a nanoGPT model: {error}") from None


def _our_name(name: str) -> str:
    while name.startswith(WRAPPERS):  # compiled and wrapped in DDP: either may be outermost
        name = name.split(".", 1)[1]
    return name.removeprefix(PREFIX)


def _moments(state: dict[str, Any], tensors: dict[str, Tensor], source: str) -> Moments | None:
    """AdamW's state by parameter name; torch numbers it by group: first all matrices, then all vectors."""
    order = [n for n, t in tensors.items() if t.dim() >= 2] + [n for n, t in tensors.items() if t.dim() < 2]
    numbered = state.get("state", {})
    if not numbered:
        return None
    fits = list(numbered) == list(range(len(order))) and all(
        numbered[i]["exp_avg"].shape == tensors[name].shape for i, name in enumerate(order)
    )
    if not fits:
        raise UserError(
            f"{source}: the optimizer state does not belong to these weights (another order of parameters?). "
            f"To start a new run from the weights alone: nanogpt train --init-from {typed(source)}"
        )
    return {name: dict(numbered[i]) for i, name in enumerate(order)}


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
