"""How fast a model trains here: whole updates and their parts, timed on made-up tokens, without a run directory.

What is timed is the step that training takes: forward and backward of each micro-batch, then the update. The device is
waited for around blocks of micro-steps, not inside them; only the stages are timed with a wait after each.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nanogpt_cli.config.derived import Split
from nanogpt_cli.config.schema import Config
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.data.tokens.rows import RowOrder
from nanogpt_cli.errors import NanogptError
from nanogpt_cli.machine.compiling import compile_model
from nanogpt_cli.machine.device import Compute, memory_gib, synchronize
from nanogpt_cli.machine.distributed import ALONE
from nanogpt_cli.machine.memory import free_memory
from nanogpt_cli.model.sizes import flops_per_token
from nanogpt_cli.training.plan import rows_that_fit
from nanogpt_cli.training.state import build_state
from nanogpt_cli.training.step import TrainStep

SECONDS = 8.0  # of measuring, about
BLOCKS = 5  # medians are taken over at least so many timings, where one is short enough
MEMORY_SHARE = 0.6  # of free memory that a batch may be expected to take where trying would be dangerous
LONGEST = 15.0  # seconds of a micro-step after which a sweep goes no further
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Measurement:
    """Speed of one device; milliseconds are medians."""

    batch_size: int  # rows of a micro-batch
    micro_steps: int  # of one update on one device
    tokens_per_step: int
    micro_ms: float  # forward and backward of one micro-batch
    spread: float  # of micro_ms: largest less smallest timing, as a share of the median
    step_ms: float  # micro_steps * micro_ms + optimizer
    tokens_per_s: float
    flops_per_s: float  # PaLM's formula
    peak: float | None  # FLOP/s of the device
    memory_gib: float | None
    stages_ms: dict[str, float | None]  # of one update: data (read ahead while computing), forward, backward, optimizer

    @property
    def mfu(self) -> float | None:
        """Share of the peak."""
        return None if self.peak is None else self.flops_per_s / self.peak


class Bench:
    """A training state at step 0 and the step that training takes, on random tokens."""

    def __init__(self, config: Config, compute: Compute, batch_size: int) -> None:
        self.compute = compute
        state = build_state(config, compute, weights={})
        with torch.no_grad():
            for parameter in state.model.parameters():
                nn.init.normal_(parameter, std=0.02)
        if compute.compile and (problem := compile_model(state.model, compute, batch_size, config.model.block_size)):
            raise NanogptError(f"torch.compile failed here: {problem}. Use --compile off.")
        state.optimizer.set_rates(0.0)  # speed does not depend on the rate, and nothing can blow up
        self.state = state
        self.train_step = TrainStep(state, state.model, Split(batch_size, 1, 1), compute, ALONE)
        shape = (batch_size, config.model.block_size + 1)
        tokens = torch.randint(config.model.vocab_size or 1, shape, device=compute.device)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.micro_steps()  # kernels are picked, and compiled, in the first
        self.update()

    def forward(self) -> None:
        self.loss = self.train_step.forward(self.x, self.y)

    def backward(self) -> None:
        self.train_step.backward(self.loss)

    def micro_steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.forward()
            self.backward()

    def update(self) -> None:
        self.train_step.update(self.loss.detach())

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, the device's included."""
        synchronize(self.compute.device)
        began = time.perf_counter()
        work()
        synchronize(self.compute.device)
        return time.perf_counter() - began


def measure(
    config: Config,
    compute: Compute,
    *,
    batch_size: int,
    peak: float | None,
    seconds: float,
    data_set: DataSet | None = None,
) -> Measurement:
    """Time updates of `batch_size` rows a micro-batch on one device.

    Args:
        config: with vocab_size set.
        peak: FLOP/s of the device, for MFU.
        seconds: how long to measure, about; a few micro-steps are taken in any case.
        data_set: for the time of reading a batch.
    """
    if compute.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(compute.device)
    bench = Bench(config, compute, batch_size)
    once = bench.timed(bench.micro_steps)
    many = max(1, int(seconds / 2 / BLOCKS / once))  # micro-steps between two waits
    repeats = max(2, min(BLOCKS, int(seconds / 2 / (many * once))))
    micro = [bench.timed(lambda: bench.micro_steps(many)) / many for _ in range(repeats)]
    parts = bench.forward, bench.backward, bench.update
    rounds = [[bench.timed(part) for part in parts] for _ in range(max(1, min(BLOCKS, int(seconds / 2 / once))))]
    forward_s, backward_s, update_s = map(statistics.median, zip(*rounds, strict=True))
    micro_steps = -(-config.train.batch_size * config.train.gradient_accumulation_steps // batch_size)
    micro_s = statistics.median(micro)
    step_s = micro_steps * micro_s + update_s
    tokens = batch_size * micro_steps * config.model.block_size
    data_s = None if data_set is None else micro_steps * _reading(data_set, config, batch_size)
    return Measurement(
        batch_size=batch_size,
        micro_steps=micro_steps,
        tokens_per_step=tokens,
        micro_ms=1000 * micro_s,
        spread=(max(micro) - min(micro)) / micro_s,
        step_ms=1000 * step_s,
        tokens_per_s=tokens / step_s,
        flops_per_s=tokens / step_s * flops_per_token(config.model),
        peak=peak,
        memory_gib=memory_gib(compute.device),
        stages_ms={
            "data": None if data_s is None else 1000 * data_s,
            "forward": 1000 * micro_steps * forward_s,
            "backward": 1000 * micro_steps * backward_s,
            "optimizer": 1000 * update_s,
        },
    )


def _reading(data_set: DataSet, config: Config, batch_size: int) -> float:
    """Seconds to have one micro-batch on the device, if nothing were read ahead."""
    order = RowOrder(data_set.train.count, config.model.block_size, config.train.seed, config.data.sampling)
    split, rows, timings = Split(batch_size, 1, 1), config.model.vocab_size or 0, []
    with Batches(data_set.train, order, split, 0, first_row=0, vocab_size=rows, device="cpu") as batches:
        for _ in range(2 * BLOCKS):
            before = time.perf_counter()
            next(batches)
            timings.append(time.perf_counter() - before)
    return statistics.median(timings)


def sweep(config: Config, compute: Compute, *, peak: float | None) -> Iterator[Measurement]:
    """Measurements at batch sizes 1, 2, 4... until memory ends: tried on CUDA, elsewhere estimated and never tried."""
    batch_size = 1
    while compute.device.type == "cuda" or batch_size <= largest_batch(config, compute):
        try:
            found = measure(config, compute, batch_size=batch_size, peak=peak, seconds=SECONDS / 2)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return
        yield found
        if found.micro_ms > 1000 * LONGEST:
            return
        batch_size *= 2


def largest_batch(config: Config, compute: Compute) -> int:
    """Rows that are expected to fit into MEMORY_SHARE of free memory; at least 1."""
    free = free_memory()
    if free is None:
        return config.train.batch_size
    return max(1, rows_that_fit(config, compute, MEMORY_SHARE * free))


def profile(config: Config, compute: Compute, *, batch_size: int, folder: Path) -> Path:
    """Write a trace of a few updates to `folder`, for chrome://tracing or ui.perfetto.dev; its path."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    bench = Bench(config, compute, batch_size)
    synchronize(compute.device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if compute.device.type == "cuda" else [])
    with profiler(activities=activities) as trace:
        for _ in range(PROFILED_STEPS):
            bench.micro_steps()
            bench.update()
        synchronize(compute.device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    return path
