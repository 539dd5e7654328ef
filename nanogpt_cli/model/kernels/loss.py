"""Cross-entropy of the next token, in float32, without holding the logits of all rows at once."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# logits at a time: with GPT-2's table 667 rows on a CPU, 2,668 elsewhere, and 21,345 where Inductor's kernels hold
# them twice in 16 bits and nothing in float32
LOGITS_AT_ONCE = {"cpu": 2**25}
LOGITS_AT_ONCE_ELSEWHERE = 2**27
LOGITS_AT_ONCE_COMPILED = 2**30


def logits_at_once(device: str, *, compiled: bool) -> int:
    """How many logits the loss holds at a time; `device` is a type, such as "cuda"."""
    if compiled and device != "cpu":
        return LOGITS_AT_ONCE_COMPILED
    return LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE_ELSEWHERE)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly to +-cap: cap * l / sqrt(l^2 + cap^2), which is l near zero. 0 is off."""
    return cap * logits * torch.rsqrt(logits.square() + cap * cap) if cap else logits


def next_token_loss(x: Tensor, head: Tensor, targets: Tensor, cap: float, reduction: Literal["mean", "none"]) -> Tensor:
    """Nats for stream x (B, T, C), head matrix (V, C) and targets (B, T): a mean, or (B, T) for "none"."""
    x_rows, t_rows = x.flatten(0, 1), targets.flatten()
    limit = logits_at_once(x.device.type, compiled=torch.compiler.is_compiling())
    chunks = -(-t_rows.numel() * head.shape[0] // limit)
    if reduction == "mean" and torch.is_grad_enabled() and chunks > 1:
        mean: Tensor = _LeanLoss.apply(x_rows, head, t_rows, cap, chunks)  # type: ignore[no-untyped-call]
        return mean
    nats = [_nats(x_c, head, t_c, cap) for x_c, t_c in zip(x_rows.chunk(chunks), t_rows.chunk(chunks), strict=True)]
    if reduction == "none":
        return torch.cat(nats).view_as(targets)
    return torch.cat(nats).sum() / (t_rows >= 0).sum()


def _nats(x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Tensor:
    return F.cross_entropy(softcap(F.linear(x, head).float(), cap), targets, ignore_index=-1, reduction="none")


class _LeanLoss(torch.autograd.Function):
    """The mean over rows. The way back is computed at once, chunk by chunk: the gradients of a chunk's logits
    are known as soon as the logits are, so neither has to wait for the other chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, cap: float, chunks: int) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weight = head.to(dtype)  # once, not once a chunk
        dx, dheads = torch.empty_like(x), None
        total = torch.zeros((), device=x.device)
        counted = (targets >= 0).unsqueeze(1)  # (rows, 1)
        for x_c, dx_c, t_c, counted_c in zip(*(a.chunk(chunks) for a in (x, dx, targets, counted)), strict=True):
            x_c, t_c = x_c.to(dtype), t_c.clamp(min=0).unsqueeze(1)
            raw = F.linear(x_c, weight).float()  # (rows, V)
            log_p = torch.log_softmax(softcap(raw, cap), dim=-1)
            total -= (log_p.gather(1, t_c) * counted_c).sum()
            if torch.compiler.is_compiling():  # p - onehot; a scatter would make Inductor keep p in float32, twice
                p, onehot = log_p.exp(), torch.arange(head.shape[0], device=x.device) == t_c
                d = torch.where(onehot, p - 1, p)
            else:
                d = log_p.exp_().scatter_add_(1, t_c, torch.full_like(t_c, -1, dtype=torch.float32))
            if cap:  # derivative of softcap: (cap / sqrt(l^2 + cap^2))^3
                d *= (cap * torch.rsqrt(raw.square_() + cap * cap)).pow_(3)
            d = d.to(dtype)
            dx_c.copy_(d @ weight * counted_c)
            dhead = d.t() @ (x_c * counted_c)
            dheads = dhead.to(head.dtype) if dheads is None else dheads.add_(dhead)
        ctx.save_for_backward(dx, dheads, counted.sum())
        return total / counted.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dhead, count = ctx.saved_tensors
        scale = grad / count  # late: float16 gradients of a mean would underflow before the loss scale reaches them
        return dx * scale, dhead.mul_(scale), None, None, None
