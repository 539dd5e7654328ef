"""A second engine for byte pair encodings: gigatoken, where the extra `fast` is installed."""

import base64
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from timeit import timeit

from nanogpt_cli.data.bpe import BpeTokenizer
from nanogpt_cli.data.tokenizers import TokenIds, Tokenizer, utf8, without_surrogates
from nanogpt_cli.errors import NanogptError
from nanogpt_cli.files import write_bytes

LEAST = 500_000  # characters; less is not worth the start
SAMPLE = 8192  # characters of each chunk that both encode
FRESH = 32_000_000  # characters after which the cache is dropped: about ten bytes for each of random words
WIDE = 1.2  # bytes a character; text of more, such as Chinese, is left to tiktoken


class OtherIdsError(NanogptError):
    """The two engines differ: nothing that was encoded can be kept."""


class FastEngine:
    """Gives the ids that `tokenizer`, of kind gpt2 or bpe, gives; for several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._start()

    def _start(self) -> None:
        import gigatoken

        pattern = self.tokenizer.pattern if isinstance(self.tokenizer, BpeTokenizer) else "gpt2"
        ranks = enumerate(self.tokenizer.token_bytes[:-1])  # without end of text: written out it is plain text
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ranks"
            write_bytes(path, b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in ranks))
            self.engine = gigatoken.Tokenizer.from_tiktoken(path, pretokenizer=pattern, special_tokens={})
        self.encoded = 0

    def encode(self, text: str) -> TokenIds:
        if not text.isascii() and len(utf8(text)) > WIDE * len(text):
            return self.tokenizer.encode(text)
        if self.encoded > FRESH:
            self._start()
        self.encoded += len(text)
        ids: TokenIds = self.engine.encode(without_surrogates(text)).astype(self.tokenizer.dtype)
        return ids

    def check(self, text: str) -> None:
        """Compare both on the start of a text; OtherIdsError if the ids differ."""
        if self.encode(text[:SAMPLE]).tolist() != self.tokenizer.encode(text[:SAMPLE]).tolist():
            what = f"gigatoken gives other ids than tiktoken for a text that starts with {text[:40]!r}"
            raise OtherIdsError(f"{what}. Nothing was kept. Remove it and run this again: pip uninstall gigatoken")


def fast_engine(tokenizer: Tokenizer, text: str) -> FastEngine | None:
    """The engine, if it is installed, knows the encoding, and is the faster one on `text`, the first half megabyte."""
    if tokenizer.kind not in ("gpt2", "bpe") or len(text) < LEAST or find_spec("gigatoken") is None:
        return None
    engine = FastEngine(tokenizer)
    took = [timeit(partial(one.encode, text), number=1) for one in (engine, tokenizer)]
    return engine if took[0] < took[1] else None
