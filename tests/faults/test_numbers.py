"""Numbers going bad: the run stops with the last good step named, and nothing that is not finite is ever kept."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.runs.checkpoint import load_training_state, non_finite, save_checkpoint
from tests.faults.harness import Result, nanogpt
from tests.faults.lives import STEPS, Lab, metrics, strays

MICRO_STEPS = 2
BAD = [math.nan, math.inf, -math.inf]


@dataclass(frozen=True)
class SpoilLoss:
    """One micro-step of training has such a loss."""

    nth: int
    value: float

    def install(self, folder: Path) -> None:
        from nanogpt_cli.model.gpt import GPT

        real, calls = GPT.forward, 0

        def forward(model: Any, *arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += model.training
            found = real(model, *arguments, **more)
            return found * self.value if model.training and calls == self.nth else found

        GPT.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class SpoilGradient:
    """One number of one gradient is such a value, for some updates."""

    nth: int
    value: float
    name: str = "h.0.mlp.c_fc.weight"
    times: int = 1

    def install(self, folder: Path) -> None:
        from nanogpt_cli.training.optimizer import Optimizer

        real, calls = Optimizer.take_gradients, 0

        def take_gradients(optimizer: Any) -> None:
            nonlocal calls
            calls += 1
            if self.nth <= calls < self.nth + self.times:
                optimizer.parameters[self.name].grad.view(-1)[3] = self.value
            real(optimizer)

        Optimizer.take_gradients = take_gradients  # type: ignore[method-assign]


@dataclass(frozen=True)
class SpoilEvaluation:
    """One evaluation of a split gives such a loss."""

    nth: int
    value: float

    def install(self, folder: Path) -> None:
        from nanogpt_cli.training import validation

        real, calls = validation.windows_loss, 0

        def windows_loss(*arguments: Any, **more: Any) -> float:
            nonlocal calls
            calls += 1
            return self.value if calls == self.nth else real(*arguments, **more)

        validation.windows_loss = windows_loss


@dataclass(frozen=True)
class InitialScale:
    """float16 starts with such a loss scale."""

    scale: float

    def install(self, folder: Path) -> None:
        class Scaler(torch.amp.GradScaler):
            def __init__(scaler, *arguments: Any, **more: Any) -> None:  # noqa: N805
                super().__init__(*arguments, init_scale=self.scale, **more)

        torch.amp.GradScaler = Scaler  # type: ignore[misc]


def finite(run: Path) -> None:
    """Every file of a run."""
    for path in run.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        assert non_finite(state["model"]) is None, path
        for part in state.get("optimizer", {}).values():
            assert all(non_finite(moments) is None for moments in part.values()), path
    assert "NaN" not in (run / "logs" / "metrics.jsonl").read_text()
    assert "Infinity" not in (run / "logs" / "metrics.jsonl").read_text()


def stopped(lab: Lab, result: Result, good: int, saved: int) -> None:
    """Exit code 3, the last good step and the checkpoint named, everything finite."""
    assert result.code == 3, result
    assert "Traceback" not in result.err
    assert f"The last good step is {good}" in result.err, result
    assert f"the checkpoint of step {saved}" in result.err, result
    assert "nanogpt resume runs/cut" in result.err
    finite(lab.folder / "runs" / "cut")
    assert load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")["step"] == saved


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("micro_step", range(MICRO_STEPS))
def test_the_loss_of_one_micro_step(lab: Lab, value: float, micro_step: int) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), SpoilLoss(MICRO_STEPS * 4 + 1 + micro_step, value))
    stopped(lab, result, good=4, saved=3)
    lab.live("cut", [])  # the update was never made: without the fault the run is the unbroken one


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_gradient(lab: Lab, value: float, optimizer: str) -> None:
    line = f"{lab.line('cut')} --optimizer {optimizer}"
    stopped(lab, nanogpt(lab.folder, line, SpoilGradient(8, value)), good=7, saved=6)


def test_before_the_first_checkpoint(lab: Lab) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), SpoilLoss(1, math.nan))
    assert result.code == 3, result
    assert "no checkpoint was saved yet" in result.err
    lab.live("cut", [])


@pytest.mark.parametrize(("nth", "good"), [(3, 4), (11, STEPS)], ids=["in the middle", "at the end"])
def test_the_validation_loss(lab: Lab, nth: int, good: int) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), SpoilEvaluation(nth, math.nan))
    assert result.code == 3, result
    assert f"the validation loss is nan after step {good}" in result.err, result
    assert "nanogpt resume runs/cut" in result.err, result
    finite(lab.folder / "runs" / "cut")
    lab.live("cut", [])


def test_an_absurd_learning_rate(lab: Lab) -> None:
    result = nanogpt(
        lab.folder,
        lab.line("cut").replace("--learning-rate=0.1", "--learning-rate=1e38") + " --grad-clip 0 --max-iters 100",
    )
    assert result.code == 3, result
    finite(lab.folder / "runs" / "cut")
    assert strays(lab.folder) == []


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_file_that_holds_them(lab: Lab, part: str) -> None:
    """Written by something else: refused by name, before anything is trained or changed."""
    run = lab.folder / "runs" / "cut"
    shutil.copytree(lab.folder / "runs" / "resumed", run)
    state = torch.load(run / "ckpt.pt", weights_only=True)
    tensor = state["model"]["wte.weight"] if part == "model" else state["optimizer"]["adamw"]["wte.weight"]["exp_avg"]
    tensor[1, 1] = math.nan
    save_checkpoint(state, run / "ckpt.pt")
    for line in ("resume runs/cut --max-iters 14", "sample runs/cut --checkpoint last")[: 1 + (part == "model")]:
        result = nanogpt(lab.folder, line)
        assert result.code == 2, result
        assert "NaN or infinity (wte.weight" in result.err
        assert "runs/cut/ckpt.pt" in result.err


def test_a_skipped_float16_update_is_counted_and_no_error(lab: Lab) -> None:
    """A scale so high that the first updates overflow: it is halved until they do not, and the run goes on."""
    line = f"{lab.line('cut')} --dtype float16"
    result = nanogpt(lab.folder, line, InitialScale(2.0**26))
    assert result.code == 0, result
    skipped = [entry["skipped"] for entry in metrics(lab.folder / "runs" / "cut") if "skipped" in entry]
    assert 0 < skipped[0] <= skipped[-1] < STEPS
    assert f"skipped {skipped[-1]}" in result.err
    state = load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")
    assert state["progress"]["skipped"] == skipped[-1]
    assert state["scaler"]["scale"] == 2.0 ** (26 - skipped[-1])
    finite(lab.folder / "runs" / "cut")


def test_one_float16_gradient(lab: Lab) -> None:
    line = f"{lab.line('cut')} --dtype float16"
    result = nanogpt(lab.folder, line, SpoilGradient(5, math.inf))
    assert result.code == 0, result
    assert load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")["progress"]["skipped"] == 1


def test_a_collapsing_loss_scale(lab: Lab) -> None:
    """Every update overflows from the third on: after sixteen halvings it is no longer a matter of the scale."""
    line = f"{lab.line('cut')} --dtype float16 --max-iters 100"
    result = nanogpt(lab.folder, line, SpoilGradient(3, math.inf, times=1000))
    assert result.code == 3, result
    assert "the loss scale fell below 1 at step 19" in result.err, result
    assert "bfloat16" in result.err
    finite(lab.folder / "runs" / "cut")


def test_a_float16_loss_that_is_not_finite(lab: Lab) -> None:
    result = nanogpt(lab.folder, f"{lab.line('cut')} --dtype float16", SpoilLoss(9, math.inf))
    stopped(lab, result, good=4, saved=3)
