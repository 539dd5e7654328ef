"""The loop keeps its promises: exact updates, best and last apart, nothing non-finite on disk, one mean a step."""

import math
import os
import signal
import time
from typing import Any

import pytest
import torch

from nanogpt_cli.errors import NanogptError, NonFiniteError, StoppedError, UserError
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import load_training_state
from nanogpt_cli.training import loop, saving, validation
from nanogpt_cli.training.optimizer import Optimizer
from nanogpt_cli.training.state import build_state
from tests.runner import Runner, same_weights


def test_exactly_max_iters_updates_and_a_save_at_the_end(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, skip: (taken.append(1), original(self, skip))[1])
    outcome = runs.train("three", max_iters=3, eval_interval=100)
    assert (len(taken), outcome.step) == (3, 3)
    assert load_training_state(outcome.run.checkpoint)["step"] == 3
    assert [line["step"] for line in runs.lines("three") if "val_loss" in line] == [3]


def test_first_update_has_a_rate_above_zero(runs: Runner) -> None:
    outcome = runs.train("one", max_iters=1, warmup_iters=0)
    plan = runs.plan("fresh")
    start = build_state(plan.config, plan.compute).model.state_dict()
    saved = load_training_state(outcome.run.checkpoint)["model"]
    assert not torch.equal(start["wte.weight"], saved["wte.weight"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_host_never_waits_inside_a_step(
    runs: Runner, monkeypatch: pytest.MonkeyPatch, optimizer: str, dtype: str
) -> None:
    step = loop.Training.step

    def watched(self: loop.Training) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.state.progress.step else "default")  # the first sets things up
        step(self)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop.Training, "step", watched)
    assert runs.train("run", device="cuda", optimizer=optimizer, dtype=dtype, dropout=0.1, max_iters=6).step == 6


def test_fresh_loss_is_that_of_guessing(runs: Runner) -> None:
    runs.train("guess", max_iters=1)
    assert runs.losses("guess")[1] == pytest.approx(math.log(23), rel=0.05)


def test_best_and_last_are_kept_apart(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 9.0, 2.0, 9.0, 2.5, 9.0])  # val, train, val, train, ...
    monkeypatch.setattr(validation, "windows_loss", lambda *args, **kwargs: next(losses))
    outcome = runs.train("scripted", max_iters=6, eval_interval=2)
    best = torch.load(outcome.run.best, weights_only=True)
    last = load_training_state(outcome.run.checkpoint)
    assert (best["step"], best["val_loss"]) == (4, 2.0)
    assert (last["step"], last["progress"]["best_loss"], last["progress"]["best_step"]) == (6, 2.0, 4)
    assert [e.best for e in runs.view.evaluations] == [True, True, False]


def gradients(runs: Runner, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Gradients as the optimizer sees them at the first update."""
    seen: dict[str, torch.Tensor] = {}
    original = Optimizer.step

    def look(self: Optimizer, skip: torch.Tensor) -> None:
        if not seen:
            seen.update({n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None})
        original(self, skip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", look)
        runs.train(name, max_iters=1, **changes)
    return seen


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_accumulation_is_the_mean_of_one_big_batch(runs: Runner, clip: float) -> None:
    one = gradients(runs, "one", batch_size=8, grad_clip=clip)
    four = gradients(runs, "four", batch_size=2, gradient_accumulation_steps=4, grad_clip=clip)
    assert runs.losses("one")[1] == pytest.approx(runs.losses("four")[1], abs=1e-6)
    for name in one:
        torch.testing.assert_close(one[name], four[name], atol=1e-6, rtol=1e-4)
    if clip:
        norm = torch.sqrt(sum((g**2).sum() for g in one.values()))
        assert float(norm) == pytest.approx(clip, rel=1e-3)


def test_the_window_is_a_mean(runs: Runner) -> None:
    runs.train("each", max_iters=8, log_interval=1)
    runs.train("windows", max_iters=8, log_interval=4)
    each = runs.losses("each")
    assert runs.losses("windows") == {
        4: pytest.approx(sum(each[s] for s in range(1, 5)) / 4, abs=1e-12),
        8: pytest.approx(sum(each[s] for s in range(5, 9)) / 4, abs=1e-12),
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(runs: Runner, optimizer: str) -> None:
    with pytest.raises(NonFiniteError, match="last good step") as stopped:
        runs.train(
            "wild", max_iters=60, learning_rate=1e20, muon_lr=1e20, schedule="constant", grad_clip=0,
            save_interval=1, eval_interval=100, optimizer=optimizer,
        )  # fmt: skip
    assert stopped.value.exit_code == 3
    saved = load_training_state(runs.root / "wild" / "ckpt.pt")
    assert all(torch.isfinite(t).all() for t in saved["model"].values())


@pytest.mark.parametrize("micro_step", [0, 1])
def test_nan_in_one_micro_step_skips_the_update(runs: Runner, monkeypatch: pytest.MonkeyPatch, micro_step: int) -> None:
    calls = {"n": 0}
    original = GPT.forward

    def poisoned(self: GPT, idx: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        out = original(self, idx, targets, **kwargs)
        if self.training:
            calls["n"] += 1
            if calls["n"] == 2 * 4 + 1 + micro_step:  # in update 5
                return out * float("nan")
        return out

    monkeypatch.setattr(GPT, "forward", poisoned)
    accumulate = {"gradient_accumulation_steps": 2, "batch_size": 2, "save_interval": 1, "eval_interval": 100}
    with pytest.raises(NonFiniteError, match=r"step 5.*\n.*last good step is 4"):
        runs.train("poisoned", **accumulate)
    monkeypatch.undo()
    clean = runs.train("clean", max_iters=4, lr_decay_iters=8, warmup_iters=0, **accumulate)
    assert load_training_state(runs.root / "poisoned" / "ckpt.pt")["step"] == 4
    assert same_weights(runs.root / "poisoned" / "ckpt.pt", clean.run.checkpoint)


def test_float16_overflow_is_skipped_and_counted(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.amp.GradScaler.__init__

    def too_high(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, init_scale=2.0**40, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", too_high)
    outcome = runs.train("half", dtype="float16", max_iters=40, eval_interval=100, warmup_iters=0)
    skipped = load_training_state(outcome.run.checkpoint)["progress"]["skipped"]
    assert 0 < skipped < 40
    assert runs.lines("half")[-2]["skipped"] == skipped
    assert outcome.step == 40


def test_collapsed_loss_scale_stops(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "clip", lambda *args, **kwargs: torch.tensor(float("inf")))
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: 0.5)
    with pytest.raises(NonFiniteError, match="loss scale fell below 1"):
        runs.train("collapse", dtype="float16")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_a_second_one_stops_at_once(
    runs: Runner, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    original = loop.Training.step

    def kill_in_step_three(self: loop.Training) -> None:
        if self.state.progress.step == 2:
            os.kill(os.getpid(), signum)
        original(self)

    monkeypatch.setattr(loop.Training, "step", kill_in_step_three)
    with pytest.raises(StoppedError, match="after step 2, which is saved") as stopped:
        runs.train("stopped")
    assert stopped.value.exit_code == code
    assert load_training_state(runs.root / "stopped" / "ckpt.pt")["step"] == 2

    def kill_twice(self: loop.Training) -> None:
        if self.state.progress.step == 6:
            os.kill(os.getpid(), signum)
            os.kill(os.getpid(), signum)
        original(self)

    monkeypatch.setattr(loop.Training, "step", kill_twice)
    with pytest.raises(StoppedError, match="at once"):
        runs.resume("stopped")
    assert load_training_state(runs.root / "stopped" / "ckpt.pt")["step"] == 4


def test_a_full_disk_warns_trains_on_and_saves_again(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    original = saving.save_checkpoint
    calls = {"n": 0}

    def full_twice(*args: Any, **kwargs: Any) -> None:
        calls["n"] += 1
        if calls["n"] in (2, 3):
            raise saving.DiskFullError(28, "no space left on the disk", "ckpt.pt")
        original(*args, **kwargs)

    monkeypatch.setattr(saving, "save_checkpoint", full_twice)
    outcome = runs.train("full", max_iters=6, save_interval=1, eval_interval=100)
    assert sum("was not saved: the disk is full" in text for text in runs.view.said) == 2
    assert load_training_state(outcome.run.checkpoint)["step"] == 6


def test_a_full_disk_at_the_end_is_an_error(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def always_full(*args: Any, **kwargs: Any) -> None:
        raise saving.DiskFullError(28, "no space left on the disk", "ckpt.pt")

    monkeypatch.setattr(saving, "save_checkpoint", always_full)
    with pytest.raises(NanogptError, match="When there is room again") as failed:
        runs.train("full", max_iters=2)
    assert failed.value.exit_code == 1


def test_a_run_directory_that_was_moved_is_not_called_a_full_disk(
    runs: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*args: Any, **kwargs: Any) -> None:
        (runs.root / "here").rename(runs.root / "there")
        raise FileNotFoundError(2, "No such file or directory", "ckpt.pt")

    monkeypatch.setattr(saving, "save_checkpoint", moved)
    with pytest.raises(NanogptError, match=r"is gone.* If it was moved, .*nanogpt resume NEW-PLACE"):
        runs.train("here", max_iters=2)


def test_saves_by_the_clock(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.Saver, "minutes_are_up", lambda self: True)
    runs.train("minutes", max_iters=4, save_minutes=1, save_interval=100, eval_interval=100, keep_every=0)
    saved = load_training_state(runs.root / "minutes" / "ckpt-previous.pt")["step"]
    assert saved == 2  # every update asks for a save and is heard one later, so every second one is saved


def test_milestones_are_kept(runs: Runner) -> None:
    outcome = runs.train("milestones", max_iters=6, keep_every=2)
    names = sorted(p.name for p in outcome.run.path.glob("ckpt-0*.pt"))
    assert names == ["ckpt-000002.pt", "ckpt-000004.pt", "ckpt-000006.pt"]
    assert load_training_state(outcome.run.milestone(4))["step"] == 4


@pytest.mark.parametrize("times", [1, 2])
def test_a_milestone_that_could_not_be_linked_is_made_up_for(
    runs: Runner, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Once, before the next save: afterwards ckpt.pt is of another step."""
    original, refused = saving.link_or_copy, [True] * times

    def refusing(source: Any, target: Any) -> None:
        if target.name == "ckpt-000002.pt" and refused and refused.pop():
            raise OSError(5, "Input/output error", str(target))
        original(source, target)

    monkeypatch.setattr(saving, "link_or_copy", refusing)
    outcome = runs.train("once", max_iters=6, keep_every=2, eval_interval=100)
    assert any("The milestone of step 2 was not saved" in text for text in runs.view.said)
    kept = {path.name: load_training_state(path)["step"] for path in outcome.run.path.glob("ckpt-0*.pt")}
    assert kept == {f"ckpt-{step:06d}.pt": step for step in ((2, 4, 6) if times == 1 else (4, 6))}


def scripted(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Validation losses to come; the last one stays."""
    left = list(losses)

    def scripted_loss(model: Any, tokens: Any, *args: Any, **kwargs: Any) -> float:
        if tokens.count != 510:  # train
            return 1.0
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(validation, "windows_loss", scripted_loss)


def test_patience_ends_a_run_and_its_count_outlives_a_stop(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_iters": 20, "eval_interval": 2, "patience": 3}
    scripted(monkeypatch, 5.0, 3.0, 4.0, 4.0, 2.0, 4.0)  # after steps 2, 4, 6...: the best is 10
    outcome = runs.train("patient", **settings)
    assert (outcome.step, outcome.ended_by) == (16, "--patience")
    saved = load_training_state(outcome.run.checkpoint)["progress"]
    assert (saved["best_step"], saved["not_better"], saved["evaluated_step"]) == (10, 3, 16)

    scripted(monkeypatch, 5.0, 3.0, 4.0, 4.0, 2.0, 4.0)
    assert runs.train("cut", **{**settings, "max_iters": 12, "lr_decay_iters": 20, "warmup_iters": 1}).ended_by == ""
    assert runs.resume("cut", max_iters=20).step == 16
    assert same_weights(outcome.run.checkpoint, runs.root / "cut" / "ckpt.pt")
    assert runs.resume("cut").already_finished
    assert runs.resume("cut", patience=4).step == 18


def test_max_minutes_saves_and_ends(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_iters": 8, "dropout": 0.1, "eval_interval": 100}
    whole = runs.train("whole", **settings)
    outcome = runs.train("timed", max_minutes=1e-9, **settings)
    assert (outcome.step, outcome.ended_by) == (2, "--max-minutes")  # heard one step later
    assert load_training_state(outcome.run.checkpoint)["step"] == 2
    assert runs.resume("timed", max_minutes=100).step == 8
    assert same_weights(whole.run.checkpoint, outcome.run.checkpoint)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 20))
    assert runs.train("job", **settings).ended_by == "the end of the SLURM job"
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME is 'soon'"):
        runs.train("wrong", **settings)


def test_two_seeds_differ_and_one_seed_is_identical(runs: Runner) -> None:
    a, b, c = (runs.train(name, max_iters=3, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert same_weights(a.run.checkpoint, b.run.checkpoint)
    assert not same_weights(a.run.checkpoint, c.run.checkpoint)


def test_a_failing_compilation_is_a_warning_for_auto_and_an_error_for_on(
    runs: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanogpt_cli.machine import device
    from nanogpt_cli.training import start

    monkeypatch.setattr(start, "compile_model", lambda *args: "InductorError: no compiler")
    monkeypatch.setattr(device, "_choose_compile", lambda *args: (True, "for this test"))
    assert runs.train("auto", max_iters=1, compile="auto").step == 1
    assert any("no compiler" in text for text in runs.view.said)
    with pytest.raises(NanogptError, match="--compile on"):
        runs.train("on", max_iters=1, compile="on")
