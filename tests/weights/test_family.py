"""Llama and Qwen3: the same numbers as Transformers in both directions, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import CharTokenizer
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.build import build_model
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.weights.hugging_face import leaves_as, read_folder
from tests.models import LLAMA, MODERN, QWEN3, exported, random_model

pytest.importorskip("safetensors", reason="the extra hf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "head_dim": 10}),
    ("Qwen3", {"head_dim": 8}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}),
]
SETTINGS = ModelSettings(n_layer=2, n_embd=32, block_size=32, vocab_size=50)


def their_model(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.mark.parametrize(("family", "changes"), KINDS, ids=str)
def test_logits_gradients_and_greedy_text_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    theirs = their_model(family, changes)
    theirs.save_pretrained(tmp_path)
    settings, tensors, notes = read_folder(tmp_path)
    assert notes == ()
    ours = build_model(settings, tensors, "")
    idx = torch.randint(50, (3, 32), generator=torch.Generator().manual_seed(1))
    logits = theirs(idx).logits
    assert (ours(idx) - logits).detach().abs().max() < 1e-5 * max(1.0, float(logits.detach().abs().max()))

    targets = idx.roll(-1, 1)
    ours.train()
    ours(idx, targets).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    found = export_names(ours.config, {n: p.grad for n, p in ours.named_parameters()})
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-5 * max(1.0, float(grad.abs().max())), name

    continued = theirs.generate(idx[:1, :8], do_sample=False, max_new_tokens=20, pad_token_id=0)
    steps = generate(ours.eval(), idx[0, :8].tolist(), 1, Sampling(20, temperature=0), token_limit=50)
    assert [ids[0] for ids in steps] == continued[0, 8:].tolist()


def export_names(settings: ModelSettings, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    from nanogpt_cli.weights.hugging_face import LAYOUTS

    return LAYOUTS[leaves_as(settings)[0]].to_theirs(settings, tensors)


@pytest.mark.parametrize(
    "changes", [LLAMA, {**LLAMA, "n_head": 8, "n_kv_head": None, "head_dim": None, "tie_weights": True}, QWEN3], ids=str
)
def test_transformers_gives_equal_logits_and_importing_again_equal_bits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = random_model(replace(SETTINGS, **changes))
    done = exported(model, tmp_path / "out", CharTokenizer(map(chr, range(65, 110))))
    assert done.format == ("qwen3" if changes.get("qk_norm") else "llama")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    idx = torch.arange(32)[None]
    assert torch.allclose(theirs(idx).logits, model(idx)[..., :45], atol=1e-5)
    settings, tensors, _ = read_folder(tmp_path / "out")
    assert all(torch.equal(t, model.state_dict()[n][: len(t)]) for n, t in tensors.items())
    assert build_model(settings, tensors, "")(idx).shape[-1] == 45
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_folder(tmp_path / "theirs").settings == settings


def test_what_cannot_leave_says_why() -> None:
    assert leaves_as(replace(SETTINGS, **{**QWEN3, "qk_gain": False})) == ("", ["qk_gain = False (--qk-gain)"])
    assert leaves_as(replace(SETTINGS, **LLAMA, logit_softcap=15.0)) == (
        "",
        ["logit_softcap = 15.0 (--logit-softcap 0.0)"],
    )
    kind, obstacles = leaves_as(replace(SETTINGS, **MODERN))
    assert (kind, "activation = relu2 (--activation gelu_tanh)" in obstacles) == ("", True)
    assert leaves_as(replace(SETTINGS, n_head=4, n_kv_head=4, n_inner=128)) == ("gpt2", [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None},
            "rotary positions are scaled",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary positions are scaled"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; gpt2, llama, qwen3 can be read"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types has"),
        ({"num_attention_heads": 5}, "not divisible"),
        ({"num_key_value_heads": 3}, "not divisible by n_kv_head = 3"),
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers, but there are"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"head_dim": 2**57}, "head_dim is"),
        ({"rope_theta": "x", "rope_parameters": None}, "rope_theta"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    their_model("Llama", {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {k: v for k, v in {**json.loads(path.read_text()), **changes}.items() if v is not None}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json") as error:
        read_folder(tmp_path)
    assert words in str(error.value)


def test_no_tensor_is_lost_without_a_word(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    their_model("Llama", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    idx = torch.arange(20)[None]
    tied = build_model(*read_folder(tmp_path)[:2], "")
    # a head of its own beside tie_word_embeddings: true
    head = torch.randn_like(stored["model.embed_tokens.weight"])
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**stored, "lm_head.weight": head, **angles}, tmp_path / "model.safetensors")
    settings, tensors, notes = read_folder(tmp_path)
    assert not settings.tie_weights
    assert "inv_freq" in notes[0]
    assert "lm_head.weight differs" in notes[1]
    untied = build_model(settings, tensors, "")
    assert torch.allclose(untied(idx), tied.hidden_states(idx) @ head.T, atol=1e-5)
    save_file({**stored, "model.layers.0.mlp.adapter": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.0\.mlp\.adapter"):
        read_folder(tmp_path)
