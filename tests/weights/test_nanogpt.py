"""nanoGPT's checkpoints: made here in its format, and by a real clone where the variable NANOGPT_CLONE names one.

NANOGPT_CLONE=~/nanoGPT pytest tests/model/test_nanogpt_files.py
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import build_model
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.optimizer import Optimizer
from nanogpt_cli.weights.nanogpt import from_nanogpt

ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": False, "vocab_size": 20, "dropout": 0.1}
CONFIG = {
    "dataset": "shakespeare_char",
    "learning_rate": 1e-3,
    "min_lr": 1e-4,
    "warmup_iters": 2,
    "lr_decay_iters": 20,
    "decay_lr": True,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "grad_clip": 1.0,
    "batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_iters": 20,
    "eval_interval": 10,
    "eval_iters": 2,
    "log_interval": 1,
    "wandb_project": "owt",
    "device": "cuda",
    "out_dir": "out",
    "init_from": "scratch",
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    idx = torch.randint(20, (4, 13), generator=torch.Generator().manual_seed(step))
    return idx[:, :-1].contiguous(), idx[:, 1:].contiguous()


def nanogpt_adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.AdamW:
    """Its groups: all matrices in order of the model, then all vectors."""
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


def update(model: torch.nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trained(bias: bool) -> tuple[GPT, torch.optim.AdamW]:
    settings = ModelSettings(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20, bias=bias, activation="gelu")
    model = GPT(settings, generator=torch.Generator().manual_seed(3))
    optimizer = nanogpt_adamw(list(model.named_parameters()))
    for step in range(3):
        update(model, model(*batch(step)), optimizer)
    return model, optimizer


def in_its_format(model: GPT, optimizer: torch.optim.AdamW, wrapper: str = "", **changes: Any) -> dict[str, Any]:
    tensors = {f"{wrapper}transformer.{name}": p.detach().clone() for name, p in model.named_parameters()}
    tensors[f"{wrapper}lm_head.weight"] = model.wte.weight.detach()
    return {
        "model": tensors,
        "optimizer": optimizer.state_dict(),
        "model_args": {**ARGS, "bias": model.config.bias},
        "iter_num": 3,
        "best_val_loss": torch.tensor(2.5),
        "config": CONFIG,
        **changes,
    }


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_settings_and_progress_are_read(wrapper: str, bias: bool) -> None:
    model, optimizer = trained(bias)
    read = from_nanogpt(in_its_format(model, optimizer, wrapper), "out/ckpt.pt")
    assert read.settings == ModelSettings(
        n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20, bias=bias, dropout=0.1, activation="gelu"
    )
    assert (read.step, read.dataset) == (3, "shakespeare_char")
    idx = batch(0)[0]
    assert torch.equal(build_model(read.settings, read.tensors, "")(idx), model.eval()(idx))


def test_moments_go_on_exactly_where_nanogpt_stopped() -> None:
    model, optimizer = trained(bias=True)
    read = from_nanogpt(in_its_format(model, optimizer), "ckpt.pt")
    ours = build_model(read.settings, {n: t.clone() for n, t in read.tensors.items()}, "")
    settings = combine(Layer("nanoGPT", read.tables)).config.optim
    continued = Optimizer(ours, settings, torch.device("cpu"))
    assert read.adamw is not None
    continued.load_state_by_name({"adamw": read.adamw, "muon": {}})
    assert read.adamw.keys() == dict(ours.named_parameters()).keys()
    continued.set_rates(1.0)
    for step in range(3, 6):
        update(model, model(*batch(step)), optimizer)
        ours(*batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        continued.step(torch.zeros(()))
        continued.zero_grad()
    for (name, theirs), p in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert (p - theirs).abs().max() < 1e-6, name


def test_its_settings_become_a_layer_of_ours() -> None:
    model, optimizer = trained(bias=False)
    config = combine(Layer("nanoGPT", from_nanogpt(in_its_format(model, optimizer), "").tables)).config
    assert config.data.sampling == "random"
    assert (config.data.dataset, config.train.batch_size, config.train.max_iters) == ("shakespeare_char", 4, 20)
    assert (config.optim.schedule, config.optim.lr_decay_iters, config.optim.min_lr) == ("cosine", 20, 1e-4)
    content = in_its_format(model, optimizer, config={**CONFIG, "decay_lr": False, "learning_rate": 3e-5})
    config = combine(Layer("nanoGPT", from_nanogpt(content, "").tables)).config
    assert (config.optim.schedule, config.optim.warmup_iters, config.optim.min_lr) == ("constant", None, None)


def test_a_file_of_an_old_version_or_without_optimizer_is_read() -> None:
    model, optimizer = trained(bias=True)
    content = in_its_format(model, optimizer, best_val_loss=1e9)
    del content["optimizer"], content["config"], content["model_args"]["bias"]
    for i in range(2):  # stored by its slow attention
        content["model"][f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 12, 12)
    read = from_nanogpt(content, "ckpt.pt")
    assert (read.adamw, read.dataset, read.settings.bias) == (None, None, True)
    assert not any(name.endswith(".attn.bias") for name in read.tensors)


def test_what_does_not_fit_is_named() -> None:
    model, optimizer = trained(bias=False)
    content = in_its_format(model, optimizer, model_args={**ARGS, "n_layer": 3})
    with pytest.raises(UserError, match=r"ckpt\.pt: .*missing: h\.2\.ln_1\.weight"):
        from_nanogpt(content, "ckpt.pt")
    content = in_its_format(model, optimizer, model_args={"n_layer": 2})
    with pytest.raises(UserError, match="model_args"):
        from_nanogpt(content, "ckpt.pt")
    content = in_its_format(model, optimizer)
    content["optimizer"]["state"][0], content["optimizer"]["state"][2] = (
        content["optimizer"]["state"][2],
        content["optimizer"]["state"][0],
    )
    with pytest.raises(UserError, match=r"nanogpt train --init-from ckpt\.pt"):
        from_nanogpt(content, "ckpt.pt")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"model": {"transformer.wte.weight": 5}},
        {"model_args": torch.zeros(2, 2)},
        {"iter_num": None},
        {"iter_num": -1},
        {"config": [1]},
        {"optimizer": {"state": {0: {"exp_avg": None}}}},
    ],
)
def test_what_is_of_another_kind_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"ckpt\.pt: its {next(iter(changes))}.* is not what nanoGPT writes there"):
        from_nanogpt({**in_its_format(*trained(bias=False)), **changes}, "ckpt.pt")


@pytest.fixture(scope="module")
def clone() -> ModuleType:
    folder = os.environ.get("NANOGPT_CLONE")
    if not folder:
        pytest.skip("NANOGPT_CLONE names no clone of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_clone_model", Path(folder).expanduser() / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_a_real_nanogpt_gives_the_same_numbers(clone: ModuleType, bias: bool, tmp_path: Path) -> None:
    """Its model, its optimizer, its file: losses and gradients agree to 1e-5 over 20 updates of both."""
    torch.manual_seed(1)
    theirs = clone.GPT(clone.GPTConfig(**{**ARGS, "bias": bias, "dropout": 0.0}))
    their_optimizer = theirs.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    for step in range(3):
        update(theirs, theirs(*batch(step))[1], their_optimizer)
    content = {
        "model": theirs.state_dict(),
        "optimizer": their_optimizer.state_dict(),
        "model_args": {**ARGS, "bias": bias},
        "iter_num": 3,
        "best_val_loss": torch.tensor(3.0),
        "config": CONFIG,
    }
    torch.save(content, tmp_path / "ckpt.pt")
    read = from_nanogpt(torch.load(tmp_path / "ckpt.pt", weights_only=True), "ckpt.pt")
    ours = build_model(read.settings, read.tensors, "")  # evaluation mode: no dropout
    optimizer = Optimizer(ours, combine(Layer("nanoGPT", read.tables)).config.optim, torch.device("cpu"))
    assert read.adamw is not None
    optimizer.load_state_by_name({"adamw": read.adamw, "muon": {}})
    optimizer.set_rates(1.0)
    for step in range(3, 23):
        x, y = batch(step)
        their_loss = theirs(x, y)[1]
        loss = ours(x, y)
        assert abs(float(loss.detach()) - float(their_loss.detach())) < 1e-5
        loss.backward()
        their_loss.backward()
        their_grads = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            assert p.grad is not None
            assert torch.allclose(p.grad, their_grads[f"transformer.{name}"].grad, atol=1e-5), name
        for model in (ours, theirs):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(torch.zeros(()))
        optimizer.zero_grad()
        their_optimizer.step()
        their_optimizer.zero_grad(set_to_none=True)
    assert F.mse_loss(ours.wte.weight, theirs.transformer.wte.weight) < 1e-10
