"""The GPT: GPT-2 by default, every later idea a switch of `[model]`.

Shapes: B rows, T positions, C = n_embd, nh = n_head, nkv = n_kv_head, hs = head_dim, V = vocab_size.
Parameters are named as in the GPT-2 release (`wte`, `wpe`, `h.0.attn.c_attn`, ..., `ln_f`); matrices stand as nn.Linear
keeps them, (out, in). There are no buffers: whatever is no weight is worked out where it is used, so a state_dict is
the weights and nothing else.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.kernels.attention import attend
from nanogpt_cli.model.kernels.dropout import dropout
from nanogpt_cli.model.kernels.loss import next_token_loss, softcap
from nanogpt_cli.model.kernels.norm import EPS, RMSNorm, rms_norm

Rope = tuple[Tensor, Tensor]  # cosines and sines of rotary positions, each (T, hs)


class KVCache(Protocol):
    """Keys and values of one layer, kept between calls of a generation."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take k, v (B, nkv, T, hs) of the new positions; returns all, and attn_mask (1, S) if some do not count."""


class Linear(nn.Linear):
    """nn.Linear without its own initialisation: GPT.initial_weights draws every weight once."""

    def reset_parameters(self) -> None: ...


class Embedding(nn.Embedding):
    """nn.Embedding without its own initialisation."""

    def reset_parameters(self) -> None: ...


def norm(config: ModelSettings) -> nn.Module:
    """LayerNorm (GPT-2) or RMSNorm over C."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.eps)
    return nn.LayerNorm(config.n_embd, eps=config.eps, bias=config.bias)


def matrix_heights(config: ModelSettings, name: str, rows: int) -> tuple[int, ...]:
    """Rows of each matrix that stands in the weight `name` of `rows` rows: several stand one above the other."""
    if name.endswith("attn.c_attn.weight"):
        return config.n_head * config.head_width, *2 * (config.kv_heads * config.head_width,)  # q, k, v
    if name.endswith("mlp.c_fc.weight") and config.activation == "swiglu":
        return config.inner_width, config.inner_width  # gate, up
    return (rows,)


def rope_table(positions: Tensor, head_width: int, theta: float | None = None) -> Rope:
    """Rotary angles (Su et al., 2021) of `positions` (T,), a frequency for each pair (i, i + hs/2).

    With `theta` Llama's: all hs/2 pairs turn, with frequencies theta^(-2i / hs). Without, modded-nanogpt's: the first
    half of the pairs turns, the other way round, with frequencies 1 .. 1/1024; the other half carries no position.
    """
    pairs = head_width // 2
    turning = pairs if theta else max(1, pairs // 2)
    last = -math.log2(theta) * (pairs - 1) / pairs if theta else -10.0
    # on the positions' device, as a captured step may not copy from the host; MPS has no logspace
    frequencies = F.pad(torch.linspace(0, last, turning, device=positions.device).exp2(), (0, pairs - turning))
    angles = torch.outer(positions.float(), frequencies)  # (T, hs/2)
    sin = angles.sin() if theta is None else -angles.sin()
    return torch.cat((angles.cos(), angles.cos()), dim=1), torch.cat((sin, -sin), dim=1)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (x[i], x[i + hs/2]) of x (B, T, nh, hs) by its position's angle."""
    cos, sin = (table.to(x.dtype).unsqueeze(1) for table in rope)  # (T, 1, hs)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.config = config
        self.nh, self.nkv, self.hs = config.n_head, config.kv_heads, config.head_width
        # q, k and v of all heads at once
        self.c_attn = Linear(config.n_embd, (self.nh + 2 * self.nkv) * self.hs, bias=config.bias)
        self.c_proj = Linear(self.nh * self.hs, config.n_embd, bias=config.bias)
        eps = config.norm_eps or EPS
        self.q_norm = RMSNorm(self.hs, eps=eps) if config.qk_gain else None
        self.k_norm = RMSNorm(self.hs, eps=eps) if config.qk_gain else None

    def forward(self, x: Tensor, rope: Rope | None, cache: KVCache | None) -> Tensor:
        """x (B, T, C) -> (B, T, C), before dropout."""
        B, T, _ = x.shape
        qkv = self.c_attn(x).view(B, T, self.nh + 2 * self.nkv, self.hs)
        q, k, v = qkv.split((self.nh, self.nkv, self.nkv), dim=2)  # (B, T, nh, hs), (B, T, nkv, hs) twice
        scale = 1 / math.sqrt(self.hs)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.config.qk_norm:  # unit rms; the scale then sets the sharpness: modded-nanogpt's 0.12 at hs = 128
            eps = self.config.norm_eps or EPS
            q, k, scale = rms_norm(q, eps=eps), rms_norm(k, eps=eps), 1.36 * scale
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)  # as they lie: Inductor fuses it with the norm before
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, nh, T, hs), (B, nkv, T, hs) twice
        attn_mask = None
        if cache is not None:
            k, v, attn_mask = cache.append(k, v)
            q = q.to(k.dtype)  # the cache's format may be finer
        y = attend(q, k, v, scale, self.config.dropout if self.training else 0.0, attn_mask)  # (B, nh, T, hs)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(B, T, -1))  # heads side by side
        return out


class MLP(nn.Module):
    """Two matrices with an activation between, by default four times as wide as the residual stream."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.activation = config.activation
        inner = config.inner_width
        self.c_fc = Linear(config.n_embd, 2 * inner if config.activation == "swiglu" else inner, bias=config.bias)
        self.c_proj = Linear(inner, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C), before dropout."""
        x = self.c_fc(x)  # (B, T, n_inner), swiglu (B, T, 2 n_inner)
        if self.activation == "swiglu":  # Shazeer, 2020
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        elif self.activation == "relu2":  # So et al., "Primer", 2021
            x = F.relu(x).square()
        else:  # GPT-2 has the tanh form, nanoGPT the exact one; they differ by up to 5e-4
            x = F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        out: Tensor = self.c_proj(x)
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream.

    With `activation_checkpointing`, a training pass keeps only the input x and computes the rest again on the way back
    (Chen et al., 2016).
    """

    def __init__(self, config: ModelSettings, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.ln_1 = norm(config)
        self.attn = Attention(config)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rope | None = None, cache: KVCache | None = None) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        # inside forward, where FSDP's hooks are around it and torch.compile traces it
        if self.activation_checkpointing and self.training:
            out: Tensor = checkpoint(self.layer, x, rope, cache, use_reentrant=False)
            return out
        return self.layer(x, rope, cache)

    def layer(self, x: Tensor, rope: Rope | None, cache: KVCache | None) -> Tensor:
        """`forward` as it is computed; a recomputation draws the same dropout masks."""
        p = self.config.dropout if self.training else 0.0
        x = x + dropout(self.attn(self.ln_1(x), rope, cache), p)
        return x + dropout(self.mlp(self.ln_2(x)), p)


class GPT(nn.Module):
    """The whole model: `GPT(config)(idx)` are logits, `GPT(config)(idx, targets)` is the loss.

    Weights are drawn on the CPU from `generator` (torch's default one if None), in a fixed order, whatever the device.
    On the meta device nothing is drawn: only shapes exist. `activation_checkpointing` is each Block's.
    """

    def __init__(
        self,
        config: ModelSettings,
        *,
        generator: torch.Generator | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be set before a model is built")
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.ln_e = norm(config) if config.embed_norm else None
        self.h = nn.ModuleList(
            Block(config, activation_checkpointing=activation_checkpointing) for _ in range(config.n_layer)
        )
        self.ln_f = norm(config)
        self.lm_head = None if config.tie_weights else Linear(config.n_embd, config.vocab_size, bias=False)
        if not self.wte.weight.is_meta:
            with torch.no_grad():
                for name, value in self.initial_weights(generator):
                    self.get_parameter(name).copy_(value)

    def initial_weights(self, generator: torch.Generator | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and first value on the CPU of each parameter, drawn as it is asked for.

        GPT-2's: normal 0.02, projections into the residual stream 0.02 / sqrt(2 n_layer), biases 0, gains 1.
        """
        for name, p in self.named_parameters():
            into_stream = name.endswith("c_proj.weight")
            value = torch.empty(p.shape, device="cpu")
            if p.dim() == 1:
                value.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.config.zero_init and (into_stream or name == "lm_head.weight"):
                value.zero_()
            else:
                value.normal_(
                    0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if into_stream else 0.02, generator=generator
                )
            yield name, value

    def embed(self, idx: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """Token ids (B, T) at `positions` (T,) -> what enters the first block (B, T, C), and the rotation if any."""
        x, rope = self.wte(idx), None  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            rope = rope_table(positions, self.config.head_width, self.config.rope_theta)
        if self.ln_e is not None:
            x = self.ln_e(x)
        if x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16:
            x = x.bfloat16()  # half the bytes of the residual stream, and what FSDP's gathered weights give in any case
        return dropout(x, self.config.dropout if self.training else 0.0), rope

    def hidden_states(
        self, idx: Tensor, cache: Sequence[KVCache] | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Token ids (B, T) int64 at `positions` (T,), from 0 on if None -> the last norm's output (B, T, C)."""
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} positions do not fit block_size {self.config.block_size}")
        if positions is None:
            positions = torch.arange(T, device=idx.device)
        x, rope = self.embed(idx, positions)
        for i, block in enumerate(self.h):
            x = block(x, rope, cache[i] if cache is not None else None)
        out: Tensor = self.ln_f(x)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., C) -> logits (..., V)."""
        y = F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)
        return softcap(y, self.config.logit_softcap)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, *, reduction: Literal["mean", "none"] = "mean"
    ) -> Tensor:
        """Token ids (B, T) int64 -> logits (B, T, V), or with targets (B, T) the float32 cross-entropy in nats.

        The loss is the mean over all targets, or (B, T) for "none"; a target of -1 is left out (0 for "none").
        Rows of V that no token uses take part. Raises ValueError if T exceeds block_size.
        """
        x = self.hidden_states(idx)
        return self.logits(x) if targets is None else self.loss(x, targets, reduction)

    def loss(self, x: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """Hidden states (B, T, C) and targets (B, T) -> the loss, as `forward` gives it."""
        head = self.wte.weight if self.lm_head is None else self.lm_head.weight
        return next_token_loss(x, head, targets, self.config.logit_softcap, reduction)
