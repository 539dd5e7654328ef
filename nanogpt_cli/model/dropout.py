"""Dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p, the others scaled up to keep the mean; x itself if p is 0."""
    return F.dropout(x, p) if p else x


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, scale: float, p: float) -> Tensor:
    """Causal attention whose weights are dropped with probability p. q, k, v (B, nh, T, hs) -> (B, nh, T, hs)."""
    T = q.shape[2]
    scores = (q * scale) @ k.transpose(-2, -1)  # (B, nh, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return dropout(weights, p) @ v
