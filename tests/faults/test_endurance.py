"""Long runs: memory, open files and the time of a step stay where they were."""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanogpt_cli.config.derived import Split
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.data.tokens.rows import RowOrder
from tests.faults.harness import Command, nanogpt
from tests.faults.lives import Lab, flags

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MIB = 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("batches", [3_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_a_large_file(tmp_path: Path, batches: int) -> None:
    """A map of the file would keep each page that was touched: 12 kB a batch."""
    path, count = tmp_path / "train.bin", 2**31
    path.touch()
    os.truncate(path, 2 * count)  # 4 GiB that take no room
    tokens = Tokens([TokenFile(path, count)], "uint16")
    order = RowOrder(count, 64, seed=1, sampling="shuffled")
    split = Split(micro_batch=3, micro_steps=1, world_size=1)
    with Batches(tokens, order, split, 0, first_row=0, vocab_size=1, device="cpu") as stream:
        for _ in range(500):
            next(stream)
        before = resident()
        for _ in range(batches):
            x, _ = next(stream)
        assert x.shape == (3, 64)
        assert resident() - before < 4 * MIB


@dataclass(frozen=True)
class Watch:
    """Writes memory, open files and threads of the process to a file every so many steps."""

    target: Path
    every: int

    def install(self, folder: Path) -> None:
        from nanogpt_cli.training.loop import Training

        real, began = Training.step, time.perf_counter()
        handle = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def step(training: Any) -> None:
            real(training)
            done = training.state.progress.step
            if done % self.every == 0:
                files, threads = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))
                sample = {"step": done, "memory": resident(), "files": files, "threads": threads}
                sample["seconds"] = time.perf_counter() - began
                os.write(handle, json.dumps(sample).encode() + b"\n")

        Training.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("steps", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_many_tiny_steps(lab: Lab, tmp_path: Path, steps: int) -> None:
    """With everything a run does on its way: log lines, evaluations, saves; but samples, whose first one comes late."""
    settings = {"max_iters": steps, "learning_rate": 1e-3, "eval_interval": steps // 10, "save_interval": steps // 20}
    line = lab.line("cut") + " " + flags(**settings, log_interval=10, keep_every=0, gradient_accumulation_steps=1)
    line += " --no-sample"
    watch = Watch(tmp_path / "samples", steps // 40)
    command = Command(line.split(), lab.folder, [watch])
    assert command.wait(3000).code == 0
    samples = [json.loads(text) for text in watch.target.read_text().splitlines()]
    assert len(samples) == 40
    settled = samples[10:]
    for kind in ("files", "threads"):
        assert len({sample[kind] for sample in settled}) == 1, settled
    growth = settled[-1]["memory"] - settled[0]["memory"]
    assert growth < 2 * MIB, growth
    # medians of many stretches: what else runs on the machine comes and goes
    stretches = np.diff([sample["seconds"] for sample in samples])
    early, late = statistics.median(stretches[:20]), statistics.median(stretches[20:])
    assert late < (1.2 if steps > 10_000 else 2) * early, (early, late)


@dataclass(frozen=True)
class Peak:
    """Writes down the most memory that the process held until its training ended, bytes."""

    target: Path

    def install(self, folder: Path) -> None:
        from nanogpt_cli.training.loop import Training

        real = Training.train

        def train(training: Any, *arguments: Any) -> None:
            real(training, *arguments)
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self.target.write_text(str(1024 * int(status["VmHWM"].split()[0])))

        Training.train = train  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_resuming_needs_no_more_memory(lab: Lab, tmp_path: Path, optimizer: str) -> None:
    """No more than a fresh start and one copy of the weights; the file holds three."""
    layers, width, peak = 4, 512, Peak(tmp_path / "peak")
    size = flags(n_layer=layers, n_embd=width, max_iters=2, optimizer=optimizer, learning_rate=1e-4, eval_iters=1)
    assert nanogpt(lab.folder, f"{lab.line('cut')} {size} --keep-every 0", peak).code == 0
    fresh = int(peak.target.read_text())
    assert nanogpt(lab.folder, "resume runs/cut --max-iters 4", peak).code == 0
    resumed = int(peak.target.read_text())
    weights = 4 * 12 * layers * width**2
    assert resumed <= fresh + weights, ((resumed - fresh) / weights, fresh / MIB, weights / MIB)
