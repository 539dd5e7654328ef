"""Export: what transformers and our own reader make of the folder, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import CharTokenizer, get_tokenizer
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import TEMPORARY_PREFIX, DiskFullError
from nanogpt_cli.model.build import build_model, meta_parameters
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.weights.hugging_face import read_folder
from tests.models import exported

pytest.importorskip("safetensors", reason="the extra hf is not installed")

GPT2 = ModelSettings(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=40)
TOKENIZER = {"tokenizer.toml", "tokenizer.json", "tokenizer_config.json"}
IDX = torch.arange(30)[None] % 33


def random_model(settings: ModelSettings) -> GPT:
    generator = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in meta_parameters(settings).items()}
    return build_model(settings, weights, "")


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": False}, {"activation": "gelu"}, {"tie_weights": False}, {"bias": False, "tie_weights": False}],
)
def test_transformers_gives_equal_logits_and_importing_again_equal_bits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    model = random_model(replace(GPT2, **changes))
    done = exported(model, tmp_path / "out")
    assert done.format == "gpt2"
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.eval()(IDX).logits - model(IDX)).detach().abs().max() < 1e-5
    settings, tensors, _ = read_folder(tmp_path / "out")
    assert settings == model.config
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in tensors.items())


def test_a_saved_copy_of_transformers_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    model = random_model(GPT2)
    exported(model, tmp_path / "out")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    settings, tensors, _ = read_folder(tmp_path / "theirs")
    assert settings == GPT2
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in tensors.items())


def test_padding_rows_are_cut_and_logits_stay(tmp_path: Path) -> None:
    model = random_model(GPT2)
    done = exported(model, tmp_path / "out", CharTokenizer(map(chr, range(65, 98))))
    settings, tensors, _ = read_folder(tmp_path / "out")
    assert settings.vocab_size == 33
    assert torch.allclose(build_model(settings, tensors, "")(IDX), model(IDX)[..., :33], atol=1e-6)
    assert any("40 to 33 rows" in note for note in done.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_number_formats(tmp_path: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    model = random_model(GPT2)
    exported(model, tmp_path / "half", dtype=dtype)
    exported(model, tmp_path / "full")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    tensors = read_folder(tmp_path / "half").tensors
    assert all(torch.equal(t, model.state_dict()[name].to(dtype)) for name, t in tensors.items())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype


def test_the_config_has_what_other_readers_ask_for(tmp_path: Path) -> None:
    exported(random_model(replace(GPT2, activation="gelu")), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] == 32
    assert config["activation_function"] == "gelu"
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (
        config["eos_token_id"] == json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rotary"},
        {"norm": "rmsnorm", "bias": False},
        {"qk_norm": True},
        {"embed_norm": True},
        {"activation": "relu2", "tie_weights": False},
        {"logit_softcap": 15.0},
    ],
)
def test_other_architectures_get_our_own_format_and_say_so(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = random_model(replace(GPT2, **changes))
    done = exported(model, tmp_path / "out", CharTokenizer(map(chr, range(65, 98))))
    assert done.format == "nanogpt"
    assert "none that others know" in done.notes[0]
    assert f"{next(iter(changes))} = " in done.notes[0]
    settings, tensors, _ = read_folder(tmp_path / "out")
    assert torch.equal(build_model(settings, tensors, "")(IDX), model(IDX)[..., :33]) or torch.allclose(
        build_model(settings, tensors, "")(IDX), model(IDX)[..., :33], atol=1e-6
    )
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    with pytest.raises(ValueError, match="nanogpt"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_zero_biases_of_a_model_with_biases_stay(tmp_path: Path) -> None:
    model = random_model(GPT2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.zero_()
    exported(model, tmp_path / "out")
    assert read_folder(tmp_path / "out")[0].bias


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="nothing is overwritten"):
        exported(random_model(GPT2), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_an_empty_folder_and_missing_parents_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    exported(random_model(GPT2), tmp_path / "a")
    exported(random_model(GPT2), tmp_path / "b" / "c", get_tokenizer("bytes"))
    names = {path.name for path in (tmp_path / "b" / "c").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "README.md", *TOKENIZER}
    (tmp_path / "plain.txt").write_text("")
    modes = {path.stat().st_mode for path in (tmp_path / "b" / "c").iterdir()}
    assert modes == {(tmp_path / "plain.txt").stat().st_mode}
    assert (tmp_path / "b" / "c").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_reads_back_differently_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = safetensors.torch.save_file

    def spoiled(tensors: dict[str, torch.Tensor], *more: Any, **how: Any) -> None:
        name = "transformer.h.0.ln_1.bias"
        real({**tensors, name: tensors[name] + 1e-7}, *more, **how)

    monkeypatch.setattr("safetensors.torch.save_file", spoiled)
    with pytest.raises(NanogptError, match=r"h\.0\.ln_1\.bias reads back differently"):
        exported(random_model(GPT2), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DiskFullError):
        exported(random_model(GPT2), tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
