"""The loss that holds no table of logits against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from nanogpt_cli.model.kernels import loss
from nanogpt_cli.model.kernels.loss import logits_at_once, next_token_loss, softcap


def plain(x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Tensor:
    return F.cross_entropy(softcap(x @ head.T, cap).flatten(0, 1), targets.flatten(), ignore_index=-1)


def inputs(V: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(V, (3, 7))
    targets[1, 2:4] = -1
    return torch.randn(3, 7, 8).requires_grad_(), torch.randn(V, 8).requires_grad_(), targets


@pytest.mark.parametrize("at_once", [1, 50 * 4, 50 * 20, 2**25])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, at_once: int, cap: float
) -> None:
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", at_once)
    x, head, targets = inputs()
    expected = torch.autograd.grad(3 * plain(x, head, targets, cap), (x, head))
    value = next_token_loss(x, head, targets, cap, "mean")
    assert torch.allclose(value, plain(x, head, targets, cap), atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(3 * value, (x, head)), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(next_token_loss(x, head, targets, cap, "mean"), value)
    each = next_token_loss(x, head, targets, cap, "none")
    assert torch.allclose(each.sum() / 19, value)
    assert each.shape == targets.shape
    for ours, theirs in zip(torch.autograd.grad(3 * each.sum() / 19, (x, head)), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_under_autocast(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, compiled: bool) -> None:
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 200)
    function = next_token_loss
    if compiled:
        torch.compiler.reset()
        function = torch.compile(next_token_loss, backend="aot_eager", fullgraph=True)
    x, head, targets = inputs()
    expected = torch.autograd.grad(plain(x, head, targets, 3.0), (x, head))
    with torch.autocast("cpu", dtype):
        value = function(x, head, targets, 3.0, "mean")
    assert value.dtype == torch.float32
    scale = 2.0**16  # of a gradient scaler: gradients of a mean must not underflow before it
    for ours, theirs in zip(torch.autograd.grad(scale * value, (x, head)), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours / scale - theirs).norm() < 2e-2 * theirs.norm()


def test_logits_of_all_rows_are_never_held() -> None:
    rows, V, C = 4096, 16384, 16
    x, head = torch.randn(1, rows, C).requires_grad_(), torch.randn(V, C).requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        next_token_loss(x, head, torch.zeros(1, rows, dtype=torch.long), 0.0, "mean").backward()
    assert largest <= loss.LOGITS_AT_ONCE["cpu"] < rows * V


def test_compiled_chunks_scatter_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter made Inductor write the probabilities down in float32, twice: 22.65 GiB of operands for 24 rows."""
    monkeypatch.setitem(loss.LOGITS_AT_ONCE, "cpu", 200)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    x, head, targets = inputs()
    torch.compiler.reset()
    compiled = torch.compile(next_token_loss, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    value = compiled(x, head, targets, 3.0, "mean")
    assert torch.allclose(value, plain(x, head, targets, 3.0), atol=1e-6)
    assert not [node for graph in graphs for node in graph.graph.nodes if "aten.scatter" in str(node.target)]
    assert any("where" in str(node.target) for node in graphs[0].graph.nodes)


def test_only_what_inductor_fuses_holds_many_logits() -> None:
    """In eager mode each logit is held some four times, in 16 and in 32 bits: 2^30 of them would be 10 GB."""
    assert logits_at_once("cuda", compiled=True) == 2**30
    assert logits_at_once("cuda", compiled=False) == logits_at_once("mps", compiled=False) == 2**27
    assert logits_at_once("cpu", compiled=True) == logits_at_once("cpu", compiled=False) == 2**25


def test_a_softcap_bounds_and_is_the_identity_near_zero() -> None:
    logits = torch.tensor([-1e6, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e6])
    capped = softcap(logits, 15.0)
    assert capped.abs().max() <= 15
    assert torch.allclose(capped[2:5], logits[2:5], rtol=1e-4)
    assert (capped.diff() > 0).all()
    assert softcap(logits, 0.0) is logits
