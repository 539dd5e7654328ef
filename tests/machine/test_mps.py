"""Apple's GPU, which is nowhere here: the operations a run sends to a device, looked up in torch's table of kernels."""

import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer, preset_names
from nanogpt_cli.config.schema import Config
from nanogpt_cli.model.decode import Decoder
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.optimizer import Optimizer

pytest.importorskip("yaml", reason="torch's table is YAML")
torchgen = pytest.importorskip("torchgen.gen", reason="torch's table of kernels is not installed")


@cache
def kernels() -> tuple[dict[str, Any], Any]:
    """Of every operation of torch: its entry by name, and the kernels by backend."""
    native = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = torchgen.parse_native_yaml(str(native / "native_functions.yaml"), str(native / "tags.yaml"))
    return {str(f.func.name): f for f in parsed.native_functions}, parsed.backend_indices


def has_kernel(operation: str, *backends: str) -> bool:
    from torchgen.model import DispatchKey

    functions, by_backend = kernels()
    entry = functions[operation]
    if entry.structured_delegate is not None:  # the kernel stands with the form that writes to `out`
        entry = functions[str(entry.structured_delegate)]
    keys = [DispatchKey.parse(name) for name in backends]
    return any(key in by_backend and by_backend[key].has_kernel(entry) for key in keys)


class Operations(TorchDispatchMode):
    """Names of the operations that reach a device which is not the CPU; `meta` stands in for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}, out))
        if func.namespace == "aten" and any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves):
            self.names.add(func._schema.name.removeprefix("aten::") + f".{func._overloadname}".removesuffix(".default"))
        return out


def a_run(config: Config) -> None:
    """A step with each kind of gradient, an evaluation and a generation of two tokens, on `meta`."""
    model = GPT(config.model).to("meta")
    optimizer = Optimizer(model, config.optim, torch.device("meta"))
    block = torch.zeros(2, config.model.block_size + 1, dtype=torch.long, device="meta")
    loss = model(block[:, :-1].contiguous(), block[:, 1:].contiguous())
    (loss / 2).backward()
    optimizer.take_gradients()
    norm = optimizer.clip(1.0)
    optimizer.step(1 - (torch.isfinite(norm) & torch.isfinite(loss.detach())).float())
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(block[:, :-1], block[:, 1:], reduction="none").mean(dim=1)
    decoder = Decoder(model)
    logits = decoder.prefill(block[:1, :4], 2, 8)
    values, ids = logits.topk(3, dim=-1)
    ids, order = ids.sort(dim=-1)
    values.gather(1, order)
    decoder.step(ids[:, :1])


@pytest.mark.parametrize("preset", preset_names())
def test_every_operation_has_an_mps_kernel(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda parameter: None)  # it refuses meta
    config = combine(preset_layer(preset)).config
    c = config.model
    kv_heads = 1 if c.n_kv_head is not None else None
    model = dataclasses.replace(
        c, n_layer=2, n_head=2, n_kv_head=kv_heads, head_dim=None, n_inner=None, n_embd=32, block_size=16, vocab_size=48
    )
    with Operations() as seen:
        a_run(dataclasses.replace(config, model=model))
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    missing = {name for name in seen.names if not has_kernel(name, "MPS", *composite)}
    assert len(seen.names) > 30
    assert not missing


def test_the_table_knows_what_mps_lacks() -> None:
    assert has_kernel("exp2", "MPS", "CompositeExplicitAutograd")
    assert not has_kernel("logspace.out", "MPS", "CompositeExplicitAutograd")
