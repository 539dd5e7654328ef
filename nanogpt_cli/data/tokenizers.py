"""Text to token ids and back: characters, bytes, any encoding of tiktoken, or one of one's own (`bpe`).

A tokenizer is described by a small TOML table, which travels with a data set and with every run trained on it, so that
sampling needs no data set. Characters and bytes need neither a network nor tiktoken.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nanogpt_cli.errors import NanogptError, UserError, did_you_mean, package
from nanogpt_cli.files import user_cache
from nanogpt_cli.foreign import LARGE, read_toml
from nanogpt_cli.progress import QUIET, Progress

if TYPE_CHECKING:
    import tiktoken

TokenIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
END_OF_TEXT = b"<|endoftext|>"
REPLACEMENT = "\ufffd".encode()


class Tokenizer(ABC):
    """Ids run from 0 to size - 1; `eot` is the id that ends a document, if there is one."""

    kind: str
    size: int
    eot: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type of a token file that holds every id."""
        return np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """Ids of a text, of type `dtype`. Special tokens written out in it are plain text. No eot is added."""

    @property
    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """The bytes of every id."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of any ids; one it does not know gives U+FFFD, never an error."""
        table = self.token_bytes
        return b"".join(table[i] if 0 <= i < len(table) else REPLACEMENT for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids; bytes that are no valid UTF-8 show as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of each id, shape (size,); 0 for eot: the denominator of bits per byte."""
        lengths = np.fromiter(map(len, self.token_bytes), np.int32, self.size)
        if self.eot is not None:
            lengths[self.eot] = 0
        return lengths

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two tokenizers exactly if their ids mean the same."""
        return self.kind, self.size

    def to_toml(self) -> dict[str, Any]:
        """The table that `tokenizer_from_toml` reads."""
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """One id a character, in code point order."""

    kind = "char"
    eot = None

    def __init__(self, alphabet: Iterable[str], most_frequent: str | None = None) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        # where sampling starts without a prompt and without a newline; a space where nobody counted
        self.most_frequent = most_frequent or (" " if " " in self.alphabet else self.alphabet[0])
        self.size = len(self.alphabet)
        points = code_points(self.alphabet)
        self._ids = np.full(int(points[-1]) + 2, -1, np.int32)  # the last place stands for all larger code points
        self._ids[points] = np.arange(self.size)

    def encode(self, text: str) -> TokenIds:
        """Ids of a text, line ends as they were for the alphabet; UserError lists characters outside it, and it."""
        if "\r" in text and "\r" not in self.alphabet:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        ids = self._ids[np.minimum(code_points(text), len(self._ids) - 1)]
        if ids.size and ids.min() < 0:
            self.check(set(text))
        return ids.astype(self.dtype)

    def check(self, characters: Iterable[str], where: str = "") -> None:
        """Refuse characters outside the alphabet: UserError that lists them and it."""
        unknown = sorted(set(characters) - set(self.alphabet))
        if unknown:
            raise UserError(
                f"{where}This tokenizer does not know: {_show(unknown)}. Its {self.size} characters are: "
                f"{_show(list(self.alphabet))}. Replace or leave out what it does not know."
            )

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.kind, self.alphabet

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [character.encode() for character in self.alphabet]

    def to_toml(self) -> dict[str, Any]:
        return {"kind": self.kind, "alphabet": self.alphabet, "most_frequent": self.most_frequent}


class BytesTokenizer(Tokenizer):
    """One id a UTF-8 byte, and 256 for the end of a text."""

    kind = "bytes"
    size = 257
    eot = 256

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(utf8(text), np.uint8).astype(self.dtype)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [END_OF_TEXT]


class TiktokenTokenizer(Tokenizer):
    """A byte pair encoding of tiktoken, by its name there. It is loaded when text is first met, not before."""

    def __init__(self, kind: str, size: int | None = None, eot: int | None = None, progress: Progress = QUIET) -> None:
        self.kind, self._progress = kind, progress
        self.size = size or self.encoding.n_vocab
        self.eot = self.encoding.eot_token if eot is None else eot

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        """Raises NanogptError if its files are neither cached nor to be had."""
        tiktoken = package("tiktoken", f"The tokenizer {self.kind}")
        known = tiktoken.list_encoding_names()
        if self.kind not in known:
            names = ["char", "bytes", "bpe:SIZE", *known]
            raise UserError(
                f"--tokenizer {self.kind}: no such tokenizer.{did_you_mean(self.kind, names)} There are: "
                f"{', '.join(names)}; or the folder of a run, a data set or a tokenizer.json."
            )
        folder = _tiktoken_folder()
        if self.kind == "gpt2":
            gpt2_files(self._progress)
        try:
            return tiktoken.get_encoding(self.kind)
        except OSError as error:
            raise NanogptError(
                f"The tokenizer {self.kind} could not be fetched ({error}). It is kept in {folder} once it was; "
                "on a machine without a network copy that folder from another, or use --tokenizer gpt2, bytes or char."
            ) from error

    def encode(self, text: str) -> TokenIds:
        ids: TokenIds = self.encoding.encode_to_numpy(without_surrogates(text), disallowed_special=()).astype(
            self.dtype
        )
        return ids

    @cached_property
    def token_bytes(self) -> list[bytes]:
        table = [REPLACEMENT] * self.size  # some encodings leave ids unused
        for token in self.encoding.special_tokens_set:
            table[self.encoding.encode_single_token(token)] = token.encode()
        for token_bytes in self.encoding.token_byte_values():
            table[self.encoding.encode_single_token(token_bytes)] = token_bytes
        return table

    def to_toml(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size, "eot": self.eot}


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's; its files are looked for when text is first met."""
    return TiktokenTokenizer("gpt2", 50_257, 50_256)


def get_tokenizer(word: str, progress: Progress = QUIET) -> Tokenizer:
    """The tokenizer called "bytes", "gpt2" or as any encoding of tiktoken, or that of a folder.

    A folder is a run, a data set or one with a tokenizer.json; a bare word is looked up in runs/ and data/ too, where
    it is no name. `progress` hears what is fetched.

    Raises:
        UserError: there is no such thing ("char" and "bpe:SIZE" are made from a text).
        NanogptError: its files are neither cached nor to be had.
    """
    if word == "bytes":
        return BytesTokenizer()
    return reused_tokenizer(word) or TiktokenTokenizer(word, progress=progress)


def reused_tokenizer(word: str) -> Tokenizer | None:
    """The tokenizer of a run, data set or folder, if the word means one; UserError if it has none."""
    folder = None if word in ("auto", "char", "bytes") or word.startswith("bpe:") else _folder(word)
    if folder is None:
        return None
    found = tokenizer_in(folder)
    if found is None:
        raise UserError(
            f"--tokenizer {folder}: no tokenizer is there. A run has tokenizer.toml, a data set meta.toml, a model of "
            "Hugging Face's tokenizer.json."
        )
    return found


def _folder(word: str) -> Path | None:
    """The folder that a word means, if it means one."""
    path = Path(word)
    if path.is_file():  # a checkpoint, or a tokenizer.json
        return path.parent
    if len(path.parts) > 1:
        return path if path.is_dir() else None
    found = next((place / path for place in (Path(), Path("runs"), Path("data")) if (place / path).is_dir()), None)
    if found is None:
        return None
    import tiktoken

    return None if word in tiktoken.list_encoding_names() else found


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """That of a run, a data set or a model of Hugging Face, None if there is none; UserError if it cannot be used."""
    if (folder / "tokenizer.toml").is_file():
        return tokenizer_from_toml(read_toml(folder / "tokenizer.toml", limit=LARGE))
    if (folder / "meta.toml").is_file():
        return tokenizer_from_toml(read_toml(folder / "meta.toml", limit=LARGE).get("tokenizer", {}))
    from nanogpt_cli.data.bpe import tokenizer_from_json

    return tokenizer_from_json(folder)


def tokenizer_from_toml(table: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_toml` described; UserError if the table is damaged."""
    kind = table.get("kind")
    if kind == "char" and isinstance(alphabet := table.get("alphabet"), str) and alphabet:
        frequent = table.get("most_frequent")
        return CharTokenizer(alphabet, frequent if isinstance(frequent, str) and frequent in list(alphabet) else None)
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "bpe":
        from nanogpt_cli.data.bpe import bpe_from_toml

        with suppress(ValueError, KeyError):
            return bpe_from_toml(table)
    if kind == "hf" and isinstance(content := table.get("json"), str):
        from nanogpt_cli.data.hf_tokenizer import HfTokenizer

        return HfTokenizer(content, str(table.get("end")))
    size, eot = table.get("size"), table.get("eot")
    if isinstance(kind, str) and kind not in ("char", "bpe", "hf") and isinstance(size, int) and isinstance(eot, int):
        return TiktokenTokenizer(kind, size, eot)
    raise UserError(
        f"The tokenizer table is damaged: {table!r:.200}. It needs a kind, and an alphabet, tokens or size and eot."
    )


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text, and those that `surrogateescape` hid in it."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return without_surrogates(text).encode()


def without_surrogates(text: str) -> str:
    """`text` with halves of surrogate pairs, which no UTF-8 can hold, paired or replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _show(characters: list[str], most: int = 100) -> str:
    more = f" and {len(characters) - most} more" if len(characters) > most else ""
    return " ".join(repr(c)[1:-1] if c != " " else "' '" for c in characters[:most]) + more


def _tiktoken_folder() -> Path:
    """Where tiktoken keeps its files.

    Its own default is a temporary folder, which a restart empties: then a machine without a network is stuck.
    """
    return Path(os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(user_cache() / "tiktoken")))


def gpt2_files(progress: Progress = QUIET) -> dict[str, bytes]:
    """GPT-2's vocabulary and merges under the names Hugging Face gives them; NanogptError if they are not to be had.

    They are kept where tiktoken looks for them: under the SHA-1 of their address.
    """
    from nanogpt_cli.data.catalogue import pinned
    from nanogpt_cli.data.download import fetch

    content = {}
    for name, file in (("vocab.json", pinned("encoder.json")), ("merges.txt", pinned("vocab.bpe"))):
        path = _tiktoken_folder() / hashlib.sha1(file.urls[0].encode()).hexdigest()
        fetch(file, path, progress)
        content[name] = path.read_bytes()
    return content
