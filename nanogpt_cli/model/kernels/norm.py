"""RMSNorm (Zhang and Sennrich, 2019), with a backward pass of few sweeps for training on a CPU.

There torch composes both directions of elementwise operations, which takes 2 to 4 times as long.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    """x / rms(x) over the last dimension, times `weight` (C,) if given; in x's number format."""
    weight = None if weight is None else weight.to(x.dtype)
    if x.device.type == "cpu" and x.requires_grad and not torch.compiler.is_compiling():
        y: Tensor = _CpuRMSNorm.apply(x.contiguous(), weight, eps)  # type: ignore[no-untyped-call]
        return y
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class RMSNorm(nn.RMSNorm):
    """With a gain of each channel, no bias."""

    eps: float  # given

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return rms_norm(x, self.weight, self.eps)


class _CpuRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        r = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)  # 1 / rms, (..., 1)
        ctx.save_for_backward(x, weight, r)
        y: Tensor = x * r
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """dx = r g w - x r^3 mean(g w x); dw = sum over rows of g x r."""
        x, weight, r = ctx.saved_tensors
        C = x.shape[-1]
        grad = grad.contiguous()
        gx, dweight = grad * x, None
        dx: Tensor = grad * r
        if weight is None:
            dot = gx.sum(-1, keepdim=True)
        else:
            dot = (gx @ weight).unsqueeze(-1)
            dweight = (r.view(1, -1) @ gx.view(-1, C)).view(C)
            dx.mul_(weight)
        dx.addcmul_(x, r.pow(3).mul_(dot), value=-1 / C)
        return dx, dweight, None
