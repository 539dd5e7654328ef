"""What a plan chooses and says of memory, on a GPU that is only pretended."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.config.layers import Layer, Rank, combine, flag_layer
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.training import plan as planning
from nanogpt_cli.training.plan import Plan, plan_run
from nanogpt_cli.training.request import TrainRequest
from tests.runner import Runner

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets how many GiB an H200 that is not there has."""
    reasons = dict.fromkeys(("device", "dtype", "compile"), "pretended")
    compute = Compute(torch.device("cuda", 0), torch.bfloat16, compile=True, deterministic=False, reasons=reasons)
    monkeypatch.setattr(planning, "choose_compute", lambda *args, **kwargs: compute)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def with_memory(gib: float) -> None:
        monkeypatch.setattr(planning, "memory_of", lambda device: int(gib * GIB))

    return with_memory


def gpt2(data: Path, run: Path, **flags: Any) -> Plan:
    given = flag_layer({"data_dir": str(data), **{key: str(value) for key, value in flags.items()}})
    return plan_run(combine(preset_layer("gpt2"), given), run)


def test_a_batch_that_nobody_typed_fills_the_gpu(gpu: Any, tiny_data: Path, tmp_path: Path) -> None:
    """The same rows and windows in micro-batches that its total memory holds, more of them on a larger GPU."""
    found = []
    for gib in (3, 8, 24, 80):
        gpu(gib)
        plan = gpt2(tiny_data, tmp_path / "run", block_size=256, vocab_size=50304)
        assert (plan.split.rows, plan.eval_windows) == (480, 200 * 12)
        assert sum(plan.memory.values()) <= planning.ROOM * gib * GIB
        assert plan.config.train.batch_size * plan.config.train.gradient_accumulation_steps == 480
        assert plan.split.micro_batch == 12 or "in place of 12" in plan.notes[-1]
        found.append(plan.split.micro_batch)
    assert found == sorted(found)
    assert found[0] < 12 < found[1] < found[2] < found[3]
    gpu(140)
    assert gpt2(tiny_data, tmp_path / "run", block_size=256, gpus=1, batch_size=12).split.micro_batch == 12, "typed"


def test_the_split_is_the_run_s_from_then_on(gpu: Any, runs: Runner, tmp_path: Path) -> None:
    """config.toml holds it, and a job that is started again, or over ranks, takes it from there."""
    gpu(140)
    preset = Layer("preset small", {"train": {"batch_size": 2, "gradient_accumulation_steps": 6}}, Rank.PRESET)
    given = {key: str(value) for key, value in runs.settings(batch_size=None).items() if value is not None}
    given |= {"gradient_accumulation_steps": "6", "eval_iters": "6"}
    plan = TrainRequest((preset, flag_layer(given)), tmp_path / "run").plan()
    train = plan.config_toml()["train"]
    assert (train["batch_size"], train["gradient_accumulation_steps"], train["eval_iters"]) == (12, 1, 1)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    from nanogpt_cli.files import write_toml

    write_toml(tmp_path / "run" / "config.toml", plan.config_toml())
    again = TrainRequest((preset, flag_layer(given)), tmp_path / "run", or_resume=True).plan()
    assert not again.makes_run
    assert (again.split, again.eval_windows) == (plan.split, plan.eval_windows)
    assert not any("in place of" in note for note in again.notes)


def test_what_no_batch_makes_fit_is_told_so(runs: Runner) -> None:
    with pytest.raises(UserError, match=r"One row at a time needs [\d.,]+: choose a smaller --n-layer") as refused:
        runs.plan("absurd", n_layer=10**9)  # before a list of all layers is made
    assert "--batch-size" not in str(refused.value)


def test_a_text_that_is_read_far_too_often_is_a_warning(runs: Runner) -> None:
    often = runs.plan("often", max_iters=10**6)
    assert any(f"reads its text {often.order.epoch(10**6 * often.split.rows):,.0f} times" in w for w in often.warnings)
    assert not any("reads its text" in warning for warning in runs.plan("seldom", max_iters=100).warnings)
