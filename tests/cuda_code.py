"""Inductor's CUDA code for a training graph, on a machine without a GPU: needs a CUDA build of torch.

The graph is traced on the CPU with fake tensors, as autograd does not run without a device; its tensors are then said
to lie on an H200, and Inductor lowers it as far as code. Nothing of it is run.
"""

import copy
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.model.kernels import loss

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=140 << 30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    gcnArchName="",
)
GPU = torch.device("cuda", 0)


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let Inductor and Triton believe in an H200."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    patch.setitem(device_interface.caching_worker_device_properties, "cuda", [H200])
    patch.setitem(device_interface.caching_worker_current_devices, "cuda", 0)
    facts = {"get_device_properties": H200, "current_device": 0, "is_bf16_supported": True}
    for name, fact in {**facts, "get_device_capability": (9, 0)}.items():
        patch.setattr(torch.cuda, name, lambda *_, fact=fact, **__: fact)
        patch.setattr(
            device_interface.CudaInterface, name, staticmethod(lambda *_, fact=fact, **__: fact), raising=False
        )
    target = {"get_current_target": GPUTarget("cuda", 90, 32), "get_active_torch_device": GPU, "get_current_device": 0}
    driver = SimpleNamespace(**{name: lambda fact=fact: fact for name, fact in target.items()})
    triton.runtime.driver.set_active(driver)
    for module in (_triton, scheduler):
        patch.setattr(module, "has_triton", lambda *_, **__: True)


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass as Inductor would run it."""

    launches: int  # Triton's kernels, matrix products, attention
    fused_bytes: int  # that Triton's kernels read and write
    largest_float32: int  # numbers in the largest float32 tensor that it allocates


class _Generated(BaseException):
    """Code is there; what would follow needs the GPU."""


def generated(model: GPT, rows: int, patch: pytest.MonkeyPatch) -> tuple[Pass, Pass]:
    """Forward and backward of a model on the meta device in bfloat16, for micro-batches of `rows`."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    passes: list[Pass] = []
    lower = GraphLowering.codegen

    def codegen(graph: GraphLowering) -> Any:
        code: Any = lower(graph)[0]
        _, _, call = getattr(code, "value", code).partition("def call(")
        fused = [node for node in graph.scheduler.nodes if isinstance(node, SchedulerNode | FusedSchedulerNode)]
        shapes = re.findall(r"empty_strided_cuda\(\(([\d, ]*)\), \([^)]*\), torch\.float32", call)
        passes.append(
            Pass(
                len(re.findall(r"triton_\w+\.run\(|extern_kernels\.\w+\(|torch\.ops\.aten\.[\w.]+\(", call)),
                sum(node.get_read_write_buffers_sizes() for node in fused),
                max((math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes), default=0),
            )
        )
        raise _Generated

    def compiler(traced: fx.GraphModule, inputs: list[Any]) -> Any:
        on_gpu, mode = copy.deepcopy(traced), FakeTensorMode(allow_non_fake_inputs=True)
        for node in on_gpu.graph.nodes:
            node.args = tree_map(lambda a: GPU if isinstance(a, torch.device) else a, node.args)
            node.kwargs = tree_map(lambda a: GPU if isinstance(a, torch.device) else a, node.kwargs)
        on_gpu.recompile()
        with mode:
            moved = [
                torch.empty_strided([*map(int, x.shape)], [*map(int, x.stride())], dtype=x.dtype, device=GPU)
                if isinstance(x, Tensor)
                else x
                for x in inputs
            ]
            FakeTensorProp(on_gpu, mode=mode).propagate_dont_convert_inputs(*moved)
        count = len(passes)
        try:
            with tracing(TracingContext(mode)), V.set_fake_mode(mode):
                compile_fx_inner(on_gpu, moved, graph_id=0)
        except BaseException:
            if len(passes) == count:
                raise
        return make_boxed_func(traced.forward)

    def partition(joint: fx.GraphModule, *args: Any, **more: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in joint.graph.nodes])):
            _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **{**more, "compiler": "inductor"})

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **more: Any) -> Tensor:
        q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, **more)[0]
        return out

    def forward(ids: Tensor, *weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            named = dict(zip(dict(model.named_parameters()), weights, strict=True))
            out: Tensor = functional_call(model, named, (ids, ids))
            return out

    patch.setattr(GraphLowering, "codegen", codegen)
    patch.setattr(F, "scaled_dot_product_attention", flash)
    patch.setattr(torch.compiler, "is_compiling", lambda: True)
    patch.setitem(loss.LOGITS_AT_ONCE, "cpu", loss.LOGITS_AT_ONCE_COMPILED)  # as on a GPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(rows, model.config.block_size, dtype=torch.long)
        weights = [torch.empty(p.shape).requires_grad_() for p in model.parameters()]
        compiled = aot_function(
            forward, compiler, compiler, partition_fn=partition, decompositions=select_decomp_table()
        )
        compiled(ids, *weights).backward()
    forward_pass, backward_pass = passes
    return forward_pass, backward_pass
