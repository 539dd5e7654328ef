"""`nanogpt export`: what lies in the folder, and what other programs make of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanogpt_cli.cli import main
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import get_tokenizer
from nanogpt_cli.weights.load import load_model
from tests.models import ALPHABET, SETTINGS, make_run, nanogpt_checkpoint, random_model

pytest.importorskip("safetensors", reason="the extra hf is not installed")

Call = Callable[..., tuple[int, str, str]]
GPT2_SHAPE = ModelSettings(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=50304, bias=False)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Export in an empty folder; exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main.run(["export", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_gpt2_run_works_in_transformers_with_its_tokenizer(call: Call) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    make_run(Path("runs/a"), GPT2_SHAPE, get_tokenizer("gpt2"))
    code, out, err = call("a", "out")
    assert code == 0
    assert "out: 9 tensors" in out
    for words in ("transformers and `nanogpt` read it", "50,304 to 50,257 rows", "no biases", "read back and compared"):
        assert words in err
    text = "Hello  wörld!\n\n \t🙂 don't 123456 <|endof"
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer(text)["input_ids"] == get_tokenizer("gpt2").encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 50256
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    idx = torch.tensor([tokenizer(text)["input_ids"]])
    ours = load_model("a").model(idx)[..., :50257]
    assert (theirs(idx).logits - ours).detach().abs().max() < 1e-5
    again = load_model("out")
    assert again.tokenizer is not None
    assert again.tokenizer.kind == "gpt2"
    assert not again.model.config.bias
    assert torch.equal(again.model.wte.weight, load_model("a").model.wte.weight[:50257])


def test_a_character_model_says_who_can_read_what(call: Call) -> None:
    make_run(Path("runs/a"))
    code, _, err = call("runs/a", "out/deep", "--dtype", "bfloat16", "--checkpoint", "last")
    assert code == 0
    assert "rounded from float32 to bfloat16" in err
    names = {path.name for path in Path("out/deep").iterdir()}
    tokenizer = {"tokenizer.toml", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "README.md", *tokenizer}
    card = Path("out/deep/README.md").read_text()
    assert "trained with nanogpt on tiny: 1,728 tokens" in card  # 9 updates of 12 x 16
    assert "library_name: transformers" in card
    again = load_model("out/deep")
    assert again.tokenizer is not None
    assert again.tokenizer.to_toml() == ALPHABET.to_toml()
    assert torch.equal(again.model.wte.weight, load_model("a", "last").model.wte.weight.bfloat16().float())


def test_a_modern_architecture_says_that_it_is_no_gpt2(call: Call) -> None:
    settings = replace(SETTINGS, position="rotary", norm="rmsnorm", activation="relu2", tie_weights=False)
    make_run(Path("runs/a"), settings)
    code, _, err = call("a", "out")
    assert code == 0
    assert "position = rotary (--position learned), norm = rmsnorm (--norm layernorm), activation = relu2 (" in err
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "nanogpt"
    idx = torch.arange(10)[None]
    assert torch.equal(load_model("out").model(idx), random_model(settings)(idx))


def test_nanogpt_models_keep_their_exact_gelu(call: Call) -> None:
    torch.save(nanogpt_checkpoint(replace(SETTINGS, bias=False, activation="gelu")), "ckpt.pt")
    code, _, err = call("ckpt.pt", "out")
    assert code == 0
    assert "exact GELU" in err
    assert "no tokenizer" in err
    assert json.loads(Path("out/config.json").read_text())["activation_function"] == "gelu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "out"], "no such model"),
        (["a", "runs/a"], "nothing is overwritten"),
        (["a", "out", "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        (["a"], "DIR"),
    ],
)
def test_mistakes_are_one_message_and_leave_nothing(call: Call, arguments: list[str], words: str) -> None:
    make_run(Path("runs/a"))
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert not Path("out").exists()


def test_a_missing_extra_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(Path("runs/a"))
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    code, _, err = call("a", "out")
    assert code == 2
    assert "pip install safetensors" in err
    assert [path.name for path in Path().iterdir()] == ["runs"]
