"""What the clock of mfu covers."""

from typing import Any

import pytest
import torch

from nanogpt_cli.config.layers import combine, flag_layer
from nanogpt_cli.config.schema import Config
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.memory import free_memory
from nanogpt_cli.training import bench as measure


@pytest.fixture
def config() -> Config:
    names = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 8, "vocab_size": 11, "batch_size": 2}
    return combine(flag_layer({name: str(value) for name, value in names.items()})).config


@pytest.fixture
def compute() -> Compute:
    return Compute(torch.device("cpu"), torch.float32, compile=False, deterministic=True, reasons={})


def test_the_device_is_waited_for_before_and_after(
    config: Config, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that the device drives: work not waited for would take no time at all."""
    now, queued = 0.0, 0.0

    def synchronize(_: torch.device) -> None:
        nonlocal now, queued
        now, queued = now + queued, 0.0

    def work() -> None:
        nonlocal queued
        queued += 2.0

    monkeypatch.setattr(measure, "synchronize", synchronize)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    bench = measure.Bench(config, compute, 2)
    queued = 5.0  # left over from before: none of this work's time
    assert bench.timed(work) == 2.0


def test_an_update_is_the_sum_of_its_parts(config: Config, compute: Compute) -> None:
    config = config.replace("train", gradient_accumulation_steps=4)
    found = measure.measure(config, compute, batch_size=2, peak=1e12, seconds=0.0)
    assert found.micro_steps == 4
    assert found.tokens_per_step == 2 * 4 * 8
    assert found.mfu == pytest.approx(found.flops_per_s / 1e12)
    assert found.step_ms > 4 * found.micro_ms


def test_no_peak_no_mfu(config: Config, compute: Compute) -> None:
    assert measure.measure(config, compute, batch_size=1, peak=None, seconds=0.0).mfu is None


def test_steps_leave_the_weights_alone(config: Config, compute: Compute) -> None:
    """The rate is zero, so no number of steps can end in NaN, which is slow on some devices."""
    bench = measure.Bench(config, compute, 2)
    before = [p.detach().clone() for p in bench.state.model.parameters()]
    for _ in range(3):
        bench.micro_steps()
        bench.update()
    assert all(torch.equal(a, b) for a, b in zip(before, bench.state.model.parameters(), strict=True))


def test_the_largest_batch_follows_free_memory(
    config: Config, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest(free: int | None) -> int:
        monkeypatch.setattr(measure, "free_memory", lambda: free)
        return measure.largest_batch(config, compute)

    assert largest(None) == config.train.batch_size  # a system that does not say: nothing larger than asked for
    assert largest(0) == 1
    assert largest(10**8) < largest(10**9) < 10**9


def test_free_memory_is_no_fantasy() -> None:
    free = free_memory()
    assert free is None or 10**6 < free < 10**14


def test_a_sweep_ends_where_memory_does(config: Config, monkeypatch: pytest.MonkeyPatch, compute: Compute) -> None:
    """On CUDA it is tried, and running out is the end and no error."""
    tried: list[int] = []

    def measured(*_: Any, batch_size: int, **__: Any) -> Any:
        tried.append(batch_size)
        if batch_size > 4:
            raise torch.cuda.OutOfMemoryError
        return measure.Measurement(batch_size, 1, 1, 1.0, 0.0, 1.0, 1.0, 1.0, None, None, {})

    monkeypatch.setattr(measure, "measure", measured)
    on_cuda = Compute(torch.device("cuda", 0), torch.bfloat16, compile=False, deterministic=False, reasons={})
    found = list(measure.sweep(config, on_cuda, peak=None))
    assert [one.batch_size for one in found] == [1, 2, 4]
    assert tried == [1, 2, 4, 8]
