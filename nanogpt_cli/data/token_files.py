"""Data sets as they lie on disk: opening a folder of token files, ours or another project's."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanogpt_cli.data.tokens import Ids, TokenFile, Tokens, bad_id, check_batch
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    from nanogpt_cli.data.tokenizers import Tokenizer

__all__ = ["DataSet", "Ids", "TokenFile", "Tokens", "bad_id", "check_batch", "check_fits", "open_data_set"]

T = TypeVar("T")

META = "meta.toml"
META_FORMAT = 1
GPT2_IDS, GPT2_ROWS = 50_257, 50_304  # the ids, and the table from scratch: padded to a multiple of 64, as in nanoGPT


@dataclass
class DataSet:
    """Two splits and what is known about their ids."""

    folder: Path
    name: str
    train: Tokens
    val: Tokens
    tokenizer: "Tokenizer | None"
    vocab_size: int  # rows of the token table for a model trained from scratch
    vocab_source: str  # where vocab_size comes from, in words
    notes: list[str] = field(default_factory=list)  # what a reader of the plan should know


def open_data_set(
    folder: Path, *, token_dtype: str | None = None, tokenizer: str | None = None, verify: bool = False
) -> DataSet:
    """Open the token files in `folder`.

    Raises:
        UserError: no data set there, an incomplete one, or one that does not hold what its metadata says.
    """
    if (folder / META).is_file():
        return _open_ours(folder)
    raise UserError(
        f"There is no data set in {folder} (no {META}, no train.bin). Prepare one: nanogpt prepare {folder.name}"
    )


def _open_ours(folder: Path) -> DataSet:
    meta = _read_meta(folder / META)
    splits = {split: _open_split(folder, split, meta) for split in ("train", "val")}
    table = meta.get("tokenizer")
    tokenizer = None
    if table is not None:
        from nanogpt_cli.data.tokenizers import tokenizer_from_toml

        tokenizer = tokenizer_from_toml(table)
    vocab_size, source = _vocabulary(tokenizer, _field(folder / META, meta, "vocab_size", int))
    name = _field(folder / META, meta, "name", str)
    return DataSet(folder, name, splits["train"], splits["val"], tokenizer, vocab_size, source)


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if _field(path, meta, "format", int) != META_FORMAT:
        raise UserError(f"{path} has format {meta['format']}; this version reads {META_FORMAT}. Update nanogpt-cli.")
    return meta


def _open_split(folder: Path, split: str, meta: dict[str, Any]) -> Tokens:
    where = folder / META
    dtype = _field(where, meta, "dtype", str)
    if dtype not in ("uint16", "uint32"):
        raise _damaged(where, f"dtype {dtype!r} is neither uint16 nor uint32")
    table = _field(where, _field(where, meta, "splits", dict), split, dict)
    count, size = _field(where, table, "tokens", int), _field(where, table, "bytes", int)
    path = folder / f"{split}.bin"
    found = path.stat().st_size if path.is_file() else None
    if found != size or size != count * (2 if dtype == "uint16" else 4):
        what = "is missing" if found is None else f"has {found:,} bytes"
        raise UserError(
            f"{path} {what}, but {META} says {count:,} tokens in {size:,} bytes: the data set is incomplete. "
            f"Prepare it again: nanogpt prepare {folder.name}"
        )
    return Tokens([TokenFile(path, count)], dtype, _field(where, table, "highest_id", int))


def _field(where: Path, table: dict[str, Any], key: str, kind: type[T]) -> T:
    value = table.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise _damaged(where, f"{key} should be {kind.__name__}, found {value!r}")
    return value


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}). Prepare the data set again: nanogpt prepare {path.parent.name}")


def _vocabulary(tokenizer: "Tokenizer | None", stated: int) -> tuple[int, str]:
    if tokenizer is not None and tokenizer.kind == "gpt2":
        return GPT2_ROWS, f"GPT-2's {GPT2_IDS:,} ids, padded to a multiple of 64"
    return stated, "the data set's own" if tokenizer is None else f"the data set's {tokenizer.kind} tokenizer"


def check_fits(data_set: DataSet, block_size: int) -> None:
    """Refuse a data set with a split too short for a single row: UserError naming file, tokens and need."""
    for split, tokens in (("train", data_set.train), ("val", data_set.val)):
        if tokens.count < block_size + 1:
            files = ", ".join(map(str, tokens.paths))
            raise UserError(
                f"{files}: the {split} split has {tokens.count:,} tokens, but block_size {block_size:,} needs at least "
                f"{block_size + 1:,}. Use more text, or --block-size {max(1, tokens.count - 1)} or less."
            )
