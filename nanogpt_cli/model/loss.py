"""Cross-entropy of the next token, in float32."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly to +-cap: cap * l / sqrt(l^2 + cap^2), which is l near zero. 0 is off."""
    return cap * logits * torch.rsqrt(logits.square() + cap * cap) if cap else logits


def next_token_loss(x: Tensor, head: Tensor, targets: Tensor, cap: float, reduction: Literal["mean", "none"]) -> Tensor:
    """Nats for stream x (B, T, C), head matrix (V, C) and targets (B, T): a mean, or (B, T) for "none"."""
    logits = softcap(F.linear(x, head), cap).float()
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
    return flat if reduction == "mean" else flat.view_as(targets)
