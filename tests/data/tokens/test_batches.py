"""The training loader: right rows, ready in time, errors in the caller, no thread left behind, no memory eaten."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.config.derived import Split
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.data.tokens.rows import RowOrder, rank_rows
from nanogpt_cli.errors import NanogptError, UserError

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]


def tokens_of(folder: Path, ids: Sequence[int] | npt.NDArray[Any], name: str = "train.bin") -> Tokens:
    path = Path(folder) / name
    np.asarray(ids, "<u2").tofile(path)
    return Tokens([TokenFile(path, len(ids))], "uint16")


def loader(
    tokens: Tokens,
    block_size: int = 8,
    split: Split | None = None,
    rank: int = 0,
    *,
    first_row: int = 0,
    vocab_size: int = 65536,
    device: str = "cpu",
    seed: int = 1,
) -> Batches:
    order = RowOrder(tokens.count, block_size, seed, "shuffled")
    split = split or Split(4, 1, 1)
    return Batches(tokens, order, split, rank, first_row=first_row, vocab_size=vocab_size, device=device)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("device", DEVICES)
def test_targets_are_the_inputs_one_later(tmp_path: Path, device: str) -> None:
    with loader(tokens_of(tmp_path, range(1000)), device=device) as batches:
        for _ in range(50):
            x, y = next(batches)
            assert x.shape == y.shape == (4, 8)
            assert x.dtype == y.dtype == torch.int64
            assert x.device.type == device
            assert x.is_contiguous()
            assert y.is_contiguous()
            assert torch.equal(y, x + 1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_batches_hold_exactly_the_rows_of_the_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    block_size = data.draw(st.integers(1, 12))
    tokens = data.draw(st.one_of(st.just(block_size + 1), st.integers(block_size + 1, 300)))
    split = Split(*(data.draw(st.integers(1, 3)) for _ in range(3)))
    first_row = data.draw(st.integers(0, 100)) * split.rows
    stream = tokens_of(tmp_path_factory.mktemp("rows"), range(tokens))
    order = RowOrder(tokens, block_size, 1, "shuffled")
    for rank in range(split.world_size):
        with loader(stream, block_size, split, rank, first_row=first_row) as batches:
            for step in range(2):
                for micro_step in range(split.micro_steps):
                    rows = rank_rows(first_row + step * split.rows, split, rank, micro_step)
                    x, y = next(batches)
                    assert x.shape == y.shape == (split.micro_batch, block_size)
                    assert x[:, 0].tolist() == order.offsets(rows.start, len(rows)).tolist()
                    assert torch.equal(y, x + 1)


def test_starting_later_continues_the_same_rows(tmp_path: Path) -> None:
    tokens, split = tokens_of(tmp_path, range(500)), Split(2, 3, 1)
    with loader(tokens, split=split) as batches:
        whole = [next(batches)[0] for _ in range(12)]
    with loader(tokens, split=split, first_row=2 * split.rows) as batches:
        later = [next(batches)[0] for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(whole[6:], later, strict=True))


def test_a_bad_id_is_named_with_file_and_place_in_the_caller_and_in_its_turn(tmp_path: Path) -> None:
    ids = np.arange(2000) % 60
    ids[1234] = 200
    tokens = tokens_of(tmp_path, ids)
    order = RowOrder(2000, 8, 1, "shuffled")
    offsets = order.offsets(0, 4 * order.windows).reshape(-1, 4)
    bad = next(i for i, row in enumerate(offsets) if ((row <= 1234) & (row + 8 >= 1234)).any())
    assert bad > 3
    with loader(tokens, vocab_size=65) as batches:
        for _ in range(bad):
            next(batches)
        with pytest.raises(UserError, match=r"train\.bin holds id 200 at token 1,234.*65 ids.*--vocab-size 201"):
            next(batches)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, range(1000))
    with loader(tokens) as batches:
        next(batches)
        os.truncate(tmp_path / "train.bin", 10)
        with pytest.raises(NanogptError, match=r"train\.bin has become shorter"):
            list(itertools.islice(batches, 10))  # two may have been read ahead


def test_close_ends_the_thread_and_may_be_called_twice(tmp_path: Path) -> None:
    batches = loader(tokens_of(tmp_path, range(1000)))
    next(batches)
    assert reading_threads()
    batches.close()
    batches.close()
    assert not reading_threads()
    with pytest.raises(RuntimeError):
        next(batches)


def test_dropping_the_loader_ends_the_thread(tmp_path: Path) -> None:
    batches = loader(tokens_of(tmp_path, range(1000)))
    next(batches)
    del batches
    gc.collect()
    deadline = time.monotonic() + 10
    while reading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reading_threads()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "import _thread; _thread.interrupt_main(); next(b)"])
def test_the_interpreter_exits_with_a_loader_open(tmp_path: Path, end: str) -> None:
    tokens_of(tmp_path, range(1000))
    code = f"""
from pathlib import Path
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.rows import RowOrder
from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.config.derived import Split
tokens = Tokens([TokenFile(Path({str(tmp_path / "train.bin")!r}), 1000)], "uint16")
b = Batches(tokens, RowOrder(1000, 8, 1, "shuffled"), Split(4, 1, 1), 0, first_row=0, vocab_size=65536, device="cpu")
next(b)
print("read", flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "read\n"
    assert "KeyboardInterrupt" in done.stderr if "interrupt" in end else done.returncode == 0, done.stderr


def test_waiting_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(tmp_path, range(1000))
    read = Tokens.read

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr(Tokens, "read", slowly)
    with loader(tokens) as batches:
        for _ in range(4):
            next(batches)
        assert batches.waited_s > 0.1
        time.sleep(0.2)
        before = batches.waited_s
        next(batches)
        assert batches.waited_s - before < 0.04


def resident_mib() -> float:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_resident_memory_and_open_files_stay_flat(tmp_path: Path, count: int) -> None:
    path = tmp_path / "train.bin"
    path.touch()
    os.truncate(path, 4 << 30)  # sparse
    tokens = Tokens([TokenFile(path, (4 << 30) // 2)], "uint16")
    with loader(tokens, 1024, Split(12, 1, 1)) as batches:
        for _ in range(200):
            next(batches)
        memory, files = resident_mib(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(count):
            next(batches)
        # one memory map for all of them grows by 1,290 MiB in 2,000 such batches
        assert resident_mib() - memory < 16
        assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
