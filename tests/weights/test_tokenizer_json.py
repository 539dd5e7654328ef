"""tokenizer.json as Transformers reads it: the same ids as ours for any text, and no unknown characters in silence."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from nanogpt_cli.data.bpe import LETTERS
from nanogpt_cli.data.tokenizers import BytesTokenizer, CharTokenizer, TiktokenTokenizer, Tokenizer, get_tokenizer
from nanogpt_cli.errors import UserError
from nanogpt_cli.weights.tokenizer_json import tokenizer_files

transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")

NASTY = (
    "",
    " ",
    "\n",
    "  two  spaces \n\n\t\r\n end ",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|>",
    "don't I'LL we've 's",
    "1234567890 3.14",
    "naïve café 你好\u3000世界 🎉👩\u200d👩\u200d👧 \u0301",
    "\ufeff\u00a0\u2028",
    "x" * 300,
    "[UNK] <unknown> </s>",
)
ALPHABET = "".join(NASTY)


class OwnEncoding(TiktokenTokenizer):
    """GPT-2's first 700 tokens as an encoding of one's own."""

    def __init__(self) -> None:
        gpt2 = tiktoken.get_encoding("gpt2")
        self.tokens = [gpt2.decode_single_token_bytes(i) for i in range(700)]
        super().__init__("bpe", 701, 700)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        ranks = {token: i for i, token in enumerate(self.tokens)}
        return tiktoken.Encoding("own", pat_str=words, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 700})

    def to_toml(self) -> dict[str, Any]:
        words = ("".join(LETTERS[byte] for byte in token) for token in self.tokens)
        return {"kind": "bpe", "pattern": "gpt2", "tokens": " ".join(words)}


def theirs_of(tokenizer: Tokenizer, folder: Path) -> Any:
    for name, content in tokenizer_files(tokenizer, 128).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["char", "bytes", "gpt2", "bpe"])
def test_ids_are_equal_on_nasty_text(tmp_path: Path, kind: str) -> None:
    own: dict[str, Callable[[], Tokenizer]] = {"char": lambda: CharTokenizer(ALPHABET), "bpe": OwnEncoding}
    ours = own[kind]() if kind in own else get_tokenizer(kind)
    theirs = theirs_of(ours, tmp_path)
    for text in NASTY:
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot, ours.size)
    assert theirs.model_max_length == 128


def test_a_character_outside_the_alphabet_is_refused_there_too(tmp_path: Path) -> None:
    ours = CharTokenizer("abc")
    theirs = theirs_of(ours, tmp_path)
    with pytest.raises(UserError):
        ours.encode("abcd")
    with pytest.raises(Exception, match="UNK"):
        theirs("abcd")


def test_a_byte_model_ends_a_text_by_name(tmp_path: Path) -> None:
    theirs = theirs_of(BytesTokenizer(), tmp_path)
    assert theirs.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert theirs.decode([104, 105, 256], skip_special_tokens=True) == "hi"
