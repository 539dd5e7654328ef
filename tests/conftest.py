"""What all tests share: a tiny data set of our own making, and runs on it that take a fraction of a second."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tomli_w
import torch

from tests.runner import Runner

if TYPE_CHECKING:
    from nanogpt_cli.data.tokenizers import Tokenizer

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 60


@pytest.fixture(autouse=True)
def few_threads() -> None:
    """Two cores are shared by everything that runs beside the tests."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def gpt2() -> "Tokenizer":
    """GPT-2's BPE, its files in the user's own cache and in the environment of every command a test starts."""
    from nanogpt_cli.data.tokenizers import get_tokenizer
    from nanogpt_cli.errors import NanogptError

    os.environ.pop("TIKTOKEN_CACHE_DIR", None)  # what an earlier test set lies in its own folder
    tokenizer = get_tokenizer("gpt2")
    try:
        tokenizer.byte_lengths()
    except NanogptError as error:
        pytest.skip(f"GPT-2's BPE is neither cached nor to be had: {error}")
    return tokenizer


def write_data_set(folder: Path, text: str = TEXT) -> Path:
    """A character data set in our format, without going through `prepare`."""
    from nanogpt_cli.data.tokenizers import CharTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = np.asarray(tokenizer.encode(text)).astype("<u2")
    cut = int(0.9 * len(ids))
    splits = {}
    for name, part in (("train", ids[:cut]), ("val", ids[cut:])):
        part.tofile(folder / f"{name}.bin")
        splits[name] = {
            "tokens": len(part),
            "highest_id": int(part.max()),
            "sha256": hashlib.sha256(part.tobytes()).hexdigest(),
            "bytes": part.nbytes,
        }
    meta = {
        "format": 1,
        "name": folder.name,
        "dtype": "uint16",
        "vocab_size": tokenizer.size,
        "eot_rule": "none",
        "split_rule": "the last 10% is val",
        "splits": splits,
        "tokenizer": tokenizer.to_toml(),
        "source": {},
        "statistics": {},
    }
    (folder / "meta.toml").write_text(tomli_w.dumps(meta), encoding="utf-8")
    return folder


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    """The folder of a character data set with 4,590 train and 510 val tokens, vocabulary 23."""
    return write_data_set(tmp_path / "data" / "tiny")


@pytest.fixture
def tiny_settings(tiny_data: Path) -> Callable[..., dict[str, Any]]:
    """Settings by name for a run on `tiny_data` that takes milliseconds a step; keyword arguments replace some."""

    def settings(**changes: Any) -> dict[str, Any]:
        return {
            "dataset": "tiny",
            "data_dir": str(tiny_data),
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 16,
            "block_size": 16,
            "batch_size": 4,
            "max_iters": 8,
            "eval_interval": 4,
            "eval_iters": 2,
            "log_interval": 1,
            "device": "cpu",
            "peak_tflops": 1,  # measuring takes longer than such a run
            **changes,
        }

    return settings


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runs(tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]]) -> Runner:
    return Runner(tmp_path / "runs", tiny_settings)
