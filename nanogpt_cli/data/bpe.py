"""Byte pair encodings of one's own: trained on a text, or taken over from a Hugging Face tokenizer.json.

They are GPT-2's or cl100k's but for their merges: byte-level, split into words by the same pattern. Training is done by
rustbpe, encoding by tiktoken.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_cli.data.tokenizers import END_OF_TEXT, TiktokenTokenizer, Tokenizer, gpt2_tokenizer
from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import read_json

if TYPE_CHECKING:
    import tiktoken

LEAST, MOST = 257, 65_536  # ids: the bytes and end of text, up to what 16 bits hold
SAMPLE_BYTES = 32_000_000  # of train that merges are learnt from: seconds of work, and little memory
# as published, with GPT-2 and with tiktoken; they are known to llama.cpp and transformers under these spellings too
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
SPELLINGS = {pattern: name for name, pattern in PATTERNS.items()} | {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": (
        "cl100k"
    ),
}

# sha256 of its vocabulary, in the order of the ids
GPT2_WORDS = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"

# GPT-2's letters for bytes: themselves where they can be seen, else the letters from U+0100 on
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SEEN]
LETTERS = {byte: chr(byte) for byte in _SEEN} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


class BpeTokenizer(TiktokenTokenizer):
    """Ids in the order of the merges, the bytes first; the last one ends a document.

    Args:
        tokens: the bytes of every id but the last, each once; all 256 single bytes among them.
        pattern: a key of PATTERNS.
    """

    def __init__(self, tokens: list[bytes], pattern: str = "gpt2") -> None:
        if pattern not in PATTERNS or len(set(tokens)) < len(tokens) or len({t for t in tokens if len(t) == 1}) < 256:
            raise ValueError("no byte-level encoding")
        super().__init__("bpe", len(tokens) + 1, len(tokens))
        self.tokens, self.pattern = tokens, pattern

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        special = {END_OF_TEXT.decode(): self.size - 1}
        return tiktoken.Encoding("bpe", pat_str=PATTERNS[self.pattern], mergeable_ranks=ranks, special_tokens=special)

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.kind, self.size, self.pattern, hashlib.sha256(b"\n".join(self.tokens)).hexdigest()

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [*self.tokens, END_OF_TEXT]

    def to_toml(self) -> dict[str, Any]:
        """The tokens as GPT-2 writes them, with blanks between."""
        words = ("".join(LETTERS[byte] for byte in token) for token in self.tokens)
        return {"kind": self.kind, "pattern": self.pattern, "tokens": " ".join(words)}


def bpe_from_toml(table: dict[str, Any]) -> BpeTokenizer:
    """The tokenizer that `to_toml` described; ValueError or KeyError if it is none."""
    return BpeTokenizer([_bytes_of(word) for word in str(table["tokens"]).split(" ")], str(table["pattern"]))


def bpe_size(word: str) -> int:
    """The SIZE of "bpe:SIZE"; UserError if it is no number, or one out of range."""
    size = word.removeprefix("bpe").removeprefix(":").replace("_", "").replace(",", "")
    if not size.isdecimal() or not LEAST <= int(size) <= MOST:
        raise UserError(
            f"--tokenizer {word}: bpe:SIZE with a SIZE from {LEAST} (256 bytes and end of text) to {MOST:,}, "
            "such as bpe:4096."
        )
    return int(size)


def train_bpe(texts: Iterable[str], size: int) -> BpeTokenizer:
    """A tokenizer of at most `size` ids, learnt from `texts`; fewer where the text has too few pairs to merge."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size=size - 1, pattern=PATTERNS["gpt2"])
    ranked = sorted((rank, bytes(token)) for token, rank in trainer.get_mergeable_ranks())
    return BpeTokenizer(list(dict.fromkeys(token for _, token in ranked)))  # two merges may give one token


def tokenizer_from_json(folder: Path) -> Tokenizer | None:
    """That of a Hugging Face folder, None if there is none: GPT-2's, one like it, or another byte-level one.

    Raises:
        UserError: it is damaged, or no byte-level encoding.
    """
    path, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    whole = read_json(path) if path.is_file() else None
    words: Any = None
    if vocabulary.is_file():
        words = read_json(vocabulary)
    elif whole is not None and isinstance(model := whole.get("model"), dict):
        words = model.get("vocab")
    if isinstance(words, dict) and all(isinstance(number, int) for number in words.values()):
        lines = "\n".join(sorted(words, key=lambda word: words[word]))
        if hashlib.sha256(lines.encode("utf-8", "replace")).hexdigest() == GPT2_WORDS:
            return gpt2_tokenizer()
    if whole is None:
        if words is not None:
            raise UserError(f"{vocabulary} is not GPT-2's, and there is no tokenizer.json, which can be read.")
        return None
    try:
        return bpe_from_json(whole, path)  # by tiktoken, which is faster and always there
    except UserError:
        from nanogpt_cli.data.hf_tokenizer import hf_tokenizer

        return hf_tokenizer(folder)


def bpe_from_json(whole: Any, path: Path) -> BpeTokenizer:
    """That of a tokenizer.json, read from `path`, if it is byte-level with one of our patterns; UserError if not."""
    try:
        model, added = whole["model"], whole.get("added_tokens") or []
        if model["type"] != "BPE":
            raise _refused(path, f"its model is {model['type']}")
        if whole.get("normalizer"):
            raise _refused(path, f"it changes the text first, by {whole['normalizer']['type']}")
        pattern = _pattern(path, whole["pre_tokenizer"])
        special = {token["content"]: token["id"] for token in added}
        vocab = {word: number for word, number in model["vocab"].items() if word not in special}
        words = sorted(vocab, key=lambda word: vocab[word])
        merged = ["".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]
        if [vocab[word] for word in words] != list(range(len(vocab))) or words[256:] != merged:
            raise _refused(path, "its ids do not follow its merges")
        if list(special.values()) != [len(vocab)]:
            raise _refused(path, f"it has {len(special)} special tokens, where one is expected, with the last id")
        return BpeTokenizer([_bytes_of(word) for word in words], pattern)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: no tokenizer of a byte-level BPE can be read from it ({error!r:.100}).") from error


def _pattern(path: Path, pre: dict[str, Any]) -> str:
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    *split, last = steps
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if not split and last.get("use_regex", True):
            return "gpt2"
        if len(split) == 1 and split[0]["type"] == "Split" and not last.get("use_regex", True):
            regex = split[0]["pattern"].get("Regex")
            if regex in SPELLINGS and split[0].get("behavior") == "Isolated" and not split[0].get("invert"):
                return SPELLINGS[regex]
    raise _refused(path, "it splits text into words otherwise")


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"{path} cannot be used: {why}. What can: byte-level BPE that splits words as GPT-2 or cl100k do.")


def _bytes_of(word: str) -> bytes:
    return bytes(BYTES[letter] for letter in word)
