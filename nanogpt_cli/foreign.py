"""The gate for what others wrote: settings, metadata, tokenizers and model folders are read here, within bounds.

A file that is no regular file, too large, nested too deeply, or holds a number that no setting can mean is refused by
name before anything is made of it; so is a key of the wrong kind.
"""

import contextlib
import json
import math
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nanogpt_cli.errors import UserError
from nanogpt_cli.files import NO_WAIT
from nanogpt_cli.terminal import escaped

T = TypeVar("T")

SMALL = 1 << 20  # bytes: settings and metadata, written by hand or by programs
LARGE = 1 << 28  # bytes: vocabularies and lists of tensors
DEEPEST = 100  # tables within tables
LONGEST_KEY = 100  # parts of a dotted key; tomllib takes quadratic time for them
HIGHEST = 1 << 63  # whole numbers beyond fit no tensor and no file
KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def read_bytes(path: Path, *, limit: int = SMALL) -> bytes:
    """The content of a file of at most `limit` bytes; UserError if it is missing, larger, or not to be read."""
    try:
        handle = os.open(path, os.O_RDONLY | NO_WAIT)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path}: cannot be read: it is no regular file.")
            if found.st_size > limit:
                raise UserError(f"{path}: {found.st_size:,} bytes; at most {limit:,} make sense for such a file.")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read(limit + 1)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def read_text(path: Path, *, limit: int = SMALL) -> str:
    """The text of a UTF-8 file; UserError as for `read_bytes`, or where it is no UTF-8."""
    try:
        return read_bytes(path, limit=limit).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (at byte {error.start}). Save it as UTF-8.") from None


def read_toml(path: Path, *, limit: int = SMALL) -> dict[str, Any]:
    """The tables of a TOML file; UserError says where it is missing, unreadable, no TOML, or out of bounds."""
    text = read_text(path, limit=limit)
    with _parsed(path, "TOML"):
        if any(line.partition("=")[0].count(".") > LONGEST_KEY for line in text.splitlines()):
            raise ValueError(f"a key of more than {LONGEST_KEY} parts")
        return within_bounds(tomllib.loads(text))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError as for `read_toml`, or where it holds something else."""
    return parse_json(read_bytes(path, limit=LARGE), path)


def parse_json(text: bytes | str, where: object) -> dict[str, Any]:
    """The object that a JSON text holds; `where` it stands is for the UserError."""
    with _parsed(where, "JSON"):
        content = within_bounds(json.loads(text))
        if not isinstance(content, dict):
            raise ValueError(f"an object is needed, not a {type(content).__name__}")
        return content


@contextlib.contextmanager
def _parsed(where: object, form: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # a bare ValueError: a number too long for Python
        reason = "nested too deeply" if isinstance(error, RecursionError) else brief(str(error))
        raise UserError(f"{where}: not a {form} file: {reason}.") from None


def within_bounds(content: T) -> T:
    """`content`, made of dicts, lists and plain values.

    Raises:
        ValueError: it is nested too deeply, or holds a number that is infinite, NaN or beyond 64 bits; names the key.
    """
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}" if name else str(key), inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(name, inner, depth + 1) for inner in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{brief(name)} is {value}, which is no number")
        elif isinstance(value, int) and abs(value) >= HIGHEST:
            raise ValueError(f"{brief(name)} is too large a number")
    return content


def field(table: Any, key: str, kind: type[T], where: object, test: Callable[[T], object] = lambda _: True) -> T:
    """The value of `key` in `table`: a `kind` for which `test` holds, where a whole number may stand for a float.

    Raises:
        UserError: it is missing, of another kind, or refused by `test`; names file and key.
    """
    value = table.get(key) if isinstance(table, dict) else None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or not test(value):
        found = "missing" if value is None else brief(json.dumps(value, default=str))
        raise UserError(f"{where}: {key} is {found}; {KINDS[kind]} that can be used is needed.")
    return value


def count(table: Any, key: str, where: object, *, low: int = 1, high: int = 1 << 31) -> int:
    """A whole number from `low` to `high` in `table`; UserError as for `field`."""
    return field(table, key, int, where, lambda value: low <= value <= high)


def brief(text: str, longest: int = 200) -> str:
    """Text of others in a message: on one line, harmless to a terminal, and no longer than helps."""
    line = " ".join(escaped(text[: longest + 1]).split())
    return line if len(text) <= longest else f"{line[:longest]}..."
