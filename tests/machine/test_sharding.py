"""Any number of ranks, replicated or sharded, trains the same: rows, losses, checkpoints.

Each run is started on that many processes (gloo on a CPU, NCCL with the other device string).
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.cli.report import plan_rows
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.distributed import gradient_sync, join
from nanogpt_cli.machine.rank_env import read_rank_env
from nanogpt_cli.machine.sharding import full_tensor, local_rows, to_local
from tests.ranks import ranks, recorded, resume, train
from tests.runner import Runner, same_weights

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tiny_settings: Settings, device: str) -> Settings:
    """A batch of 12 rows that 1, 2, 3 and 4 ranks divide, in float32."""

    def with_rows(**changes: Any) -> dict[str, Any]:
        rows = {"batch_size": 4, "gradient_accumulation_steps": 3, "dtype": "float32", "device": device}
        return tiny_settings(**{**rows, **changes})

    return with_rows


def gpus(count: int, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs here")


def losses(run: Path, key: str = "loss") -> list[float]:
    lines = map(json.loads, (run / "logs" / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def together(rows_of_ranks: list[list[list[int]]], steps: int, micro_steps: int, rows: int) -> list[list[int]]:
    """All ranks' rows of each update, after checking that none is taken twice."""
    found = []
    for step in range(steps):
        part = slice(step * micro_steps, (step + 1) * micro_steps)
        step_rows = [row for taken in rows_of_ranks for micro_batch in taken[part] for row in micro_batch]
        assert len(set(step_rows)) == len(step_rows) == rows
        found.append(sorted(step_rows))
    return found


def test_one_to_four_ranks_take_the_same_rows_and_have_the_same_losses(
    settings: Settings, tmp_path: Path, device: str
) -> None:
    gpus(4, device)
    wanted = settings(max_iters=100, eval_interval=50)
    curves, validation = {}, {}
    for count, micro_steps in ((1, 3), (2, 2), (3, 1), (4, 1)):
        run = tmp_path / f"run{count}"
        found = ranks(count, recorded, wanted, run)
        rows = together([taken for _, taken in found], 100, micro_steps, 12)
        assert rows == [list(range(12 * step, 12 * (step + 1))) for step in range(100)]
        curves[count], validation[count] = losses(run), losses(run, "val_loss")
    for count in (2, 3, 4):
        assert curves[count] == pytest.approx(curves[1], abs=1e-5)
        assert validation[count] == pytest.approx(validation[1], abs=1e-6)
    assert len(curves[1]) == 100


def test_resume_on_two_ranks_is_bit_identical(settings: Settings, tmp_path: Path, device: str) -> None:
    gpus(2, device)
    wanted = settings(dropout=0.1, deterministic=True, max_iters=8, lr_decay_iters=8, warmup_iters=1)
    ranks(2, train, wanted, tmp_path / "whole")
    ranks(2, train, {**wanted, "max_iters": 4}, tmp_path / "cut")
    ranks(2, resume, tmp_path / "cut", 8)
    assert same_weights(tmp_path / "whole" / "ckpt.pt", tmp_path / "cut" / "ckpt.pt")
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "compiled": (1, {"compile": "on"}),
    "two replicas": (2, {}),
    "compiled replicas": (2, {"compile": "on"}),
    "two shares": (2, {"parallel": "fsdp"}),
    "three shares, recomputing": (3, {"parallel": "fsdp", "activation_checkpointing": True}),
    "compiled shares": (2, {"parallel": "fsdp", "compile": "on"}),
}


def in_mode(mode: str, settings: dict[str, Any], run: Path) -> None:
    """Train or continue in one of `MODES`; what is to be compiled is traced only: building it would take minutes."""
    count, changes = MODES[mode]
    ranks(count, traced, settings if settings["max_iters"] == 4 else None, run, {**changes, **settings, "gpus": count})


def traced(settings: dict[str, Any] | None, run: Path, changes: dict[str, Any]) -> Any:
    torch.compile = functools.partial(torch.compile, backend="eager")
    given = {"parallel": "ddp", "compile": "off", "activation_checkpointing": False, **changes}
    if settings is not None:
        return train(given, run)
    return train(None, run, **{key: given[key] for key in (*FREE, "max_iters")})


FREE = ("parallel", "compile", "activation_checkpointing", "gpus")


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "ckpt.pt", weights_only=True)["model"]
    return found


@pytest.fixture
def eight_steps(settings: Settings, tmp_path: Path) -> Path:
    run = tmp_path / "plain8"
    ranks(1, train, settings(max_iters=8, lr_decay_iters=8, warmup_iters=1), run)
    return run


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("plain", "two shares"),
        ("two shares", "two replicas"),
        ("two replicas", "three shares, recomputing"),
        ("three shares, recomputing", "compiled"),
        ("compiled", "compiled replicas"),
        ("compiled replicas", "compiled shares"),
        ("compiled shares", "plain"),
    ],
)
def test_all_ways_of_running_continue_each_other(
    settings: Settings, tmp_path: Path, eight_steps: Path, device: str, first: str, then: str
) -> None:
    gpus(max(MODES[first][0], MODES[then][0]), device)
    wanted, run = settings(lr_decay_iters=8, warmup_iters=1), tmp_path / "run"
    in_mode(first, {**wanted, "max_iters": 4}, run)
    in_mode(then, {**wanted, "max_iters": 8}, run)
    whole, other = weights(eight_steps), weights(run)
    assert whole.keys() == other.keys()
    for name in whole:
        torch.testing.assert_close(other[name], whole[name], atol=2e-5, rtol=1e-4)
    assert losses(run) == pytest.approx(losses(eight_steps), abs=1e-5)
    best = torch.load(run / "best.pt", weights_only=True)
    assert best["model"].keys() == whole.keys()
    assert not any("optimizer" in key for key in best)


def shares(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    """Train with FSDP, and what this rank kept: its elements of weights and of moments, and their dtypes."""
    from nanogpt_cli.training import loop

    kept: dict[str, Any] = {}
    step = loop.Training.step

    def looking(self: loop.Training) -> None:
        step(self)
        optimizer = self.state.optimizer
        moments = [m for state in optimizer.adamw.state.values() for m in (state["exp_avg"], state["exp_avg_sq"])]
        kept["weights"] = sum(chunk.numel() for chunk in optimizer.parameters.values())
        kept["moments"] = sum(moment.numel() for moment in moments)
        kept["dtypes"] = {str(t.dtype) for t in (*optimizer.parameters.values(), *moments)}

    loop.Training.step = looking  # type: ignore[method-assign]
    train({**settings, "parallel": "fsdp"}, run)
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_rank_keeps_a_share_of_weights_and_float32_moments(
    settings: Settings, tmp_path: Path, device: str, dtype: str
) -> None:
    gpus(2, device)
    plain, run = tmp_path / "plain", tmp_path / "shares"
    ranks(1, train, settings(dtype=dtype, optimizer="adamw"), plain)
    kept = ranks(2, shares, settings(dtype=dtype), run)
    whole = sum(tensor.numel() for tensor in weights(run).values())
    assert sum(rank["weights"] for rank in kept) == whole
    assert sum(rank["moments"] for rank in kept) == 2 * whole
    assert max(rank["weights"] for rank in kept) < 0.55 * whole
    assert {name for rank in kept for name in rank["dtypes"]} == {"torch.float32"}
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize(("count", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_muon_keeps_its_momentum_over_ranks(
    settings: Settings, tmp_path: Path, device: str, count: int, parallel: str
) -> None:
    """Three ranks cut the matrices into chunks of different heights; in Qwen3 those of q, k and v differ too."""
    gpus(count, device)
    qwen3 = {"position": "rotary", "rope_theta": 1e4, "norm": "rmsnorm", "bias": False, "activation": "swiglu"}
    qwen3 |= {"n_head": 2, "n_kv_head": 1, "qk_norm": True, "qk_gain": True}
    wanted = settings(optimizer="muon", max_iters=6, lr_decay_iters=6, warmup_iters=1, **qwen3)
    ranks(1, train, wanted, tmp_path / "one")
    ranks(count, train, {**wanted, "max_iters": 3, "parallel": parallel}, tmp_path / "more")
    first = torch.load(tmp_path / "more" / "ckpt.pt", weights_only=True)
    shapes = {name: moments["momentum_buffer"].shape for name, moments in first["optimizer"]["muon"].items()}
    assert shapes == {n: w.shape for n, w in first["model"].items() if n.startswith("h.") and w.ndim == 2}
    ranks(count, resume, tmp_path / "more", 6)
    # bfloat16 in Muon's iteration enlarges differences of rounding
    assert losses(tmp_path / "more") == pytest.approx(losses(tmp_path / "one"), abs=2e-3)


def test_what_cannot_be_sharded_is_refused(runs: Runner) -> None:
    with pytest.raises(UserError, match="--dtype bfloat16 or float32"):
        runs.plan("no", parallel="fsdp", gpus=2, dtype="float16")


def test_memory_for_a_checkpoint_on_rank_0_is_told(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = runs.plan("run", parallel="fsdp", gpus=2)
    assert any("rank 0 puts each checkpoint together" in note for note in plan.notes)
    assert ("processes", "2 on this machine", "FSDP: each keeps a share of the model; gloo") in plan_rows(plan)
    monkeypatch.setattr("nanogpt_cli.training.plan.free_memory", lambda: 1000)
    warned = runs.plan("run", parallel="fsdp", gpus=2).warnings
    assert any("saving will fail" in warning for warning in warned)
    assert any("nothing to share out" in warning for warning in runs.plan("run", parallel="fsdp").warnings)


def test_recomputing_activations_changes_nothing_but_memory(runs: Runner, device: str) -> None:
    wanted = {"dropout": 0.1, "device": device, "deterministic": True}
    runs.train("kept", **wanted)
    runs.train("recomputed", activation_checkpointing=True, **wanted)
    assert same_weights(runs.root / "kept" / "ckpt.pt", runs.root / "recomputed" / "ckpt.pt")


def gradients_held(settings: dict[str, Any], run: Path) -> tuple[int, int]:
    """How many pieces of memory the gradients lie in after the last update, and how many gradients there are."""
    from nanogpt_cli.training import step

    held: list[int] = []
    update = step.TrainStep.update

    def looking(self: step.TrainStep, *args: Any, **kwargs: Any) -> Any:
        out = update(self, *args, **kwargs)
        parameters = list(self.state.model.parameters())
        storages = {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}
        held[:] = [len(storages), len(parameters)]
        return out

    step.TrainStep.update = looking  # type: ignore[method-assign]
    train(settings, run)
    return held[0], held[1]


def test_replicas_hold_each_gradient_once(settings: Settings, tmp_path: Path, device: str) -> None:
    """After an update the gradients are zeros in DDP's buckets, where the next update adds to them."""
    gpus(2, device)
    for storages, parameters in ranks(2, gradients_held, settings(max_iters=3), tmp_path / "run"):
        assert 0 < storages < parameters / 2


def test_more_ranks_than_rows_of_a_tensor() -> None:
    ranks(3, chunks_fit_together)


def chunks_fit_together() -> None:
    """Two rows over three ranks: the last has none, and the whole comes back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    processes = join(read_rank_env(), 30)
    whole_tensor = torch.arange(8.0).view(2, 4)
    mesh = init_device_mesh("cpu", (3,))
    sharded = distribute_tensor(whole_tensor.clone(), mesh, [Shard(0)])
    mine = local_rows(whole_tensor, sharded)
    assert torch.equal(mine, to_local(sharded))
    assert mine.shape[0] == (1, 1, 0)[processes.rank]
    gathered = full_tensor(mine, sharded)
    assert torch.equal(gathered, whole_tensor if processes.main else mine)
    processes.leave()


def gradients(correct: bool) -> list[float]:
    """Of two ranks' four micro-batches, gradients synchronised in the last; the wrong way looks at backward alone."""
    processes = join(read_rank_env(), 30)
    torch.manual_seed(0)
    bare = torch.nn.Linear(3, 1, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(bare)
    x = torch.arange(12.0).view(4, 3)
    for micro_step in range(2):
        last = micro_step == 1
        rows = x[2 * micro_step + processes.rank].view(1, 3)
        if correct:
            with gradient_sync(model, last=last):
                (model(rows).sum() / 2).backward()
        else:
            loss = model(rows).sum() / 2
            model.require_backward_grad_sync = last
            loss.backward()
    assert bare.weight.grad is not None
    processes.leave()
    return bare.weight.grad.view(-1).tolist()


def test_gradients_are_those_of_the_whole_batch() -> None:
    whole_batch = torch.arange(12.0).view(4, 3).mean(0).tolist()
    assert ranks(2, gradients, True) == [pytest.approx(whole_batch)] * 2
    assert ranks(2, gradients, False) != [pytest.approx(whole_batch)] * 2
