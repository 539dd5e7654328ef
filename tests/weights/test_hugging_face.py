"""Reading GPT-2 from Hugging Face folders, against their own library and against folders made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.model.build import build_model, crop_block_size, meta_parameters
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.weights import pretrained as hub
from nanogpt_cli.weights.hugging_face import LAYOUTS, read_folder, settings_of

safetensors = pytest.importorskip("safetensors.torch", reason="the extra hf is not installed")

SETTINGS = ModelSettings(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=11)
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 8,
    "n_positions": 16,
    "vocab_size": 11,
    "activation_function": "gelu_new",
}


def to_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter in the orientation of GPT-2's files."""
    return tensor.t() if name.endswith(tuple(LAYOUTS["gpt2"].transposed)) else tensor


SHAPES = [(1, 1, 8, 16, 11), (2, 2, 16, 32, 65), (3, 3, 27, 24, 257), (2, 5, 40, 64, 1000)]


def random_weights(settings: ModelSettings, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that are nowhere zero or one, so that no mistake hides."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in meta_parameters(settings).items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], prefix: str = "", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    stored = {prefix + name: to_stored(name, t).contiguous() for name, t in tensors.items()}
    safetensors.save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def hugging_face_model(n_layer: int, n_head: int, n_embd: int, block_size: int, vocab: int, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    torch.manual_seed(7)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            n_positions=block_size,
            vocab_size=vocab,
            bos_token_id=None,
            eos_token_id=None,
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more},
        )
    ).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.2)
    return model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_logits_gradients_and_greedy_text_are_those_of_transformers(
    tmp_path: Path, shape: tuple[int, int, int, int, int], activation: str
) -> None:
    theirs = hugging_face_model(*shape, activation_function=activation)
    theirs.save_pretrained(tmp_path)
    ours = build_model(*read_folder(tmp_path)[:2], str(tmp_path))
    block_size, vocab = shape[3:]
    idx = torch.randint(vocab, (3, block_size), generator=torch.Generator().manual_seed(1))
    targets = idx.roll(-1, 1)

    logits = theirs(idx).logits
    assert (ours(idx) - logits).detach().abs().max() < 1e-5 * max(1.0, float(logits.detach().abs().max()))

    ours.train()
    ours(idx, targets).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    expected = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        their_grad = to_stored(name, expected[f"transformer.{name}"].grad)
        assert p.grad is not None
        assert (p.grad - their_grad).abs().max() < 1e-5 * max(1.0, float(their_grad.abs().max())), name

    ours.eval()
    prompt = idx[:1, : block_size // 2]
    continued = theirs.generate(prompt, do_sample=False, max_new_tokens=block_size // 2, pad_token_id=0)
    sampling = Sampling(max_new_tokens=block_size - prompt.shape[1], temperature=0)
    own = [ids[0] for ids in generate(ours, prompt[0].tolist(), 1, sampling, token_limit=vocab)]
    assert own == continued[0, prompt.shape[1] : block_size].tolist()


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    theirs = hugging_face_model(2, 2, 16, 32, 65, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    ours = build_model(*read_folder(tmp_path)[:2], "")
    idx = torch.arange(10)[None]
    assert ours.lm_head is not None
    assert torch.allclose(ours(idx), theirs(idx).logits, atol=1e-5)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    tensors = {n: t.half() for n, t in random_weights(SETTINGS).items()}
    model = build_model(*read_folder(write_folder(tmp_path, tensors))[:2], "")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.wte.weight, tensors["wte.weight"].float())


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("extras", [False, True])
def test_prefix_masks_and_a_stored_tied_head_make_no_difference(tmp_path: Path, prefix: str, extras: bool) -> None:
    tensors = random_weights(SETTINGS)
    stored = {prefix + name: to_stored(name, t).contiguous() for name, t in tensors.items()}
    if extras:
        for i in range(SETTINGS.n_layer):
            stored[f"{prefix}h.{i}.attn.bias"] = torch.ones(16, 16).tril()[None, None]
            stored[f"{prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        stored["lm_head.weight"] = tensors["wte.weight"].clone()
    write_folder(tmp_path, {})
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    settings, read, _ = read_folder(tmp_path)
    assert settings == SETTINGS
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}])
def test_a_head_that_differs_from_the_table_is_never_dropped(tmp_path: Path, said: dict[str, bool]) -> None:
    tensors = random_weights(SETTINGS)
    head = {"lm_head.weight": torch.randn(11, 8)}
    settings, read, notes = read_folder(write_folder(tmp_path, {**tensors, **head}, **said))
    assert not settings.tie_weights
    assert torch.equal(read["lm_head.weight"], head["lm_head.weight"])
    assert "lm_head.weight differs: it is read as its own" in notes[0]


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = random_weights(SETTINGS)
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    stored = {name: to_stored(name, t).contiguous() for name, t in tensors.items()}
    first = dict(list(stored.items())[:9])
    safetensors.save_file(first, tmp_path / "a.safetensors")
    safetensors.save_file({n: t for n, t in stored.items() if n not in first}, tmp_path / "b.safetensors")
    index = {"weight_map": {n: "a.safetensors" if n in first else "b.safetensors" for n in stored}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(t, tensors[n]) for n, t in read_folder(tmp_path)[1].items())


def test_missing_extra_and_misshapen_tensors_are_named_together(tmp_path: Path) -> None:
    tensors = random_weights(SETTINGS)
    del tensors["h.1.ln_2.bias"]
    tensors["h.0.attn.c_attn.weight"] = tensors["h.0.attn.c_attn.weight"].t()
    tensors["score.weight"] = torch.zeros(2)
    with pytest.raises(UserError) as error:
        read_folder(write_folder(tmp_path, tensors))
    text = str(error.value)
    assert "missing: transformer.h.1.ln_2.bias" in text
    assert "unexpected: transformer.score.weight" in text
    assert "h.0.attn.c_attn.weight (24, 8), needed (8, 24)" in text
    assert str(tmp_path) in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gpt_neo"}, "gpt_neo"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "relu"}, "'relu'"),
        ({"n_layer": None}, "n_layer"),
        ({"n_embd": "wide"}, "n_embd"),
    ],
)
def test_a_variant_that_computes_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=r"config\.json") as error:
        read_folder(write_folder(tmp_path, random_weights(SETTINGS), **changes))
    assert word in str(error.value)


def test_a_missing_key_of_the_config_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, random_weights(SETTINGS))
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    with pytest.raises(UserError, match="vocab_size is missing"):
        read_folder(tmp_path)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(random_weights(SETTINGS), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        read_folder(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, None])
def test_damaged_files_are_a_clear_message(tmp_path: Path, damage: bytes | None) -> None:
    path = write_folder(tmp_path, random_weights(SETTINGS)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50] if damage is None else damage)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        read_folder(tmp_path)


def test_no_weight_is_drawn_or_shared_when_a_model_is_built() -> None:
    tensors = random_weights(SETTINGS)
    before = torch.get_rng_state()
    model = build_model(SETTINGS, tensors, "here")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(p.is_meta for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert not model.training


def test_a_cropped_context_is_the_start_of_the_long_one() -> None:
    tensors = random_weights(SETTINGS)
    settings, cropped = crop_block_size(SETTINGS, tensors, 5, "here")
    idx = torch.tensor([[1, 2, 3, 4, 5]])
    assert torch.equal(build_model(settings, cropped, "")(idx), build_model(SETTINGS, tensors, "")(idx))
    with pytest.raises(UserError, match="longer than the 16 positions that gpt2"):
        crop_block_size(SETTINGS, tensors, 17, "gpt2")


def test_the_four_released_models_have_their_parameter_counts() -> None:
    counts = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    sizes = {
        "gpt2": (12, 12, 768),
        "gpt2-medium": (24, 16, 1024),
        "gpt2-large": (36, 20, 1280),
        "gpt2-xl": (48, 25, 1600),
    }
    assert hub.GPT2_MODELS.keys() == counts.keys()
    for name, (layers, heads, width) in sizes.items():
        settings = ModelSettings(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
        with torch.device("meta"):
            assert sum(p.numel() for p in GPT(settings).parameters()) == counts[name]


def test_a_cached_hub_model_is_read_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hf is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    revision = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    snapshot = tmp_path / "models--openai-community--gpt2" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    write_folder(snapshot, random_weights(SETTINGS))
    assert hub.hub_directory(hub.GPT2_MODELS["gpt2"]) == snapshot
    assert read_folder(snapshot)[0] == SETTINGS


def test_the_released_config_is_understood() -> None:
    config = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    }
    expected = ModelSettings(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257)
    assert settings_of(config, Path("config.json")) == expected


def test_an_unreachable_hub_says_what_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_package = pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(hub_package.HfApi, "repo_info", unreachable)
    with pytest.raises(NanogptError, match="no route to host") as error:
        hub.hub_directory(hub.GPT2_MODELS["gpt2-xl"])
    assert "openai-community/gpt2-xl/resolve/15ea56de" in str(error.value)


def test_an_unreachable_hub_is_one_quick_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hf is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s to try again"))
    with pytest.raises(NanogptError, match="could not be fetched"):
        hub.hub_directory(hub.GPT2_MODELS["gpt2"])
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match=r"no model\.safetensors\.$"):
        read_folder(tmp_path)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_folder(tmp_path, random_weights(SETTINGS))
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(UserError, match="pip install safetensors"):
        read_folder(tmp_path)
