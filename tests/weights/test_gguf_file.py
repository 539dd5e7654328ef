"""GGUF: what its reader finds, what is refused, and the same text from llama.cpp where that is installed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanogpt_cli.cli import main
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.bpe import train_bpe
from nanogpt_cli.data.tokenizers import Tokenizer, get_tokenizer
from nanogpt_cli.inference.sample import write_samples
from nanogpt_cli.model.generate import Sampling
from nanogpt_cli.weights.load import load_model
from tests.models import LLAMA, MODERN, QWEN3, make_run

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

GPT2 = ModelSettings(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=50304, bias=False)
PROMPT = "Hello wörld, 12345 don't"
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**LLAMA, "head_dim": 8, "n_inner": 64},
    "qwen3": {**QWEN3, "head_dim": 16, "n_inner": 64},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(architecture: str, kind: str, tokenizer: Tokenizer | None = None) -> Any:
    tokenizer = tokenizer or get_tokenizer("gpt2")
    rows = tokenizer.size + 47  # GPT-2's padding
    make_run(Path("runs/a"), replace(GPT2, **FAMILIES[architecture], vocab_size=rows), tokenizer)
    assert main.run(["export", "a", "model.gguf", "--type", kind]) == 0
    return gguf.GGUFReader("model.gguf")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gpt2", "f16"), ("llama", "f32"), ("llama", "f16"), ("llama", "q8_0"), ("qwen3", "q8_0")],
)
def test_the_reader_finds_all(architecture: str, kind: str) -> None:
    reader = export(architecture, kind)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.context_length"] == 64
    assert (fields["tokenizer.ggml.pre"], fields["tokenizer.ggml.eos_token_id"]) == ("gpt-2", 50256)
    assert len(fields["tokenizer.ggml.tokens"]) == 50257
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["token_embd.weight"].tensor_type.name == kind.upper()
    assert tensors["blk.0.ffn_norm.weight"].tensor_type.name == "F32"
    assert ("output.weight" in tensors) == (architecture == "llama")
    if architecture == "llama":
        weights = load_model("a").model.state_dict()["h.0.attn.c_attn.weight"]
        row = {"f32": 1e-9, "f16": 1e-3, "q8_0": 1e-2}[kind]
        found = gguf.quants.dequantize(tensors["blk.0.attn_q.weight"].data, tensors["blk.0.attn_q.weight"].tensor_type)
        pairs = [0, 4, 1, 5, 2, 6, 3, 7]  # halves of a head of 8, interleaved
        assert np.allclose(found[8:16], weights[[8 + i for i in pairs]], atol=row)


def test_what_llama_cpp_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/chars"))
    make_run(Path("runs/modern"), replace(GPT2, **MODERN), get_tokenizer("gpt2"))
    for words, said in (
        (["chars", "a.gguf"], "--tokenizer gpt2 or bpe:4096"),
        (["modern", "a.gguf"], "no GGUF of this architecture, since llama.cpp lacks it. In the way, with"),
        (["chars", "a.gguf", "--dtype", "float16"], "--type f32, f16 or q8_0"),
        (["chars", "folder", "--type", "f16"], "--dtype belongs to a folder"),
    ):
        assert main.run(["export", *words]) == 2
        assert said in capsys.readouterr().err
    assert not list(Path().glob("*.gguf"))
    Path("b.gguf").write_text("mine")
    make_run(Path("runs/a"), GPT2, get_tokenizer("gpt2"))
    assert main.run(["export", "a", "b.gguf"]) == 2
    assert Path("b.gguf").read_text() == "mine"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_llama_cpp_writes_the_same_text(architecture: str, own: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (built from source)")
    export(
        architecture, "f32", train_bpe([PROMPT * 9 + "the other day, they said it is the one "], 300) if own else None
    )
    loaded = load_model("a")
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(PROMPT).tolist()
    theirs = llama_cpp.Llama("model.gguf", n_ctx=64, verbose=False, logits_all=True)
    assert theirs.tokenize(PROMPT.encode(), add_bos=False) == ids
    for text in ("a  b\n\n \t c\r\n", "I'll, it's 'S WE'RE 3.14", "é道可道🙂", "<|endoftext|>"):
        assert theirs.tokenize(text.encode(), add_bos=False) == loaded.tokenizer.encode(text).tolist(), text
    theirs.eval(ids)
    ours = loaded.model(torch.tensor([ids]))[0, :, : loaded.token_limit].detach().numpy()
    assert np.abs(np.array(theirs.scores[: len(ids)]) - ours).max() < 1e-3 * np.abs(ours).max()
    theirs.reset()
    found = [token for token, _ in zip(theirs.generate(ids, top_k=1, temp=0.0), range(30), strict=False)]
    (sample,) = write_samples(loaded, ids, 1, Sampling(30, temperature=0))
    assert loaded.tokenizer.decode(found) == sample.text
