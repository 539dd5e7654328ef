"""Text to ids and back: round trips, what is unknown, what is not text, and what travels in TOML."""

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiktoken
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from nanogpt_cli.data.tokenizers import (
    BytesTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    get_tokenizer,
    tokenizer_from_toml,
    without_surrogates,
)
from nanogpt_cli.errors import NanogptError, UserError

EVERY_CHARACTER = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
CHINESE = "道可道，非常道。名可名，非常名。\n無名天地之始；有名萬物之母。"


def through_toml(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer_from_toml(tomllib.loads(tomli_w.dumps(tokenizer.to_toml())))


@given(EVERY_CHARACTER)
def test_characters_go_there_and_back(text: str) -> None:
    tokenizer = through_toml(CharTokenizer(text))
    assert tokenizer.size == len(set(text))
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.alphabet == "".join(sorted(set(text)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


def test_characters_are_numbered_as_in_nanogpt() -> None:
    tokenizer = CharTokenizer("hello")
    assert tokenizer.encode("hello").tolist() == [1, 0, 2, 2, 3]
    assert tokenizer.eot is None
    assert tokenizer.dtype == np.uint16


def test_unknown_characters_are_listed_with_the_alphabet() -> None:
    with pytest.raises(UserError, match=r"does not know: \\x00 X\. Its 4 characters are: e h l o"):
        CharTokenizer("hello").encode("heX\0llo")
    with pytest.raises(UserError, match="does not know: 😀"):
        CharTokenizer("hello").encode("😀")


def test_a_large_alphabet_takes_four_bytes_an_id() -> None:
    tokenizer = CharTokenizer(map(chr, [*range(0x4E00, 0x9FFF), *range(0x20000, 0x2F000)]))
    assert tokenizer.dtype == np.uint32
    assert tokenizer.decode(tokenizer.encode("道𠀀")) == "道𠀀"


@given(EVERY_CHARACTER)
def test_bytes_go_there_and_back(text: str) -> None:
    tokenizer = through_toml(BytesTokenizer())
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(text=EVERY_CHARACTER)
@settings(max_examples=200)
def test_gpt2_goes_there_and_back(gpt2: TiktokenTokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == gpt2.encoding.encode_ordinary(text)
    assert gpt2.decode_bytes(ids) == text.encode()
    assert gpt2.byte_lengths()[ids].sum() == len(text.encode())


def test_gpt2_sizes(gpt2: TiktokenTokenizer) -> None:
    assert (gpt2.size, gpt2.eot) == (50257, 50256)
    assert gpt2.to_toml() == {"kind": "gpt2", "size": 50257, "eot": 50256}
    assert gpt2.byte_lengths()[50256] == 0
    assert gpt2.decode([50256]) == "<|endoftext|>"


def test_special_tokens_in_text_are_text(gpt2: TiktokenTokenizer) -> None:
    assert 50256 not in gpt2.encode("a<|endoftext|>b")


def test_characters_over_several_tokens_come_together_again(gpt2: TiktokenTokenizer) -> None:
    ids = gpt2.encode(CHINESE)
    assert len(ids) > len(CHINESE)
    assert gpt2.decode(ids) == CHINESE
    parts = b"".join(gpt2.decode_bytes([one]) for one in ids)  # what a stream of single tokens gives
    assert parts.decode() == CHINESE


@pytest.mark.parametrize("make", [lambda: CharTokenizer("ab"), BytesTokenizer, lambda: get_tokenizer("gpt2")])
def test_decoding_never_fails(gpt2: TiktokenTokenizer, make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    assert tokenizer.decode_bytes([tokenizer.size, 10**9, -1]) == "\ufffd".encode() * 3
    rng = np.random.default_rng(0)
    assert isinstance(tokenizer.decode(rng.integers(-5, 60_000, 2000)), str)
    assert tokenizer.decode([]) == ""


@given(st.text(st.characters(), max_size=20))
def test_surrogates_are_paired_or_replaced(text: str) -> None:
    clean = without_surrogates(text)
    assert clean == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    BytesTokenizer().encode(text)


def test_a_lone_surrogate_in_a_prompt_is_no_crash(gpt2: TiktokenTokenizer) -> None:
    assert gpt2.decode(gpt2.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"kind": 7},
        {"kind": "char"},
        {"kind": "char", "alphabet": ""},
        {"kind": "char", "alphabet": 3},
        {"kind": "char", "size": 3, "eot": 1},
        {"kind": "gpt2"},
        {"kind": "gpt2", "size": "many", "eot": 0},
    ],
)
def test_a_damaged_table_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_toml(table)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Did you mean gpt2\?.*char, bytes.*cl100k_base"):
        get_tokenizer("gpt-2")


def test_what_stands_in_toml_needs_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: pytest.fail("loaded"))
    tokenizer = tokenizer_from_toml({"kind": "o200k_base", "size": 200019, "eot": 199999})
    assert (tokenizer.size, tokenizer.eot, tokenizer.dtype) == (200019, 199999, np.dtype(np.uint32))


@pytest.fixture
def cl100k(gpt2: TiktokenTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    """cl100k_base with GPT-2's merges: its own are not to be had here. Size, pattern and special ids are its own."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: gpt2.encoding._mergeable_ranks)
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "cl100k_base", raising=False)
    yield get_tokenizer("cl100k_base")
    tiktoken.registry.ENCODINGS.pop("cl100k_base")


def test_other_encodings_by_name(cl100k: Tokenizer) -> None:
    assert (cl100k.size, cl100k.eot, cl100k.dtype) == (100277, 100257, np.dtype(np.uint32))
    assert cl100k.decode(cl100k.encode(CHINESE)) == CHINESE
    assert cl100k.decode([70_000]) == "\ufffd"  # an id that the encoding leaves unused


def test_no_network_says_where_the_files_are_kept(gpt2: TiktokenTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", refused)
    with pytest.raises(NanogptError, match=r"p50k_base could not be fetched \(no route to host\).*kept in .*tiktoken"):
        get_tokenizer("p50k_base")


def test_characters_and_bytes_need_neither_tiktoken_nor_network() -> None:
    code = (
        "import sys, socket; sys.modules['tiktoken'] = socket.socket = None\n"
        "from nanogpt_cli.data.tokenizers import *\n"
        "t = tokenizer_from_toml({'kind': 'char', 'alphabet': 'abc'}); assert t.decode(t.encode('cab')) == 'cab'\n"
        "b = get_tokenizer('bytes'); assert b.decode(b.encode('é')) == 'é'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_tiktoken_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(NanogptError, match="pip install tiktoken"):
        TiktokenTokenizer("gpt2")
