"""Tokenizers of Hugging Face with splits and special tokens of their own: the library's ids, and text from any id."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.data.bpe import tokenizer_from_json
from nanogpt_cli.data.hf_tokenizer import HfTokenizer, hf_tokenizer
from nanogpt_cli.data.tokenizers import tokenizer_from_toml
from nanogpt_cli.errors import UserError
from tests.foreign_tokenizers import STYLES, TEXT, write_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")

NASTY = ["", " ", "Hello  wörld!\n\n \t🙂 don't 123456", "<|endoftext|>", "a\r\nb", "\x00é道", TEXT]


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_the_library_and_come_back_as_text(tmp_path: Path, style: str) -> None:
    write_tokenizer(tmp_path, style)
    ours = tokenizer_from_json(tmp_path)
    assert isinstance(ours, HfTokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = theirs.token_to_id("<|endoftext|>")
    assert (ours.size, ours.eot) == (theirs.get_vocab_size(), end)
    for text in NASTY:
        ids = ours.encode(text).tolist()
        assert ours.decode(ids) == text
        assert ours.byte_lengths()[ids].sum() == len(text.encode())
        assert end not in ids  # written out it is text
        if "<|" not in text:
            assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert (ours.byte_lengths()[end], ours.decode([end])) == (0, "<|endoftext|>")
    for again in (tokenizer_from_toml(ours.to_toml()), pickle.loads(pickle.dumps(ours))):  # as workers get it
        assert again.identity == ours.identity
        assert [again.encode(text).tolist() for text in NASTY] == [ours.encode(text).tolist() for text in NASTY]


def test_a_text_ends_as_the_config_says(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "digits", end="</s>")
    for said in ("</s>", {"content": "</s>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert hf_tokenizer(tmp_path).eot == 0
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no token that ends a text"):
        hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"type": "Unigram"}}, "is a Unigram with the decoder ByteLevel, no byte-level BPE"),
        ({"decoder": {"type": "Sequence"}}, "with the decoder Sequence"),
        ({"decoder": None}, "is not understood"),
        ({"model": {"type": "BPE", "vocab": {"▁a": 9}, "merges": []}}, "is not understood"),
        ({"model": {"type": "BPE", "vocab": {"a": 10**9}, "merges": []}}, "ids up to 1,000,000,000"),
        ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["a", "b"]]}}, "refused by the package tokenizers"),
    ],
)
def test_what_is_no_byte_level_encoding_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_tokenizer(tmp_path, "digits")
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    with pytest.raises(UserError) as error:
        hf_tokenizer(tmp_path).encode("a")
    assert words in str(error.value)


def test_the_missing_library_is_named_when_text_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, "digits")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    found = hf_tokenizer(tmp_path)
    assert found.byte_lengths().sum() > 256
    with pytest.raises(UserError, match="pip install tokenizers"):
        found.encode("a")
