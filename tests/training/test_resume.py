"""A resumed run is the run that was never stopped: same losses, same weights, bit for bit."""

import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from nanogpt_cli.config.layers import combine, config_layer
from nanogpt_cli.errors import StoppedError, UserError
from nanogpt_cli.runs.checkpoint import load_checkpoint, load_training_state
from nanogpt_cli.training.plan import plan_run
from nanogpt_cli.training.start import start
from tests.conftest import TEXT, write_data_set
from tests.runner import Runner, same_weights

# everything that could carry hidden state: dropout, accumulation, evaluations between, an epoch border
BUSY = {"dropout": 0.2, "gradient_accumulation_steps": 2, "eval_interval": 3, "save_interval": 1, "batch_size": 4}


@pytest.fixture
def whole(runs: Runner) -> Path:
    """An unbroken run of 12 updates."""
    return runs.train("whole", max_iters=12, **BUSY).run.checkpoint


class StopAt:
    """Sends this process a signal after the batch of a chosen step was handed out."""

    def __init__(self, batches_before: int, signum: int = signal.SIGTERM) -> None:
        self.left, self.signum = batches_before, signum

    def __call__(self, original: Any) -> Any:
        def following(batches: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.signum)
            return original(batches)

        return following


@pytest.mark.parametrize("step", range(1, 12))
def test_resume_at_every_step(runs: Runner, whole: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanogpt_cli.data.tokens.batches import Batches

    # two micro-steps an update: the signal falls into the first or second one of update step + 1
    monkeypatch.setattr(Batches, "__next__", StopAt(2 * step + 1 + step % 2)(Batches.__next__))
    with pytest.raises(StoppedError) as stopped:
        runs.train("cut", max_iters=12, **BUSY)
    monkeypatch.undo()
    assert stopped.value.exit_code == 143
    saved = load_training_state(runs.root / "cut" / "ckpt.pt")["step"]
    assert saved in (step, step + 1)  # a signal in the last micro-step stops at the border after it
    runs.resume("cut")
    assert same_weights(runs.root / "cut" / "ckpt.pt", whole)
    assert runs.losses("cut") == runs.losses("whole")


def test_chain_of_resumes_across_epochs(runs: Runner) -> None:
    # 285 windows of 16 tokens, 64 rows an update: the third epoch is reached within 10 updates
    wide = {**BUSY, "batch_size": 32, "lr_decay_iters": 10, "warmup_iters": 2}
    whole = runs.train("wide", max_iters=10, **wide)
    runs.train("chain", max_iters=2, **wide)
    for until in (3, 5, 6, 10):
        runs.resume("chain", max_iters=until)
    assert runs.lines("chain")[-1]["step"] == 10
    assert max(line.get("epoch", 0) for line in runs.lines("chain")) > 2
    assert same_weights(runs.root / "chain" / "ckpt.pt", whole.run.checkpoint)
    assert runs.losses("chain") == runs.losses("wide")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_precision_resumes_exactly(runs: Runner, optimizer: str, dtype: str) -> None:
    kind = {"optimizer": optimizer, "dtype": dtype, "dropout": 0.1, "lr_decay_iters": 8, "warmup_iters": 1}
    whole = runs.train("whole", max_iters=8, **kind)
    runs.train("half", max_iters=4, **kind)
    runs.resume("half", max_iters=8)
    assert same_weights(runs.root / "half" / "ckpt.pt", whole.run.checkpoint)


def test_evaluation_does_not_disturb_training(runs: Runner) -> None:
    often = runs.train("often", max_iters=8, eval_interval=1, dropout=0.2)
    rarely = runs.train("rarely", max_iters=8, eval_interval=100, dropout=0.2)
    assert same_weights(often.run.checkpoint, rarely.run.checkpoint)


def test_finished_run_says_so_and_touches_nothing(runs: Runner) -> None:
    runs.train("done")
    before = {p: p.read_bytes() for p in (runs.root / "done").rglob("*") if p.is_file()}
    outcome = runs.resume("done")
    assert outcome.already_finished
    assert {p: p.read_bytes() for p in (runs.root / "done").rglob("*") if p.is_file()} == before


def test_without_a_checkpoint_the_same_run_starts_again(runs: Runner, whole: Path) -> None:
    runs.train("killed", max_iters=12, **BUSY)
    for name in ("ckpt.pt", "ckpt-previous.pt", "best.pt"):
        (runs.root / "killed" / name).unlink()
    outcome = runs.resume("killed")
    assert outcome.step == 12
    assert same_weights(runs.root / "killed" / "ckpt.pt", whole)
    assert runs.losses("killed") == runs.losses("whole")


def test_fork_goes_back_and_leaves_the_old_run_alone(runs: Runner) -> None:
    runs.train("old", max_iters=8, keep_every=2, eval_interval=2)
    before = {p: p.read_bytes() for p in (runs.root / "old").rglob("*") if p.is_file()}
    outcome = runs.resume("old", checkpoint=runs.root / "old" / "ckpt-000004.pt", new="new", max_iters=10)
    assert outcome.step == 10
    assert min(runs.losses("new")) == 5
    assert runs.losses("new")[6] == runs.losses("old")[6]
    assert outcome.run.best.is_file()
    assert {p: p.read_bytes() for p in (runs.root / "old").rglob("*") if p.is_file()} == before


def test_a_fork_of_the_best_keeps_it_where_nothing_better_follows(runs: Runner) -> None:
    old = runs.train("old", max_iters=2, eval_interval=2).run
    spoilt = {"max_iters": 4, "learning_rate": 10, "min_lr": 10, "schedule": "constant"}
    new = runs.resume("old", checkpoint=old.checkpoint, new="new", **spoilt).run
    assert load_training_state(new.checkpoint)["progress"]["best_step"] == 2, "the rate was to spoil the weights"
    assert load_checkpoint(new.best)["step"] == 2


def test_fork_needs_a_new_run(runs: Runner) -> None:
    runs.train("old")
    with pytest.raises(UserError, match="--run NEW"):
        runs.resume("old", checkpoint=runs.root / "old" / "ckpt.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 32}, "n_embd = 32"),
        ({"seed": 7}, "seed = 7"),
        ({"optimizer": "muon"}, "optimizer = muon"),
        ({"block_size": 8}, "block_size = 8"),
        ({"batch_size": 5}, "4 rows an update"),
    ],
)
def test_what_a_run_keeps_is_refused_and_nothing_changes(runs: Runner, change: dict[str, Any], message: str) -> None:
    runs.train("kept")
    before = {p: p.read_bytes() for p in (runs.root / "kept").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=message):
        runs.resume("kept", **change)
    assert {p: p.read_bytes() for p in (runs.root / "kept").rglob("*") if p.is_file()} == before


def test_free_changes_take_effect_and_stay(runs: Runner) -> None:
    runs.train("free", max_iters=4, schedule="constant", learning_rate=1e-3)
    runs.resume("free", max_iters=8, learning_rate=5e-4, batch_size=2, gradient_accumulation_steps=2)
    assert [line["lr"] for line in runs.lines("free") if "lr" in line] == [1e-3] * 4 + [5e-4] * 4
    config = tomllib.loads((runs.root / "free" / "config.toml").read_text())
    assert config["optim"]["learning_rate"] == 5e-4
    assert config["train"]["max_iters"] == 8


def test_max_iters_alone_keeps_the_schedule(runs: Runner) -> None:
    runs.train("frozen", max_iters=8, learning_rate=1e-3, min_lr=1e-4, warmup_iters=2)
    runs.resume("frozen", max_iters=10)
    rates = [line["lr"] for line in runs.lines("frozen") if "lr" in line]
    assert rates[8:] == [1e-4, 1e-4]
    assert any("rate stays at 0.0001" in text for text in runs.plan_warnings("frozen", max_iters=12))


def test_config_toml_says_what_is_used_and_repeats_the_run(runs: Runner) -> None:
    """Warm-up and decay that were frozen stand in it where a new run would derive others."""
    runs.train("frozen", max_iters=40, learning_rate=1e-3)
    runs.resume("frozen", max_iters=80)
    config = runs.root / "frozen" / "config.toml"
    tables = tomllib.loads(config.read_text())
    assert (tables["optim"]["warmup_iters"], tables["optim"]["lr_decay_iters"]) == (2, 40)
    assert not {"warmup_iters", "lr_decay_iters"} & tables["derived"].keys()
    again = start(plan_run(combine(config_layer(config)), runs.root / "again"), view=runs.view)
    assert same_weights(again.run.checkpoint, runs.root / "frozen" / "ckpt.pt")
    assert runs.losses("again") == runs.losses("frozen")


def test_a_warm_up_longer_than_the_decay_can_be_extended(runs: Runner) -> None:
    """No setting says that, so none is written: the run goes on."""
    runs.train("short", max_iters=4, warmup_iters=6)
    for until in (6, 9, 12):
        assert runs.resume("short", max_iters=until).step == until


@pytest.mark.parametrize("change", [{}, {"max_iters": 12}])
def test_format_1_is_read(runs: Runner, change: dict[str, Any]) -> None:
    """Its schedule and architecture stand beside settings that need not say the same."""
    settings = {"max_iters": 4, "init_from": str(runs.train("base", max_iters=2).run.path)}
    for name in ("new", "old"):
        runs.train(name, **settings)
        runs.resume(name, max_iters=8)
    path = runs.root / "old"
    tables = tomllib.loads((path / "config.toml").read_text())
    for key in ("n_layer", "vocab_size"):  # as given, not as the weights have it
        del tables["model"][key]
    for key in ("warmup_iters", "lr_decay_iters"):
        tables["optim"].pop(key, None)
    (path / "config.toml").write_text(tomli_w.dumps(tables))
    for name in ("ckpt.pt", "ckpt-previous.pt", "best.pt"):
        content = torch.load(path / name, weights_only=True)
        model, optim = content["config"]["model"], content["config"]["optim"]
        content |= {"format": 1, "architecture": model}
        content["config"] = {key: table for key, table in tables.items() if key != "derived"}
        if "optimizer" in content:
            content["schedule"] = {
                "shape": "cosine",
                "learning_rate": optim["learning_rate"],
                "min_lr": optim["learning_rate"] / 10,
                "warmup_iters": 0,
                "lr_decay_iters": 4,
            }
        torch.save(content, path / name)
    for name in ("new", "old"):
        runs.resume(name, **{"max_iters": 10, **change})
    assert same_weights(path / "ckpt.pt", runs.root / "new" / "ckpt.pt")
    assert runs.losses("old") == runs.losses("new")
    assert tomllib.loads((path / "config.toml").read_text())["model"]["n_layer"] == 1


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("crop", [{}, {"block_size": 8}])
def test_a_fine_tune_goes_on(runs: Runner, saved: bool, crop: dict[str, Any]) -> None:
    """Also where it ended before the first save: config.toml holds the whole architecture of the weights."""
    base = runs.train("base", max_iters=2, n_layer=2, n_embd=8).run.path
    given: dict[str, Any] = {"init_from": base, "n_layer": None, "n_embd": None, "n_head": None, "block_size": None}
    whole = runs.train("whole", **{**BUSY, **given, **crop})
    runs.train("cut", **{**BUSY, **given, **crop, "max_iters": 4, "lr_decay_iters": 8, "warmup_iters": 0})
    model = tomllib.loads((runs.root / "cut" / "config.toml").read_text())["model"]
    assert (model["n_layer"], model["n_embd"], model["vocab_size"]) == (2, 8, 23)
    if not saved:
        for name in ("ckpt.pt", "ckpt-previous.pt", "best.pt"):
            (runs.root / "cut" / name).unlink(missing_ok=True)
    runs.resume("cut", max_iters=8)
    assert same_weights(runs.root / "cut" / "ckpt.pt", whole.run.checkpoint)


def test_a_swapped_data_set_is_refused(runs: Runner, tiny_data: Path) -> None:
    runs.train("swap")
    write_data_set(tiny_data, TEXT.replace("nobler", "better"))
    with pytest.raises(UserError, match="not the data"):
        runs.resume("swap", max_iters=12)


def test_a_moved_data_set_is_found_by_flag(runs: Runner, tiny_data: Path) -> None:
    runs.train("moved", max_iters=4)
    elsewhere = tiny_data.rename(tiny_data.parent / "elsewhere")
    with pytest.raises(UserError):
        runs.resume("moved", max_iters=6)
    assert runs.resume("moved", max_iters=6, data_dir=elsewhere).step == 6


def test_data_that_was_moved_together_with_the_run_is_found(runs: Runner, tiny_data: Path, tmp_path: Path) -> None:
    runs.train("run", max_iters=4)
    (tmp_path / "elsewhere").mkdir()
    for name in ("runs", "data"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    runs.root = tmp_path / "elsewhere" / "runs"
    assert runs.resume("run", max_iters=6).step == 6
    assert str(tmp_path / "elsewhere" / "data" / "tiny") in (runs.root / "run" / "config.toml").read_text()
    write_data_set(tmp_path / "elsewhere" / "data" / "tiny", TEXT.replace("nobler", "better"))
    with pytest.raises(UserError, match="not the data"):
        runs.resume("run", max_iters=8)


def test_resume_from_another_folder(runs: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs.train("here", max_iters=4, data_dir="data/tiny")
    monkeypatch.chdir("/")
    assert runs.resume("here", max_iters=6).step == 6


def test_damaged_last_checkpoint_falls_back(runs: Runner, whole: Path) -> None:
    runs.train("hurt", max_iters=12, **BUSY)
    last = runs.root / "hurt" / "ckpt.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4  # one bit
    last.write_bytes(content)
    runs.resume("hurt")
    assert same_weights(last, whole)
    assert (runs.root / "hurt" / "ckpt-damaged.pt").is_file()
    assert runs.losses("hurt") == runs.losses("whole")


def test_best_is_rebuilt_after_a_kill_between_the_two_saves(runs: Runner) -> None:
    runs.train("between", max_iters=4, eval_interval=2)
    best = runs.root / "between" / "best.pt"
    expected = torch.load(best, weights_only=True)
    assert expected["step"] == 4  # the loss still falls
    best.unlink()
    runs.resume("between", max_iters=5, eval_interval=100)
    rebuilt = torch.load(best, weights_only=True)
    assert rebuilt["step"] in (4, 5)


def test_config_toml_damaged_the_checkpoint_stands_in(runs: Runner) -> None:
    runs.train("toml", max_iters=4)
    (runs.root / "toml" / "config.toml").write_text("[train\nmax_iters = ")
    assert runs.resume("toml", max_iters=6).step == 6
    assert tomllib.loads((runs.root / "toml" / "config.toml").read_text())["train"]["max_iters"] == 6


def test_each_life_of_a_run_is_recorded(runs: Runner) -> None:
    path = runs.train("lives", max_iters=2).run.environment
    first = tomllib.loads(path.read_text())
    for until in (4, 6):
        runs.resume("lives", max_iters=until)
    told = tomllib.loads(path.read_text())
    assert [life["versions"] for life in told.pop("resumed")] == [first["versions"]] * 2
    assert told == first
    path.write_text("[damaged")
    assert runs.resume("lives", max_iters=8).step == 8


def test_layouts_are_compared(runs: Runner) -> None:
    runs.train("layout", max_iters=4)
    runs.view.said.clear()
    runs.resume("layout", max_iters=6, batch_size=2, gradient_accumulation_steps=2)
    assert any("not bit-identical" in text and "micro_batch" in text for text in runs.view.said)


def test_checkpoint_holds_the_documented_items(runs: Runner) -> None:
    path = runs.train("keys").run.checkpoint
    saved = load_training_state(path)
    assert saved["step"] == 8
    assert saved["rows"] == 32
    assert saved["tokens"] == 32 * 16
    assert saved["optimizer"]["adamw"].keys() == saved["model"].keys()
    assert saved["config"]["model"]["vocab_size"] == 23
    assert saved["tokenizer"]["kind"] == "char"
    assert saved["layout"]["device"] == "cpu"
