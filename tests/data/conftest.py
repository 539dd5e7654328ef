"""Small data sets, made on the spot."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tomli_w

from nanogpt_cli.data.catalogue import Entry, find
from nanogpt_cli.data.tokenizers import Tokenizer
from nanogpt_cli.data.tokens.data_set import DataSet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept in the user's cache stays in the test's folder."""
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))


def make_data_set(
    folder: Path,
    train: npt.ArrayLike,
    val: npt.ArrayLike | None = None,
    *,
    vocab_size: int = 65,
    dtype: str = "uint16",
    **changes: Any,
) -> Path:
    """A folder as prepare leaves it. `changes` replace entries of meta.toml; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, dict[str, Any]] = {}
    meta = {"format": 1, "name": folder.name, "dtype": dtype, "vocab_size": vocab_size, "splits": splits}
    for split, ids in (("train", train), ("val", np.arange(100) % 60 if val is None else val)):
        array = np.asarray(ids, dtype="<u2" if dtype == "uint16" else "<u4")
        (folder / f"{split}.bin").write_bytes(array.tobytes())
        splits[split] = {
            "tokens": len(array),
            "highest_id": int(array.max()) if len(array) else 0,
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            "bytes": array.nbytes,
        }
    meta = {key: value for key, value in (meta | changes).items() if value is not None}
    (folder / "meta.toml").write_text(tomli_w.dumps(meta))
    return folder


def tokenizer_of(data_set: DataSet) -> Tokenizer:
    """The tokenizer that a data set is known to have."""
    assert data_set.tokenizer is not None
    return data_set.tokenizer


def entry_of(name: str) -> Entry:
    """An entry that the catalogue is known to have."""
    entry = find(name)
    assert entry is not None
    return entry


@pytest.fixture
def data_set(tmp_path: Path) -> Callable[..., Path]:
    """`make_data_set` for a folder below tmp_path, by name."""

    def make(*args: npt.ArrayLike, folder: str = "mine", **changes: Any) -> Path:
        return make_data_set(tmp_path / "data" / folder, *args, **changes)

    return make
