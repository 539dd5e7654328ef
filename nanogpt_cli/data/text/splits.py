"""Which documents, or which part of the text, become the validation split."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nanogpt_cli.data.tokenizers import utf8
from nanogpt_cli.errors import NanogptError, UserError

VAL_FRACTION = 0.1
VAL_MOST = 10_000_000  # bytes of val unless a fraction is asked for


@dataclass(frozen=True)
class SplitRule:
    """A rule. "tail" cuts the text, "head" the stream of tokens, the others place whole documents.

    tail: the last `fraction`, at most `most`, counted in bytes of UTF-8: the same for every tokenizer
    head: the first `tokens`
    documents: those whose keyed hash lies below `fraction`; the same for any order and for more files
    rows: karpathy's for OpenWebText, the first `fraction` of a permutation of `rows` documents
    files: the documents of the files from number `first_val_file` on
    """

    rule: str
    fraction: float = VAL_FRACTION
    most: int | None = None
    tokens: int = 0
    seed: int = 0
    rows: int = 0
    check: str = ""  # "rows": the start of the SHA-256 of the rows of val, as little-endian int64
    first_file_only: bool = False  # "documents": val does not depend on how many files there are
    first_val_file: int = 0

    def flags(self) -> dict[str, Any]:
        """What is typed for it, where it is one of own text; the files of `--val` aside."""
        if self.rule == "documents":
            return {"split": "documents", "val_fraction": self.fraction, "split_seed": self.seed or None}
        return {"val_fraction": self.fraction} if self.rule == "tail" and self.most is None else {}

    def cut(self, count: int) -> int:
        """Where "tail" cuts a text of `count` bytes."""
        val = count - int(count * (1 - self.fraction))
        return count - (val if self.most is None else min(val, self.most))

    def is_val(self, file: int, row: int, text: str) -> bool:
        """Whether a document is for validation, by its file, its number among all, or its first piece."""
        if self.rule == "files":
            return file >= self.first_val_file
        if self.rule == "rows":
            return row in self._val_rows
        if self.rule == "documents" and not (self.first_file_only and file):
            digest = hashlib.blake2b(utf8(text), digest_size=8, key=str(self.seed).encode())
            return int.from_bytes(digest.digest(), "little") < self.fraction * 2**64
        return False

    @cached_property
    def _val_rows(self) -> frozenset[int]:
        """As `train_test_split(test_size=fraction, seed=seed)` of the library datasets chooses them."""
        order = np.random.default_rng(self.seed).permutation(self.rows)[: math.ceil(self.fraction * self.rows)]
        if not hashlib.sha256(order.astype("<i8").tobytes()).hexdigest().startswith(self.check):
            raise NanogptError(f"numpy {np.__version__} draws another permutation: use another version of numpy.")
        return frozenset(order.tolist())

    def words(self) -> str:
        """The rule for people, as it stands in meta.toml."""
        most = f", at most {self.most:,} bytes" if self.most else ""
        where = " of the first file" if self.first_file_only else ""
        share = f"{self.fraction:.4g}"
        return {
            "tail": f"val is the last {share} of the text{most}",
            "head": f"val is the first {self.tokens:,} tokens",
            "documents": f"val is {share} of the documents{where}, by a hash of their text, seed {self.seed}",
            "rows": f"val is the first {share} of a permutation of the documents by numpy, seed {self.seed}",
            "files": "val has files of its own",
        }[self.rule]


def split_rule(kind: str, fraction: float | None = None, seed: int | None = None) -> SplitRule:
    """The rule for own text, "position" or "documents"; UserError if the others do not fit it."""
    if fraction is not None and not 0 < fraction < 1:
        raise UserError(f"--val-fraction {fraction}: a share between 0 and 1, such as {VAL_FRACTION}.")
    if kind == "documents":
        return SplitRule("documents", fraction or VAL_FRACTION, seed=seed or 0)
    if seed is not None:
        raise UserError("--split-seed chooses documents: add --split documents.")
    return SplitRule("tail", fraction or VAL_FRACTION, VAL_MOST if fraction is None else None)
