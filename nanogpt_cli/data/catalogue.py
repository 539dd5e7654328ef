"""The data sets that are known by name; what they are stands in catalogue.toml."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nanogpt_cli.data.download import PinnedFile


@dataclass(frozen=True)
class Entry:
    """One table of catalogue.toml, which explains the fields."""

    name: str
    about: str
    tokenizer: str
    file: str | None = None
    hub: str | None = None
    revision: str = ""
    pattern: str = ""
    val: dict[str, Any] = field(default_factory=lambda: {"rule": "tail"})
    shards: int = 0
    shard_val: float = 0.0
    download_bytes: int = 0
    tokens: int = 0
    preset: str | None = None
    expect: dict[str, int] = field(default_factory=dict)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Every name, small sets first."""
    return list(_tables()["datasets"])


def find(word: str) -> Entry | None:
    """The entry of a name; `-` and `_` are alike."""
    name = word.replace("-", "_")
    table = _tables()["datasets"].get(name)
    return None if table is None else Entry(name, **table)


def pinned(name: str) -> PinnedFile:
    """A file of the table `files`."""
    return PinnedFile(name, **_tables()["files"][name])
