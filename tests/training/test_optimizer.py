"""Groups, slices, skipping and state of the optimizer."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import ModelSettings, OptimSettings
from nanogpt_cli.model.gpt import GPT, matrix_heights
from nanogpt_cli.training.optimizer import Optimizer, is_block_matrix
from tests.models import LLAMA

TINY = ModelSettings(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, tie_weights=False)
GO, SKIP = torch.zeros(()), torch.ones(())


def make(device: str = "cpu", family: dict[str, Any] | None = None, **changes: Any) -> tuple[GPT, Optimizer]:
    model = GPT(dataclasses.replace(TINY, **(family or {})), generator=torch.Generator().manual_seed(1)).to(device)
    return model, Optimizer(model, OptimSettings(**changes), torch.device(device))


def run(model: GPT, seed: int) -> None:
    """A forward and a backward pass."""
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(seed)).to(model.wte.weight.device)
    model(ids[:, :-1], ids[:, 1:]).backward()


def one_step(model: GPT, optimizer: Optimizer, skip: torch.Tensor, seed: int = 0) -> None:
    run(model, seed)
    optimizer.take_gradients()
    optimizer.step(skip.to(optimizer.device))
    optimizer.zero_grad()


def snapshot(model: GPT, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    state = {f"weight {n}": p.detach().clone() for n, p in model.named_parameters()}
    for kind, by_name in optimizer.state_by_name().items():
        state |= {f"{kind} {n} {k}": v.clone() for n, m in by_name.items() for k, v in m.items()}
    return state


def test_decay_falls_on_matrices_alone_and_rates_on_roles() -> None:
    _, optimizer = make(embed_lr_scale=3.0, head_lr_scale=0.5, learning_rate=0.1, weight_decay=0.2)
    optimizer.set_rates(0.5)
    names = {id(p): n for n, p in optimizer.parameters.items()}
    seen = {names[id(p)]: g for g in optimizer.adamw.param_groups for p in g["params"]}
    assert seen.keys() == optimizer.parameters.keys()
    assert all(g["weight_decay"] == (0.2 if optimizer.parameters[n].ndim >= 2 else 0.0) for n, g in seen.items())
    assert seen["wte.weight"]["lr"] == pytest.approx(0.15)
    assert seen["lm_head.weight"]["lr"] == pytest.approx(0.025)
    assert seen["h.0.attn.c_attn.weight"]["lr"] == pytest.approx(0.05)


def test_muon_takes_block_matrices_and_sees_q_k_v_apart() -> None:
    model, optimizer = make(optimizer="muon", muon_lr=0.1, weight_decay=0.0)
    assert optimizer.muon is not None
    assert set(optimizer.muon.momentum()) == {
        n for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2
    }
    optimizer.set_rates(1.0)
    before = model.h[0].attn.c_attn.weight.detach().clone()
    one_step(model, optimizer, GO)
    change = model.h[0].attn.c_attn.weight.detach() - before
    for part in change.split(16):  # each third is nearly orthogonal: singular values of one size
        values = torch.linalg.svdvals(part)
        assert float(values[0] / values[-4]) < 3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
def test_a_skipped_step_changes_nothing(kind: str, device: str) -> None:
    model, optimizer = make(device, optimizer=kind)
    optimizer.set_rates(1.0)
    one_step(model, optimizer, GO)
    before = snapshot(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.take_gradients()
    optimizer.step(SKIP.to(device))
    after = snapshot(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_skipping_on_a_device_reads_nothing_there(kind: str) -> None:
    """The path of CUDA, run on CPU tensors: updates and skips as the other path does, gradients not finite included."""
    results = []
    for device in ("cpu", "meta"):  # the name alone decides which path is taken
        model, optimizer = make(optimizer=kind)
        optimizer.device = torch.device(device)
        optimizer.set_rates(1.0)
        for number, skip in enumerate((GO, SKIP, GO)):
            run(model, seed=number)
            for parameter in model.parameters() if skip else []:
                parameter.grad = torch.full_like(parameter, float("nan"))
            optimizer.take_gradients()
            with Launches() as launches:
                optimizer.step(skip)
            assert device == "cpu" or not launches.count["_local_scalar_dense"]
            optimizer.zero_grad()
        results.append(snapshot(model, optimizer))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("family", [{}, LLAMA], ids=str)
def test_muon_moves_as_torchs_does(family: dict[str, Any]) -> None:
    model, optimizer = make(family=family, optimizer="muon", muon_lr=0.02, weight_decay=0.1, muon_momentum=0.9)
    twin, _ = make(family=family)
    leaves = [
        torch.nn.Parameter(part)
        for name, p in twin.named_parameters()
        if is_block_matrix(name, p)
        for part in p.detach().split(matrix_heights(twin.config, name, len(p)))
    ]
    theirs = torch.optim.Muon(leaves, lr=0.02, momentum=0.9, weight_decay=0.1)
    optimizer.set_rates(1.0)
    for number in range(4):
        run(model, seed=number)
        grads = [
            part
            for name, p in model.named_parameters()
            if is_block_matrix(name, p) and p.grad is not None
            for part in p.grad.split(matrix_heights(model.config, name, len(p)))
        ]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        optimizer.take_gradients()
        optimizer.step(GO)
        theirs.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        if is_block_matrix(name, p):  # the slices share memory with the twin's parameters
            torch.testing.assert_close(p, twin.get_parameter(name), atol=2e-4, rtol=1e-3)


class Launches(TorchDispatchMode):
    """Counts the operations that run a kernel on a device; views and allocations run none."""

    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns) and "empty" not in name:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["gpt2", "gpt2_modern"])
def test_an_update_takes_few_launches_whatever_the_depth(preset: str) -> None:
    config = combine(preset_layer(preset)).config
    small = dataclasses.replace(config.model, n_embd=96, n_head=6, block_size=16, vocab_size=128)
    model = GPT(small)
    optimizer = Optimizer(model, config.optim, torch.device("cpu"))
    optimizer.device = torch.device("meta")  # the path of a GPU
    optimizer.set_rates(1.0)
    for _ in range(2):  # the first makes moments
        model(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)).backward()
        with Launches() as launches:
            optimizer.take_gradients()
            optimizer.clip(config.optim.grad_clip)
            optimizer.step(GO)
            optimizer.zero_grad()
    assert sum(launches.count.values()) < 150, launches.count


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_travels_by_name_and_rates_stay(kind: str) -> None:
    model, optimizer = make(optimizer=kind)
    for seed in range(3):
        one_step(model, optimizer, GO, seed)
    state = optimizer.state_by_name()
    twin, other = make(optimizer=kind, learning_rate=5e-4, weight_decay=0.3, muon_lr=0.01)
    twin.load_state_dict(model.state_dict())
    other.load_state_by_name(state)
    other.set_rates(1.0)
    assert all(g["lr"] in (5e-4, 0.01) for o in other.torch_optimizers() for g in o.param_groups)
    moved = other.state_by_name()
    assert all(torch.equal(state[k][n][m], moved[k][n][m]) for k in state for n in state[k] for m in state[k][n])
    if kind == "muon":
        assert state["muon"]["h.0.attn.c_attn.weight"]["momentum_buffer"].shape == (48, 16)


def test_same_updates_as_nanogpts_settings() -> None:
    """torch's own AdamW with nanoGPT's two groups gives the same weights."""
    settings = OptimSettings(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.99)
    model, optimizer = make(**dataclasses.asdict(settings))
    reference, _ = make()
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.99),
    )
    optimizer.set_rates(1.0)
    for seed in range(5):
        one_step(model, optimizer, GO, seed)
        ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(seed))
        reference(ids[:, :-1], ids[:, 1:]).backward()
        plain.step()
        plain.zero_grad()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(optimizer.parameters[name], parameter, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("limit", "left"), [(0.0, 1.0), (0.5, 0.5), (2.0, 1.0), (1e9, 1.0)])
def test_clipping_scales_to_the_limit_and_leaves_what_is_below(limit: float, left: float) -> None:
    """`limit` and what is `left` are shares of the norm there is."""
    model, optimizer = make()
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    before = [g.clone() for g in gradients]
    assert torch.equal(optimizer.clip(limit * float(norm)), norm)
    for found, whole in zip(gradients, before, strict=True):
        assert torch.allclose(found, left * whole, rtol=1e-5)
    assert all(map(torch.equal, gradients, before)) == (limit == 0 or limit > 1)


def test_a_norm_that_is_not_finite_is_told() -> None:
    model, optimizer = make()
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    assert optimizer.clip(1.0).isnan()
