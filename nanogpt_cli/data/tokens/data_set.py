"""Opening a folder of token files: ours with meta.toml, nanoGPT's, or shards of llm.c and modded-nanogpt."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanogpt_cli.data.tokenizers import CharTokenizer, TiktokenTokenizer, Tokenizer, get_tokenizer, tokenizer_from_toml
from nanogpt_cli.data.tokens.files import (
    FORMAT,
    META,
    WORK,
    DamagedError,
    DataSet,
    TokenFile,
    Tokens,
    difference,
    prepare_line,
)
from nanogpt_cli.data.tokens.formats import Foreign, find_foreign, read_meta_pkl
from nanogpt_cli.data.tokens.verify import check_content, check_ids, looks_like_uint32
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.foreign import HIGHEST, LARGE, count, field, read_toml
from nanogpt_cli.progress import QUIET, Progress

__all__ = ["DataSet", "TokenFile", "Tokens", "check_fits", "difference", "open_data_set"]

GPT2_IDS, GPT2_ROWS = 50_257, 50_304  # the ids, and the table from scratch: padded to a multiple of 64, as in nanoGPT
LLAMA3_IDS = 128_256
UNREADABLE = "samples are ids, not text"
DTYPES = {"uint16": 2, "uint32": 4}

Check = Callable[[Tokens], None]


def open_data_set(
    folder: Path,
    *,
    token_dtype: str | None = None,
    tokenizer: str | None = None,
    verify: bool = False,
    trusted: bool = False,
    progress: Progress = QUIET,
) -> DataSet:
    """Open the token files in `folder` and check them.

    Args:
        folder: holds train.bin and val.bin, or shards with "train" and "val" in their names.
        token_dtype: "uint16" or "uint32", for files of bare ids without metadata.
        tokenizer: what made the ids, for files without metadata.
        verify: read large files through, whatever an earlier check found.
        trusted: skip the checks of the content; another process has made them.
        progress: hears how far files are read through.

    Raises:
        UserError: no data set there, an incomplete or damaged one, or one whose ids cannot be what they should be.
    """
    if token_dtype not in (None, *DTYPES):
        raise UserError(f"--token-dtype {token_dtype}: use uint16 or uint32.")
    check = partial(check_content, full=verify, progress=progress)
    opener = _open_ours if (folder / META).is_file() else _open_foreign
    data_set = opener(folder, token_dtype, tokenizer, (lambda _: None) if trusted else check)
    known_ids = data_set.vocab_size if data_set.tokenizer is None else data_set.tokenizer.size
    for tokens in (data_set.train, data_set.val):
        check_ids(tokens, known_ids, f"Source of that number: {data_set.vocab_source}. Prepare the data set again.")
    return data_set


def check_fits(data_set: DataSet, block_size: int, vocab_size: int | None = None) -> None:
    """Refuse a data set that a model cannot train on.

    Raises:
        UserError: a split has fewer than block_size + 1 tokens, or an id that is no row of a table of `vocab_size`.
    """
    splits = {"train": data_set.train, "val": data_set.val}
    found = [
        f"{', '.join(map(str, tokens.paths))}: the {split} split has {tokens.count:,} tokens"
        for split, tokens in splits.items()
        if tokens.count < block_size + 1
    ]
    if found:
        least = min(tokens.count for tokens in splits.values())
        smaller = f", or --block-size {least - 1} or less" if least > 1 else ""
        raise UserError(
            f"{'; '.join(found)}; block_size {block_size:,} needs at least {block_size + 1:,} in each split. "
            f"Use more text{smaller}."
        )
    for tokens in splits.values():
        if vocab_size is not None and tokens.highest_id is not None:
            check_ids(tokens, vocab_size, f"The table needs --vocab-size {tokens.highest_id + 1} or more.")


def _open_ours(folder: Path, token_dtype: str | None, tokenizer: str | None, check: Check) -> DataSet:
    path = folder / META
    try:
        meta = {"name": folder.name, "tokenizer": {}, "statistics": {}, **read_toml(path, limit=LARGE)}
        if field(meta, "format", int, path) != FORMAT:
            raise UserError(
                f"{path} has format {meta['format']}; this version reads {FORMAT}, a newer one may read it."
            )
        dtype, table = field(meta, "dtype", str, path), field(meta, "tokenizer", dict, path)
        if dtype not in DTYPES:
            raise UserError(f"{path} is damaged: dtype {dtype!r} is neither uint16 nor uint32.")
        splits = field(meta, "splits", dict, path)
        train, val = (_open_split(folder, split, splits, dtype) for split in ("train", "val"))
        vocab_size, source, name = count(meta, "vocab_size", path), META, field(meta, "name", str, path)
        text_bytes = field(meta, "statistics", dict, path).get("text_bytes")
        ours = tokenizer_from_toml(table) if table else None
    except UserError as error:  # what is wrong with the metadata ends with the command that makes the data set again
        raise DamagedError(str(error).removesuffix("."), folder) from error
    kind = ours.kind if ours else None
    for flag, given, found in (("--token-dtype", token_dtype, dtype), ("--tokenizer", tokenizer, kind)):
        if given not in (None, found):
            raise UserError(f"{flag} {given}: {path} says {found}. Leave {flag} out.")
    if ours is not None:
        vocab_size, source = _rows(ours)
    check(train)
    check(val)
    per_token = text_bytes / (train.count + val.count) if type(text_bytes) is int and text_bytes > 0 else None
    return DataSet(folder, name, train, val, ours, vocab_size, source, bytes_per_token=per_token)


def _open_split(folder: Path, split: str, splits: dict[str, Any], dtype: str) -> Tokens:
    where, path = folder / META, folder / f"{split}.bin"
    table = {"highest_id": -1, "sha256": "", **field(splits, split, dict, where)}
    tokens = count(table, "tokens", where, low=0, high=HIGHEST)
    size = tokens * DTYPES[dtype]
    found = path.stat().st_size if path.is_file() else None
    if found != size or table.get("bytes", size) != size:
        what = "is missing" if found is None else f"has {found:,} bytes"
        raise UserError(
            f"{path} {what}, but {META} says {tokens:,} tokens, {size:,} bytes: the data set is incomplete or damaged."
        )
    highest_id = count(table, "highest_id", where, low=-1)
    sha256 = field(table, "sha256", str, where)
    return Tokens([TokenFile(path, tokens)], dtype, None if highest_id < 0 else highest_id, sha256 or None)


def _rows(tokenizer: Tokenizer) -> tuple[int, str]:
    """Rows of the table for a model trained from scratch, and where the number comes from."""
    if tokenizer.kind == "gpt2":
        return GPT2_ROWS, f"GPT-2's {GPT2_IDS:,} ids, padded to a multiple of 64"
    return tokenizer.size, f"the ids of the {tokenizer.kind} tokenizer"


def _open_foreign(folder: Path, token_dtype: str | None, tokenizer: str | None, check: Check) -> DataSet:
    if tokenizer == "char":
        raise UserError("--tokenizer char: an alphabet is needed, and only meta.toml or meta.pkl can tell it.")
    given = get_tokenizer(tokenizer) if tokenizer else None
    unfinished = (folder / WORK).exists()
    foreign = None if unfinished else find_foreign(folder, token_dtype or (given.dtype.name if given else "uint16"))
    if foreign is None:
        raise _no_data_set(folder)
    if not foreign.shards and token_dtype is None and any(map(looks_like_uint32, (foreign.train, foreign.val))):
        raise UserError(
            f"{folder} has no {META}, and its files look like 32-bit ids: every second 16-bit number is near 0. "
            "Say what they are: --token-dtype uint32, or --token-dtype uint16 if they are 16-bit after all."
        )
    check(foreign.train)
    check(foreign.val)
    ids, rows, source, note = _describe(folder, foreign, token_dtype, given)
    return DataSet(folder, folder.name, foreign.train, foreign.val, ids, rows, source, [note])


def _describe(
    folder: Path, foreign: Foreign, token_dtype: str | None, given: Tokenizer | None
) -> tuple[Tokenizer | None, int, str, str]:
    """What the ids of another project's files mean: tokenizer, rows of the table, their source, a note for the plan."""
    dtype, pickle = foreign.train.dtype.name, folder / "meta.pkl"
    files = len(foreign.train.files) + len(foreign.val.files)
    kind = f"{files} shards of llm.c or modded-nanogpt" if foreign.shards else f"no {META}: read as bare {dtype} ids"
    if given is not None:
        return given, *_rows(given), f"{kind} of {given.kind} (--tokenizer)"
    if pickle.is_file() and not foreign.shards:
        vocab_size, alphabet = read_meta_pkl(pickle)
        if alphabet is None:
            return None, vocab_size, "meta.pkl", f"{kind}; meta.pkl tells no alphabet: {UNREADABLE}"
        return CharTokenizer(alphabet), vocab_size, "meta.pkl", f"{kind} of the {vocab_size:,} characters in meta.pkl"
    if foreign.shards and dtype == "uint32":
        return None, LLAMA3_IDS, "Llama 3's ids", f"{kind}, Llama 3 ids: {UNREADABLE}"
    if token_dtype is not None and not foreign.shards:
        highest = max(_highest_id(tokens) for tokens in (foreign.train, foreign.val))
        source = "highest id of the files + 1; --vocab-size sets another"
        return None, highest + 1, source, f"{kind} of an unknown tokenizer: {UNREADABLE}"
    for tokens in (foreign.train, foreign.val):
        check_ids(
            tokens,
            GPT2_IDS,
            "Without metadata GPT-2's ids are assumed. Say what they are: --tokenizer NAME, "
            "or --token-dtype uint16|uint32 for ids of your own.",
        )
    gpt2 = TiktokenTokenizer("gpt2", GPT2_IDS, GPT2_IDS - 1)
    return gpt2, *_rows(gpt2), f"{kind} of GPT-2"


def _highest_id(tokens: Tokens) -> int:
    if tokens.highest_id is None:
        check_content(tokens)
    return tokens.highest_id or 0


def _no_data_set(folder: Path) -> UserError:
    command = prepare_line(folder)
    if (folder / WORK).exists():
        return UserError(
            f"The data set in {folder} is incomplete: preparing it did not finish. Run it again: {command}"
        )
    if folder.is_file():
        return UserError(
            f"{folder} is a file, and token files lie in a folder. For a text type --dataset {typed(folder)}"
        )
    what = "has no train.bin" if folder.is_dir() else "does not exist"
    if any(folder.glob("*.npy")):
        what += ", but arrays of numpy; their ids as train.bin: np.load(FILE).astype('<u2').tofile('train.bin')"
    elif any(folder.glob("*.idx")):
        what += ", but an index of Megatron, whose files are not read: prepare the text that they were made of"
    return UserError(
        f"There is no data set in {folder}: it {what}. If it is elsewhere add --data-dir DIR. To prepare one: {command}"
    )
