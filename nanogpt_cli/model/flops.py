"""Sizes: parameters by part, FLOPs a token, memory and checkpoint by part. Formulas, nothing measured."""

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.weights import parameter_shapes

FLOAT32 = 4  # bytes


def parameter_table(settings: ModelSettings) -> dict[str, int]:
    """Parameters by part; vocab_size must be set. A tied head has none of its own."""
    table = {"token embedding": 0, "position embedding": 0, "attention": 0, "mlp": 0, "norms": 0, "head": 0}
    for name, shape in parameter_shapes(settings).items():
        count = 1
        for size in shape:
            count *= size
        table[_part(name)] += count
    return {part: count for part, count in table.items() if count}


def _part(name: str) -> str:
    for piece, part in (
        ("wte.", "token embedding"),
        ("wpe.", "position embedding"),
        ("lm_head.", "head"),
        (".attn.", "attention"),
        (".mlp.", "mlp"),
    ):
        if piece in name:
            return part
    return "norms"


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
    attention = 12 * settings.n_layer * settings.n_embd * settings.block_size  # H Q = n_embd
    return 6 * n + (attention / 2 if causal else attention)


def moments_bytes(settings: ModelSettings, optimizer: str) -> int:
    """float32 moments: two a parameter for AdamW, one for the block matrices that Muon updates."""
    shapes = parameter_shapes(settings)
    total = 0
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        muon = optimizer == "muon" and name.startswith("h.") and len(shape) == 2
        total += FLOAT32 * count * (1 if muon else 2)
    return total


def checkpoint_bytes(settings: ModelSettings, optimizer: str) -> dict[str, int]:
    """ckpt.pt by part: float32 weights and moments."""
    weights = FLOAT32 * sum(parameter_table(settings).values())
    return {"weights": weights, "moments": moments_bytes(settings, optimizer)}


def memory_estimate(settings: ModelSettings, batch_size: int, optimizer: str, dtype: str) -> dict[str, int]:
    """Bytes one device needs to train with micro-batches of `batch_size` rows, by part; an estimate.

    Activations: about 16 C elements a token and layer stay for the backward pass (norms, q, k, v, attention output,
    both MLP layers, residuals), in `dtype`, and on a CPU half of the attention weights. Logits: one float32 copy and
    one of their gradient in `dtype`.
    """
    wide = FLOAT32 if dtype == "float32" else 2
    weights = FLOAT32 * sum(parameter_table(settings).values())
    tokens = batch_size * settings.block_size
    per_layer = 16 * settings.n_embd + settings.n_head * settings.block_size / 2
    return {
        "weights": weights if dtype == "float32" else weights + weights // 2,  # autocast keeps a 16-bit copy
        "gradients": weights,
        "moments": moments_bytes(settings, optimizer),
        "activations": int(tokens * settings.n_layer * per_layer * wide),
        "logits": tokens * (settings.vocab_size or 0) * (FLOAT32 + wide),
    }
