"""Sizes: parameters by part, FLOPs a token, memory and checkpoint by part. Formulas, nothing measured."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.build import meta_parameters
from nanogpt_cli.model.kernels.attention import query_blocks
from nanogpt_cli.model.kernels.loss import logits_at_once

FLOAT32 = 4  # bytes
PARTS = {  # by a piece of a parameter's name
    "wte.": "token embedding",
    "wpe.": "position embedding",
    ".attn.": "attention",
    ".mlp.": "mlp",
    "ln_": "norms",
    "lm_head.": "head",
}


def _parameters(settings: ModelSettings) -> Iterator[tuple[str, Tensor, int]]:
    """Name, shape on the meta device, and elements in the whole model: layers are all alike, so one is looked at."""
    for name, p in meta_parameters(replace(settings, n_layer=1)).items():
        yield name, p, p.numel() * (settings.n_layer if name.startswith("h.") else 1)


def parameter_table(settings: ModelSettings) -> dict[str, int]:
    """Parameters by part; vocab_size must be set. A tied head has none of its own."""
    table = dict.fromkeys(PARTS.values(), 0)
    for name, _, size in _parameters(settings):
        table[next(part for piece, part in PARTS.items() if piece in name)] += size
    return {part: count for part, count in table.items() if count}


def flops_per_token(settings: ModelSettings, *, causal: bool = False) -> float:
    """FLOPs of forward and backward for one token: 6N + 12 L H Q T (PaLM, Chowdhery et al. 2022, appendix B).

    N: parameters used in matrix products, that is without position embeddings and, where the head is untied, without
    the input table. L layers, H heads of width Q, T context. Recomputation does not count. `causal` halves the
    attention term: what a kernel that skips the future really does.
    """
    table = parameter_table(settings)
    n = sum(table.values()) - table.get("position embedding", 0)
    if not settings.tie_weights:
        n -= table["token embedding"]
    attention = 12 * settings.n_layer * settings.n_head * settings.head_width * settings.block_size
    return 6 * n + (attention / 2 if causal else attention)


def moments_bytes(settings: ModelSettings, optimizer: str) -> int:
    """float32 moments: two a parameter for AdamW, one for the block matrices that Muon updates."""
    total = 0
    for name, p, size in _parameters(settings):
        muon = optimizer == "muon" and name.startswith("h.") and p.dim() == 2
        total += size if muon else 2 * size
    return FLOAT32 * total


def checkpoint_bytes(settings: ModelSettings, optimizer: str) -> dict[str, int]:
    """ckpt.pt by part: float32 weights and moments."""
    weights = FLOAT32 * sum(parameter_table(settings).values())
    return {"weights": weights, "moments": moments_bytes(settings, optimizer)}


def memory_estimate(
    settings: ModelSettings,
    batch_size: int,
    optimizer: str,
    dtype: str,
    *,
    device: str,
    activation_checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes one device needs to train with micro-batches of `batch_size` rows, by part; an estimate for eager mode.

    With w bytes a number of `dtype`, for the way back a layer keeps of every token 8C bytes of float32 (the residual
    stream before each norm) and w bytes of each number in both norms' results, q, k, v, attention's result, and the MLP
    before and after its activation (swiglu: gate, its activation, up, their product); a CPU also attention weights,
    half of nh T, and dropout masks 2 bytes an element. Logits: as many as the loss holds at once, in `dtype`, in
    float32, as probabilities, and their gradient. Working space: what the way back through one layer's MLP holds. With
    activation checkpointing a layer keeps its input alone, and one of them is worked out again.
    """
    w = FLOAT32 if dtype == "float32" else 2
    weights = FLOAT32 * sum(parameter_table(settings).values())
    tokens, C = batch_size * settings.block_size, settings.n_embd
    heads, inner = 2 * (settings.n_head + settings.kv_heads) * settings.head_width, settings.inner_width
    layer = 8 * C + (2 * C + heads + (4 if settings.activation == "swiglu" else 2) * inner) * w
    if device == "cpu":
        blocks = query_blocks(settings.block_size)
        scores = settings.n_head * sum((end - start) * end for start, end in blocks) // settings.block_size
        layer += scores * w + (2 * (scores + 2 * C) if settings.dropout else 0)
    kept = settings.n_layer * layer
    if activation_checkpointing:
        kept = settings.n_layer * FLOAT32 * C + layer
    logits = min(tokens * (settings.vocab_size or 0), logits_at_once(device, compiled=False))
    return {
        "weights": weights if w == FLOAT32 else weights + weights // 2,  # autocast keeps a 16-bit copy
        "gradients": weights,
        "moments": moments_bytes(settings, optimizer),
        "activations": tokens * kept,
        "logits": logits * (2 * w + 2 * FLOAT32),
        "working space": tokens * 4 * inner * w,
    }
