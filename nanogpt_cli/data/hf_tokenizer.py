"""Tokenizers of Hugging Face that split a text in ways of their own, used through their library `tokenizers`.

Byte-level encodings alone: their ids have bytes of their own, so that text can be written as it comes and bits per byte
be counted.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_cli.data.bpe import BYTES
from nanogpt_cli.data.tokenizers import END_OF_TEXT, REPLACEMENT, TokenIds, Tokenizer, without_surrogates
from nanogpt_cli.errors import UserError, package
from nanogpt_cli.foreign import LARGE, parse_json, read_json, read_text

if TYPE_CHECKING:
    import tokenizers


class HfTokenizer(Tokenizer):
    """What the text of a tokenizer.json describes.

    Args:
        end: the special token that ends a document.

    Raises:
        UserError: it is no byte-level encoding, or has no such token.
    """

    kind = "hf"

    def __init__(self, content: str, end: str, where: object = "tokenizer.json") -> None:
        self.content, self.end, whole = content, end, parse_json(content, where)
        try:
            model, decoder, added = whole["model"], whole["decoder"], whole["added_tokens"]
            if (model["type"], decoder["type"]) != ("BPE", "ByteLevel"):
                raise UserError(f"{where} is a {model['type']} with the decoder {decoder['type']}, no byte-level BPE.")
            special = {token["content"]: int(token["id"]) for token in added}
            table = {number: word.encode() for word, number in special.items()}
            words = {int(i): word for word, i in model["vocab"].items() if i not in table}
            table |= {i: bytes(BYTES[letter] for letter in word) for i, word in words.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where} is not understood ({error!r:.100}).") from None
        if end not in special:
            raise UserError(f"{where} has no token that ends a text ({end!r}).")
        self.size, self.eot = max(table) + 1, special[end]
        if self.size > 2 * len(table):
            raise UserError(f"{where} has {len(table):,} tokens, and ids up to {self.size - 1:,}.")
        self._known = table

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [self._known.get(i, REPLACEMENT) for i in range(self.size)]

    def __reduce__(self) -> tuple[type["HfTokenizer"], tuple[str, str]]:
        return HfTokenizer, (self.content, self.end)  # the library's own pickle forgets what is set below

    @cached_property
    def encoding(self) -> "tokenizers.Tokenizer":
        """Raises UserError if the library is missing, or refuses the file."""
        library = package("tokenizers", "This tokenizer")
        try:
            encoding: tokenizers.Tokenizer = library.Tokenizer.from_str(self.content)
        except Exception as error:  # the library has no class of its own
            raise UserError(f"tokenizer.json is refused by the package tokenizers: {error}") from None
        encoding.encode_special_tokens = True  # written out in a text they are text
        return encoding

    def encode(self, text: str) -> TokenIds:
        return np.array(self.encoding.encode(without_surrogates(text), add_special_tokens=False).ids, self.dtype)

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.kind, self.size, hashlib.sha256(b"\n".join(self.token_bytes)).hexdigest()

    def to_toml(self) -> dict[str, Any]:
        return {"kind": self.kind, "end": self.end, "json": self.content}


def hf_tokenizer(folder: Path) -> HfTokenizer:
    """That of a folder's tokenizer.json; UserError as for the class.

    A document ends with <|endoftext|>, else with what tokenizer_config.json calls eos_token.
    """
    path, config, end = folder / "tokenizer.json", folder / "tokenizer_config.json", END_OF_TEXT.decode()
    content = read_text(path, limit=LARGE)
    if config.is_file() and json.dumps(end) not in content:
        named = read_json(config).get("eos_token")
        end = str(named.get("content") if isinstance(named, dict) else named)
    return HfTokenizer(content, end, path)
