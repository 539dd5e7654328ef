"""Small data sets, made on the spot."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import tomli_w


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What is kept in the user's cache stays in the test's folder."""
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))


def make_data_set(folder: Path, train, val=None, *, vocab_size=65, dtype="uint16", **changes) -> Path:
    """A folder as prepare leaves it. `changes` replace entries of meta.toml; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"format": 1, "name": folder.name, "dtype": dtype, "vocab_size": vocab_size, "splits": {}}
    for split, ids in (("train", train), ("val", np.arange(100) % 60 if val is None else val)):
        ids = np.asarray(ids, dtype="<u2" if dtype == "uint16" else "<u4")
        (folder / f"{split}.bin").write_bytes(ids.tobytes())
        meta["splits"][split] = {
            "tokens": len(ids),
            "highest_id": int(ids.max()) if len(ids) else 0,
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "bytes": ids.nbytes,
        }
    meta = {key: value for key, value in (meta | changes).items() if value is not None}
    (folder / "meta.toml").write_text(tomli_w.dumps(meta))
    return folder


@pytest.fixture
def data_set(tmp_path):
    """`make_data_set` for a folder below tmp_path, by name."""

    def make(*args, folder="mine", **changes):
        return make_data_set(tmp_path / "data" / folder, *args, **changes)

    return make
