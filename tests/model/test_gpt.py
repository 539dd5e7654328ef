"""The model: every switch, causality, the same mathematics as a plain GPT-2, and where its weights come from."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.gpt import GPT, apply_rope, rope_table
from tests.models import LLAMA, MODERN, QWEN3, random_model, random_weights

TINY = ModelSettings(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20)
SWITCHES: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"activation": "gelu"},
    *({key: value} for key, value in MODERN.items()),
    {"position": "rotary", "n_head": 8},  # heads of two: one pair, which turns
    MODERN,
    {**MODERN, "bias": False},
    LLAMA,
    {**LLAMA, "qk_norm": True, "n_kv_head": 4},
    QWEN3,
]


def gpt(**changes: Any) -> GPT:
    return random_model(replace(TINY, **changes))


def tokens(rows: int = 3, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain_gpt2(w: dict[str, Tensor], idx: Tensor, settings: ModelSettings) -> Tensor:
    """GPT-2 or any of its variations, written out one position and head at a time; logits (B, T, V)."""

    def norm(x: Tensor, name: str) -> Tensor:
        if settings.norm == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + (settings.norm_eps or 1e-6)).sqrt() * w[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        return scaled + w.get(f"{name}.bias", 0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def place(x: Tensor, t: int) -> Tensor:
        """Turn a head's vector at position t: the first half of its pairs, slower and slower."""
        half, turning = len(x) // 2, max(1, len(x) // 4)
        out = x.clone()
        if settings.rope_theta is not None:  # Llama's: all pairs, the other way round
            for i in range(half):
                angle = -t * settings.rope_theta ** (-i / half)
                a, b = x[i], x[i + half]
                out[i] = a * math.cos(angle) + b * math.sin(angle)
                out[i + half] = b * math.cos(angle) - a * math.sin(angle)
            return out
        for i in range(turning):
            angle = t * 2 ** (-10 * i / max(1, turning - 1))
            a, b = x[i], x[i + half]
            out[i], out[i + half] = a * math.cos(angle) + b * math.sin(angle), b * math.cos(angle) - a * math.sin(angle)
        return out

    def unit(x: Tensor, name: str) -> Tensor:
        if not settings.qk_norm:
            return x
        unit = x / (x.pow(2).mean(-1, keepdim=True) + (settings.norm_eps or 1e-6)).sqrt()
        return unit * w[f"{name}.weight"] if settings.qk_gain else unit

    def activate(x: Tensor) -> Tensor:
        if settings.activation == "relu2":
            return x.clamp(min=0) ** 2
        if settings.activation == "swiglu":
            gate, up = x.chunk(2, dim=1)
            return gate / (1 + (-gate).exp()) * up
        if settings.activation == "gelu":
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    hs = settings.head_dim or settings.n_embd // settings.n_head
    heads_of_keys = settings.n_kv_head or settings.n_head
    group = settings.n_head // heads_of_keys
    rows = []
    for row in idx.tolist():
        x = torch.stack([w["wte.weight"][token] for token in row])  # (T, C)
        if settings.position == "learned":
            x = x + w["wpe.weight"][: len(row)]
        if settings.embed_norm:
            x = norm(x, "ln_e")
        for i in range(settings.n_layer):
            qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
            q, k, v = (
                part.split(hs, dim=1)
                for part in qkv.split([settings.n_head * hs, heads_of_keys * hs, heads_of_keys * hs], dim=1)
            )
            heads = []
            for h in range(settings.n_head):
                attn = f"h.{i}.attn"
                qs, ks = list(unit(q[h], f"{attn}.q_norm")), list(unit(k[h // group], f"{attn}.k_norm"))
                if settings.position == "rotary":
                    qs, ks = ([place(x, t) for t, x in enumerate(xs)] for xs in (qs, ks))
                seen = []
                for t in range(len(row)):
                    scores = torch.stack([qs[t] @ ks[s] for s in range(t + 1)]) / math.sqrt(hs)
                    if settings.qk_norm and not settings.qk_gain:
                        scores = scores * 1.36
                    seen.append(torch.softmax(scores, 0) @ v[h // group][: t + 1])
                heads.append(torch.stack(seen))
            x = x + linear(torch.cat(heads, dim=1), f"h.{i}.attn.c_proj")
            hidden = activate(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
            x = x + linear(hidden, f"h.{i}.mlp.c_proj")
        logits = norm(x, "ln_f") @ w["wte.weight" if settings.tie_weights else "lm_head.weight"].T
        cap = settings.logit_softcap
        rows.append(cap * logits / (logits**2 + cap**2).sqrt() if cap else logits)
    return torch.stack(rows)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_losses_and_gradients_are_those_of_a_plain_implementation(switch: dict[str, Any], training: bool) -> None:
    settings = replace(TINY, **switch)
    weights = {n: t.requires_grad_() for n, t in random_weights(settings).items()}
    x, y = tokens(), tokens(seed=1)
    logits = plain_gpt2(weights, x, settings)
    expected = F.nll_loss(logits.log_softmax(-1).flatten(0, 1), y.flatten())
    expected.backward()
    model = gpt(**switch).train(training)
    assert torch.allclose(model(x), logits, atol=1e-5)
    loss = model(x, y)
    loss.backward()
    assert abs(float(loss.detach() - expected.detach())) < 1e-5
    assert loss.dtype == torch.float32
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, weights[name].grad, atol=1e-5), name  # type: ignore[arg-type]


def test_20_updates_are_those_of_a_plain_implementation() -> None:
    settings = replace(TINY, bias=False, activation="gelu")
    theirs = {n: t.requires_grad_() for n, t in random_weights(settings).items()}
    ours = gpt(bias=False, activation="gelu").train()

    def adamw(named: dict[str, Any]) -> torch.optim.AdamW:
        groups = [
            {"params": [p for p in named.values() if p.dim() == d], "weight_decay": decay}
            for d, decay in ((2, 0.1), (1, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    named = dict(ours.named_parameters())
    optimizers = [(adamw(theirs), list(theirs.values())), (adamw(named), list(named.values()))]
    for step in range(20):
        x, y = tokens(2, 8, seed=step), tokens(2, 8, seed=100 + step)
        losses = [F.cross_entropy(plain_gpt2(theirs, x, settings).flatten(0, 1), y.flatten()), ours(x, y)]
        assert abs(float((losses[0] - losses[1]).detach())) < 1e-5
        for loss, (optimizer, parameters) in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    for name, p in named.items():
        assert torch.allclose(p, theirs[name], atol=1e-5), name


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("training", [False, True])
def test_the_future_does_not_change_the_past(switch: dict[str, Any], scale: float, training: bool) -> None:
    model = gpt(**switch).train(training)
    with torch.no_grad():
        for p in model.parameters():
            p *= scale
    idx = tokens(2)
    for t in (1, 6, 11):
        changed = idx.clone()
        changed[:, t:] = (changed[:, t:] + 7) % 20
        before, after = model(idx)[:, :t], model(changed)[:, :t]
        assert torch.equal(before, after), "a later token changed an earlier logit"
        assert not torch.equal(model(idx)[:, t], model(changed)[:, t])


def test_targets_of_minus_one_are_left_out() -> None:
    model = gpt()
    x, y = tokens(), tokens(seed=1)
    y[0, 3:] = -1
    each = model(x, y, reduction="none")
    assert each.shape == y.shape
    assert not each[0, 3:].any()
    assert torch.allclose(each.sum() / (y >= 0).sum(), model(x, y))
    assert torch.allclose(each[1], F.cross_entropy(model(x)[1], y[1], reduction="none"), atol=1e-6)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_a_seed_means_the_same_weights(switch: dict[str, Any]) -> None:
    settings = replace(TINY, **switch)
    first, second = (GPT(settings, generator=torch.Generator().manual_seed(5)).state_dict() for _ in range(2))
    other = GPT(settings, generator=torch.Generator().manual_seed(6)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["wte.weight"], other["wte.weight"])
    torch.manual_seed(5)
    assert torch.equal(GPT(settings).wte.weight, first["wte.weight"]), "the default generator is the default"


def test_weights_start_as_in_gpt2() -> None:
    settings = replace(TINY, n_embd=64, n_layer=8)
    weights = GPT(settings, generator=torch.Generator().manual_seed(0)).state_dict()
    for name, w in weights.items():
        if name.endswith("bias"):
            assert not w.any(), name
        elif w.dim() == 1:
            assert (w == 1).all(), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert float(w.std()) == pytest.approx(std, rel=0.1), name
            assert abs(float(w.mean())) < 4 * std / math.sqrt(w.numel()), name
    assert GPT(settings)(tokens(), tokens(seed=1)).item() == pytest.approx(math.log(20), rel=0.05)


def test_zero_init_starts_at_the_uniform_guess() -> None:
    settings = replace(TINY, zero_init=True, tie_weights=False)
    model = GPT(settings)
    assert not any(w.any() for n, w in model.named_parameters() if n.endswith(("c_proj.weight", "lm_head.weight")))
    assert model(tokens(), tokens(seed=1)).item() == pytest.approx(math.log(20), abs=1e-6)
    tied = GPT(replace(settings, tie_weights=True))
    assert tied.wte.weight.any(), "a tied head is the token table and cannot start at zero"


def test_names_are_those_of_the_gpt2_release() -> None:
    names = [name for name, _ in GPT(TINY).named_parameters()]
    assert names[:8] == [
        "wte.weight",
        "wpe.weight",
        "h.0.ln_1.weight",
        "h.0.ln_1.bias",
        "h.0.attn.c_attn.weight",
        "h.0.attn.c_attn.bias",
        "h.0.attn.c_proj.weight",
        "h.0.attn.c_proj.bias",
    ]
    assert list(GPT(TINY).state_dict()) == names, "a state_dict is the weights and nothing else"
    modern = list(GPT(replace(TINY, **MODERN)).state_dict())
    assert {"ln_e.weight", "lm_head.weight"} <= set(modern)
    assert not {"wpe.weight", "ln_f.bias"} & set(modern)


def test_shapes_alone_need_no_memory() -> None:
    with torch.device("meta"):
        model = GPT(ModelSettings(n_layer=48, n_head=25, n_embd=1600, block_size=1024, vocab_size=50257))
    assert sum(p.numel() for p in model.parameters()) == 1_557_611_200
    assert all(p.is_meta for p in model.parameters())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(replace(TINY, vocab_size=None))
    with pytest.raises(ValueError, match="13 positions do not fit block_size 12"):
        gpt()(tokens(length=13))


def test_turning_leaves_only_distances() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    products = [
        (apply_rope(q, rope_table(torch.tensor([t + 3]), 16)) * apply_rope(k, rope_table(torch.tensor([t]), 16))).sum()
        for t in (0, 5, 400)
    ]
    assert torch.allclose(torch.stack(products), products[0].expand(3), atol=1e-4)
    assert not torch.allclose(products[0], (q * k).sum(), atol=1e-3)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_bfloat16_stays_near_float32(switch: dict[str, Any]) -> None:
    model = gpt(**switch).train()
    x, y = tokens(), tokens(seed=1)
    loss = model(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x, y)
    assert mixed.dtype == torch.float32
    assert float(mixed.detach()) == pytest.approx(float(loss.detach()), rel=1e-2)
    mixed.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("switch", [{}, {**MODERN, "dropout": 0.1}, QWEN3], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_and_plain_agree(switch: dict[str, Any], whole: bool) -> None:
    settings = replace(TINY, n_layer=1, **switch)
    plain, compiled = (random_model(settings).train(not settings.dropout) for _ in range(2))
    for module in [compiled] if whole else compiled.h:
        module.compile(backend="aot_eager")
    x, y = tokens(), tokens(seed=1)
    losses = [model(x, y) for model in (plain, compiled)]
    assert torch.allclose(losses[0], losses[1], atol=1e-6)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_blocks_changes_nothing(dropout: float) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(replace(TINY, dropout=dropout), activation_checkpointing=recompute).train()
        torch.manual_seed(3)
        model(tokens(), tokens(seed=1)).backward()
        gradients.append([p.grad for p in model.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


def test_recomputed_blocks_keep_their_input_only() -> None:
    kept: list[int] = []
    for recompute in (False, True):
        count = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += x.numel()
            return x

        model = GPT(TINY, activation_checkpointing=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens(), tokens(seed=1))
        kept.append(count)
    assert kept[1] < kept[0] / 4


def test_a_recomputed_block_compiles_into_one_graph() -> None:
    model = GPT(TINY, activation_checkpointing=True)
    report = torch._dynamo.explain(model.h[0])(torch.randn(2, 8, TINY.n_embd, requires_grad=True))
    assert (report.graph_count, report.graph_break_count) == (1, 0)
