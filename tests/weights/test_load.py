"""From one word to a model, and what is said where there is none."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import CharTokenizer
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import save_checkpoint
from nanogpt_cli.weights import load as loading
from nanogpt_cli.weights.load import load_model
from nanogpt_cli.weights.pretrained import HubRepo
from tests.models import (
    ALPHABET,
    SETTINGS,
    checkpoint,
    exported,
    make_run,
    nanogpt_checkpoint,
    random_model,
    random_weights,
)

NANOGPT = replace(SETTINGS, bias=False, activation="gelu")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def holds(model: GPT, settings: ModelSettings, seed: int) -> bool:
    return all(torch.equal(model.state_dict()[n], t) for n, t in random_weights(settings, seed).items())


def test_a_run_means_its_best_weights() -> None:
    make_run(Path("runs/a"))
    loaded = load_model("runs/a")
    assert holds(loaded.model, SETTINGS, seed=0)
    assert not loaded.model.training
    assert (loaded.step, loaded.token_limit) == (7, 18)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.to_toml() == ALPHABET.to_toml()
    assert loaded.config is not None
    assert loaded.config.model == SETTINGS
    assert "best.pt (step 7, validation loss 2.5000)" in loaded.source


def test_a_run_with_a_published_name_says_how_to_get_the_other() -> None:
    make_run(Path("runs/gpt2"))
    loaded = load_model("gpt2")
    assert loaded.source.startswith("runs/gpt2/best.pt")
    assert "openai-community/gpt2" in loaded.notes[0]


@pytest.mark.parametrize("word", ["last", "ckpt.pt", "runs/a/ckpt.pt"])
def test_other_checkpoints_of_a_run(word: str) -> None:
    make_run(Path("runs/a"))
    loaded = load_model("a", word)
    assert holds(loaded.model, SETTINGS, seed=1)
    assert loaded.step == 9


def test_a_run_that_was_not_evaluated_yet_means_its_last_weights() -> None:
    run = make_run(Path("runs/a"))
    run.best.unlink()
    loaded = load_model("a")
    assert loaded.step == 9
    assert "no best.pt" in loaded.notes[0]
    run.checkpoint.unlink()
    with pytest.raises(UserError, match="nanogpt resume runs/a"):
        load_model("a")


def test_bare_words_are_paths_then_runs_then_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def folder(repo: HubRepo) -> Path:
        asked.append(repo.name)
        return Path("gpt2-folder")

    monkeypatch.setattr(loading, "hub_directory", folder)
    pytest.importorskip("safetensors", reason="the extra hf is not installed")
    exported(random_model(replace(SETTINGS, vocab_size=50257)), Path("gpt2-folder"))
    loaded = load_model("gpt2_medium")
    assert (asked, loaded.released) == (["openai-community/gpt2-medium"], "gpt2-medium")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.kind == "gpt2"
    make_run(Path("runs/gpt2_medium"))
    assert load_model("gpt2-medium").step == 7
    assert len(asked) == 1


def test_of_two_runs_that_are_named_alike_the_exact_one_is_meant() -> None:
    make_run(Path("runs/a-b_c"))
    make_run(Path("runs/a_b_c"))
    assert load_model("a_b_c").source.startswith("runs/a_b_c/")
    assert load_model("a-b_c").source.startswith("runs/a-b_c/")
    with pytest.raises(UserError, match="a-b-c: no such model"):
        load_model("a-b-c")


def test_an_unknown_word_gets_the_nearest_name() -> None:
    make_run(Path("runs/shakespeare"))
    with pytest.raises(UserError) as error:
        load_model("shakespare")
    text = str(error.value)
    assert "Did you mean shakespeare?" in text
    assert "gpt2-xl" in text
    for word in ("x" * 5000, "a\0b", ""):
        with pytest.raises(UserError):
            load_model(word)


def test_folders_and_files_that_are_no_models() -> None:
    Path("empty").mkdir()
    with pytest.raises(UserError, match=r"config\.toml"):
        load_model("empty")
    Path("notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"notes\.txt"):
        load_model("notes.txt")
    torch.save({"weights": torch.zeros(2)}, "other.pt")
    with pytest.raises(UserError, match="not a checkpoint of this program"):
        load_model("other.pt")


def test_a_checkpoint_file_stands_for_itself() -> None:
    save_checkpoint(checkpoint(seed=4), Path("some.pt"))
    assert holds(load_model("some.pt").model, SETTINGS, seed=4)


def test_a_damaged_best_names_what_can_still_be_used() -> None:
    run = make_run(Path("runs/a"))
    content = bytearray(run.best.read_bytes())
    content[len(content) // 2] ^= 1
    run.best.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged.*--checkpoint ckpt\.pt"):
        load_model("a")


def test_a_pickle_with_code_is_never_run() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch pwned",)

    torch.save({"model": {}, "model_args": Evil()}, "evil.pt")
    with pytest.raises(UserError, match="refused"):
        load_model("evil.pt")
    assert not Path("pwned").exists()


def test_weights_that_are_not_finite_are_refused() -> None:
    content = checkpoint()
    content["model"]["ln_f.bias"][3] = float("nan")
    save_checkpoint(content, Path("nan.pt"))
    with pytest.raises(UserError, match=r"NaN or infinity \(ln_f\.bias\)"):
        load_model("nan.pt")


def test_checkpoint_words_that_do_not_exist() -> None:
    make_run(Path("runs/a"))
    with pytest.raises(UserError, match=r"best, last, or a file\. Files in runs/a: best\.pt, ckpt\.pt"):
        load_model("a", "newest")


@pytest.mark.parametrize("word", ["out", "out/ckpt.pt"])
@pytest.mark.parametrize("place", ["data/tiny", "out", "elsewhere"])
def test_nanogpt_files_with_their_alphabet(word: str, place: str) -> None:
    Path("out").mkdir()
    torch.save(nanogpt_checkpoint(NANOGPT), "out/ckpt.pt")
    Path(place).mkdir(parents=True, exist_ok=True)
    meta = {
        "vocab_size": 18,
        "itos": dict(enumerate(ALPHABET.alphabet)),
        "stoi": {character: i for i, character in enumerate(ALPHABET.alphabet)},
    }
    (Path(place) / "meta.pkl").write_bytes(pickle.dumps(meta))
    loaded = load_model(word)
    assert holds(loaded.model, NANOGPT, seed=0)
    assert loaded.model.config == NANOGPT
    assert loaded.step == 100
    if place == "elsewhere":
        assert loaded.tokenizer is None
        assert "no meta.pkl" in loaded.notes[0]
    else:
        assert isinstance(loaded.tokenizer, CharTokenizer)
        assert loaded.tokenizer.alphabet == ALPHABET.alphabet


def test_nanogpt_bpe_models_take_gpt2_and_leave_padding_out() -> None:
    settings = replace(NANOGPT, vocab_size=50304)
    Path("out").mkdir()
    torch.save(nanogpt_checkpoint(settings), "out/ckpt.pt")
    loaded = load_model("out")
    assert loaded.tokenizer is not None
    assert (loaded.tokenizer.kind, loaded.token_limit) == ("gpt2", 50257)


def test_nanogpt_data_is_found_beside_the_out_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone" / "out").mkdir(parents=True)
    torch.save(nanogpt_checkpoint(NANOGPT), "clone/out/ckpt.pt")
    assert load_model("clone/out").data == {"name": "tiny"}
    folder = tmp_path / "clone" / "data" / "tiny"
    folder.mkdir(parents=True)
    (folder / "val.bin").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_model("../clone/out").data == {"name": "tiny", "folder": str(Path("../clone/data/tiny").absolute())}


def test_an_alphabet_of_another_size_is_not_the_models() -> None:
    Path("data/tiny").mkdir(parents=True)
    meta = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}
    Path("data/tiny/meta.pkl").write_bytes(pickle.dumps(meta))
    torch.save(nanogpt_checkpoint(NANOGPT), "ckpt.pt")
    assert load_model("ckpt.pt").tokenizer is None


class TestFolders:
    @pytest.fixture(autouse=True)
    def folder(self) -> None:
        pytest.importorskip("safetensors", reason="the extra hf is not installed")

    def export(self, settings: ModelSettings = SETTINGS, **files: bytes) -> None:
        exported(random_model(settings), Path("hf"))
        for name, content in files.items():
            Path("hf", name).write_bytes(content)

    def test_ours_with_its_tokenizer(self) -> None:
        import tomli_w

        self.export(**{"tokenizer.toml": tomli_w.dumps(ALPHABET.to_toml()).encode()})
        for word in ("hf", "hf/model.safetensors"):
            loaded = load_model(word)
            assert holds(loaded.model, SETTINGS, seed=0)
            assert isinstance(loaded.tokenizer, CharTokenizer)

    def test_a_foreign_tokenizer_is_not_taken_for_gpt2s(self) -> None:
        vocabulary = json.dumps({"a": 0, "b": 1}).encode()
        self.export(replace(SETTINGS, vocab_size=50257), **{"vocab.json": vocabulary})
        loaded = load_model("hf")
        assert loaded.tokenizer is None
        assert "is not GPT-2's" in loaded.notes[0]

    def test_no_tokenizer_is_said_to_be_none(self) -> None:
        self.export()
        assert "there is no tokenizer in hf: no text can be read or written" in load_model("hf").notes

    def test_no_tokenizer_and_a_table_of_gpt2s_size(self) -> None:
        self.export(replace(SETTINGS, vocab_size=50257))
        loaded = load_model("hf")
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.kind == "gpt2"

    @pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
    def test_gpt2s_own_vocabulary_is_recognised(self, name: str) -> None:
        from nanogpt_cli.data.tokenizers import gpt2_files

        vocabulary = gpt2_files()["vocab.json"]
        content = vocabulary if name == "vocab.json" else b'{"model": {"vocab": ' + vocabulary + b"}}"
        self.export(replace(SETTINGS, vocab_size=50257), **{name: content})
        loaded = load_model("hf")
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.kind == "gpt2"

    @pytest.mark.parametrize("content", [b"[]", b"{", b'{"model": 3}'])
    def test_a_vocabulary_that_cannot_be_understood(self, content: bytes) -> None:
        self.export(replace(SETTINGS, vocab_size=50257), **{"tokenizer.json": content})
        assert load_model("hf").tokenizer is None
