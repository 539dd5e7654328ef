"""Models on disk for the tests of loading, eval, sample and export: made by hand, no training needed."""

from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.schema import Config, DataSettings, ModelSettings
from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer
from nanogpt_cli.model.build import build_model, meta_parameters
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import FORMAT, save_checkpoint
from nanogpt_cli.runs.directory import RunDirectory, create_run
from nanogpt_cli.weights.export import Exported, export
from nanogpt_cli.weights.load import LoadedModel

ALPHABET = CharTokenizer("\n abcdefghijklmnop")  # 18 characters
SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=18)
MODERN: dict[str, Any] = {  # every switch that makes a model something else than GPT-2
    "activation": "relu2",
    "position": "rotary",
    "norm": "rmsnorm",
    "qk_norm": True,
    "embed_norm": True,
    "tie_weights": False,
    "logit_softcap": 15.0,
}
LLAMA: dict[str, Any] = {  # with every size another than the default
    "n_head": 4,
    "n_kv_head": 2,
    "head_dim": 6,
    "n_inner": 20,
    "bias": False,
    "activation": "swiglu",
    "position": "rotary",
    "rope_theta": 500.0,
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "tie_weights": False,
}
QWEN3: dict[str, Any] = {
    **LLAMA,
    "n_kv_head": 1,
    "n_inner": None,
    "qk_norm": True,
    "qk_gain": True,
    "tie_weights": True,
}


def random_weights(settings: ModelSettings, seed: int = 0, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights that are nowhere zero or one, so that no mistake hides."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) * scale for n, p in meta_parameters(settings).items()}


def random_model(settings: ModelSettings, seed: int = 0) -> GPT:
    """A model of such weights."""
    return build_model(settings, random_weights(settings, seed), "")


def checkpoint(
    settings: ModelSettings = SETTINGS, tokenizer: Tokenizer | None = ALPHABET, *, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """What best.pt holds."""
    config = Config(model=settings, data=DataSettings(dataset="tiny"))
    return {
        "format": FORMAT,
        "model": random_weights(settings, seed),
        "step": 7,
        "val_loss": 2.5,
        "config": config.to_toml(),
        "tokenizer": tokenizer.to_toml() if tokenizer else None,
        "data": {},
        **changes,
    }


def make_run(
    path: Path, settings: ModelSettings = SETTINGS, tokenizer: Tokenizer | None = ALPHABET, **changes: Any
) -> RunDirectory:
    """A run with best.pt (step 7) and a later ckpt.pt (step 9)."""
    content = checkpoint(settings, tokenizer, **changes)
    run = create_run(path, config=content["config"], tokenizer=content["tokenizer"], environment={})
    save_checkpoint(content, run.best)
    save_checkpoint({**content, "model": random_weights(settings, seed=1), "step": 9, "val_loss": None}, run.checkpoint)
    return run


def nanogpt_checkpoint(settings: ModelSettings, dataset: str = "tiny", **changes: Any) -> dict[str, Any]:
    """A nanoGPT ckpt.pt of a settings without bias."""
    tensors = {f"transformer.{name}": t for name, t in random_weights(settings).items()}
    args = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    return {
        "model": {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]},
        "model_args": {key: getattr(settings, key) for key in args},
        "iter_num": 100,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": dataset},
        **changes,
    }


def exported(
    model: GPT, folder: Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32
) -> Exported:
    """A model as a Hugging Face folder."""
    return export(LoadedModel(model, tokenizer, "a test"), folder, dtype)
