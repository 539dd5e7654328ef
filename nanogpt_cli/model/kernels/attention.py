"""Causal attention: torch's own kernels, and a path of our own for training on a CPU.

On a CPU torch's kernel leaves its fast path with dropout and has a slow backward pass without. Ours walks over blocks
of queries, so that keys of the future cost nothing, and keeps the weights for the way back. Compiled code uses torch's.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt_cli.model.kernels.dropout import keep_mask, keep_probability, masked


def query_blocks(T: int) -> list[tuple[int, int]]:
    """Bounds of the blocks of queries: small ones make small matrix products, large ones scores of the future."""
    size = max(128, T // 4)  # measured best for T = 64 to 1024, with and without dropout
    return [(start, min(T, start + size)) for start in range(0, T, size)]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, p: float = 0.0, attn_mask: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T) v, every position seeing itself and those before; weights dropped with probability p.

    q (B, nh, T, hs), k and v (B, nkv, T, hs); or q with the newest position only and k, v with all before, of which
    `attn_mask` (1, T) bool says which exist. nh / nkv neighbours in q read the same keys. Returns the shape of q.
    """
    if q.shape[2] < k.shape[2]:
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # (B, nkv, nh / nkv, hs)
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale, attn_mask=attn_mask).view(q.shape)
    if q.shape[1] > k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, nh, T, hs)
    if q.device.type == "cpu" and q.requires_grad and not torch.compiler.is_compiling():
        y: Tensor = _CpuAttention.apply(q, k, v, scale, p)  # type: ignore[no-untyped-call]
        return y
    return F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=p, is_causal=True)


class _CpuAttention(torch.autograd.Function):
    """N = B nh, t = positions of a block, s = positions it sees."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, p: float) -> Tensor:
        shape, T = q.shape, q.shape[2]
        q, k, v = (x.reshape(-1, T, x.shape[3]) for x in (q, k, v))  # (N, T, hs)
        y = torch.empty_like(q)
        kept = []
        for start, end in query_blocks(T):
            future = torch.full((end - start, end), -math.inf, dtype=q.dtype).triu_(start + 1)
            scores = torch.baddbmm(future, q[:, start:end], k[:, :end].transpose(1, 2), alpha=scale)  # (N, t, s)
            weights = torch.softmax(scores, dim=-1)
            mask = keep_mask(weights.shape, p) if p else None
            y[:, start:end] = masked(weights, mask) @ v[:, :end]
            kept.append((weights, mask))
        ctx.save_for_backward(q, k, v, *(x for pair in kept for x in pair))
        ctx.shape, ctx.scale, ctx.p = shape, scale, p
        return (y.mul_(1 / keep_probability(p)) if p else y).view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *kept = ctx.saved_tensors
        T = q.shape[1]
        dy = dy.reshape(q.shape)
        if ctx.p:
            dy = dy * (1 / keep_probability(ctx.p))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for start, end in reversed(query_blocks(T)):  # the last block sees every key: it fills dk and dv
            mask, weights, g = kept.pop(), kept.pop(), dy[:, start:end]
            dw = masked(g @ v[:, :end].transpose(1, 2), mask)  # (N, t, s)
            ds = torch.ops.aten._softmax_backward_data(dw, weights, -1, weights.dtype)
            dq[:, start:end] = ds @ k[:, :end]
            _accumulate(dk, ds, q[:, start:end])
            _accumulate(dv, masked(weights, mask), g)
        return dq.mul_(ctx.scale).view(ctx.shape), dk.mul_(ctx.scale).view(ctx.shape), dv.view(ctx.shape), None, None


def _accumulate(into: Tensor, weights: Tensor, x: Tensor) -> None:
    """Add weights^T x, (N, t, s)^T (N, t, hs), to the first s positions; set them if these are all."""
    s = weights.shape[2]
    if s == into.shape[1]:
        torch.bmm(weights.transpose(1, 2), x, out=into)
    else:
        into[:, :s] += weights.transpose(1, 2) @ x
