"""Who a process is, how ranks join, agree and part, and what is refused before anything starts."""

import os
import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_cli.config.layers import combine, flag_layer
from nanogpt_cli.config.schema import SystemSettings
from nanogpt_cli.errors import NanogptError, NonFiniteError, UserError
from nanogpt_cli.files import DiskFullError
from nanogpt_cli.machine import distributed
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.distributed import Processes, check_gpus, choose_backend, join, lost_contact
from nanogpt_cli.machine.rank_env import LAUNCHER, Launcher, Nodes, RankEnv, first_host, read_rank_env, split_endpoint
from nanogpt_cli.training import loop, saving
from nanogpt_cli.training.plan import plan_run
from tests.ranks import free_port, ranks, train
from tests.runner import Runner

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4321",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "3",
}


def test_a_lone_process() -> None:
    assert read_rank_env({}) == RankEnv()
    assert not read_rank_env(
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    ).distributed  # a batch script
    assert not read_rank_env({"RANK": "0"}).distributed


def test_torchrun() -> None:
    assert read_rank_env(TORCHRUN) == RankEnv(5, 4, 8, 1, "node1", 4321, True, "2")


def test_srun() -> None:
    env = read_rank_env(SRUN)
    assert env == RankEnv(9, 8, 16, 1, "gpu007", 20000 + 12345, False, "3-")
    own_gpu = read_rank_env({**SRUN, "CUDA_VISIBLE_DEVICES": "3"})
    assert own_gpu.device_index == 0
    named = read_rank_env({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7777"})
    assert (named.address, named.port) == ("10.0.0.1", 7777)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "9" * 5000}, "RANK"),
        ({**TORCHRUN, LAUNCHER: "{}"}, LAUNCHER),
        ({**TORCHRUN, LAUNCHER: "["}, LAUNCHER),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_LOCALID"),
        ({"SLURM_STEP_NUM_TASKS": "2.5"}, "SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        ({**SRUN, "SLURM_PROCID": "16"}, "SLURM_PROCID"),
    ],
)
def test_half_set_variables_are_refused_by_name(environ: dict[str, str], name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} is "):
        read_rank_env(environ)


def test_a_worker_of_our_launcher_on_the_second_machine() -> None:
    launcher = Launcher(pid=77, machines=Nodes(2, 1, "node1:2000", 33.0), attempt="1")
    local = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4", LAUNCHER: launcher.to_environment()}
    env = read_rank_env(local)
    assert (env.rank, env.device_index, env.world_size) == (5, 1, 8)
    assert (env.address, env.port, env.agent_store, env.attempt) == ("node1", 2000, False, "1")
    assert env.launcher == launcher


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-004,9],x1", "gpu003"),
        ("a[1,3]", "a1"),
        ("rack1-n[07-09]-ib", "rack1-n07-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@given(st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65535))
def test_endpoints(host: str, port: int) -> None:
    assert split_endpoint(f"{host}:{port}") == (host, port)
    assert split_endpoint(host) == (host, 29500)


def test_endpoints_with_colons_and_without_sense() -> None:
    assert split_endpoint("[::1]:2000") == ("::1", 2000)
    for wrong in ("", "host:", "host:0", "host:70000", "host:port", "a b:1"):
        with pytest.raises(UserError, match=re.escape("HOST:PORT is needed")):
            split_endpoint(wrong)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((2, 0, ""), "--nnodes 2 needs --rdzv-endpoint"),
        ((2, 2, "h:1"), "--node-rank 2 with --nnodes 2: machines are numbered 0 to 1"),
        ((1, 1, ""), "machines are numbered 0 to 0"),
        ((1, 0, "", float("nan")), "--rdzv-timeout nan: seconds are needed"),
        ((1, 0, "", float("inf")), "--rdzv-timeout inf: seconds are needed"),
        ((1, 0, "", -1.0), "--rdzv-timeout -1: seconds are needed"),
        ((1, 0, "", 60.0, -1), "--max-restarts -1: a whole number of at least 0"),
    ],
)
def test_machine_flags_that_do_not_go_together(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Nodes(*flags)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 2)
    check_gpus(SystemSettings(gpus=2), 2, 1)
    check_gpus(SystemSettings(device="cpu"), 8, 7)
    with pytest.raises(UserError, match=r"--gpus 8: this machine has 2 CUDA devices\. Use --gpus 2 or fewer"):
        check_gpus(SystemSettings(gpus=8), 8, 7)
    with pytest.raises(UserError, match="--device cuda:1 names one GPU, --gpus asks for 2"):
        check_gpus(SystemSettings(device="cuda:1"), 2, 1)


def test_one_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="one Apple GPU"):
        check_gpus(SystemSettings(), 2, 1)


def test_backend_is_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda:1"), torch.device("cpu")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_backend("auto", cuda) == choose_backend("nccl", cuda) == "nccl"
    assert choose_backend("gloo", cuda) == choose_backend("auto", cpu) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # Windows
    assert choose_backend("auto", cuda) == "gloo"
    for device in (cuda, cpu):
        with pytest.raises(UserError, match="--backend auto"):
            choose_backend("nccl", device)


def test_rows_that_do_not_divide_name_what_would(runs: Runner) -> None:
    with pytest.raises(UserError, match=r"4 rows an update.*do not divide over 3 ranks\. Use 1, 2, 4 ranks"):
        runs.plan("three", gpus=3)


def test_accumulation_that_does_not_divide_takes_smaller_micro_batches(runs: Runner) -> None:
    split = runs.plan("two", gpus=2, gradient_accumulation_steps=3).split
    assert (split.micro_batch, split.micro_steps, split.world_size) == (3, 2, 2)


def test_who_started_the_processes_decides_their_number(runs: Runner) -> None:
    flags = {key: str(value) for key, value in runs.settings(gpus=7).items()}
    plan = plan_run(combine(flag_layer(flags)), runs.root / "run", env=RankEnv(1, 2, 4))
    assert plan.config.system.gpus == 2
    assert plan.split.world_size == 4


def env_of(rank: int, count: int, port: int, **changes: Any) -> RankEnv:
    return RankEnv(rank, 1, count, rank, "127.0.0.1", port, **changes)


def test_missing_ranks_are_named_in_time() -> None:
    began, found = time.monotonic(), []
    port = free_port()

    def attempt(rank: int) -> None:
        try:
            join(env_of(rank, 4, port), 2.0)
        except UserError as error:
            found.append((rank, str(error), error.shared))

    threads = [threading.Thread(target=attempt, args=[rank]) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 <= time.monotonic() - began < 10
    assert len(found) == 2
    for _, message, shared in found:
        assert f"2 of 4 processes met at 127.0.0.1:{port} in 2 s; missing: rank 1, 3 (machine 1, 3)" in message
        assert shared


def test_nobody_at_the_endpoint() -> None:
    with pytest.raises(UserError, match=r"nobody was found at 127.0.0.1:\d+ in 0.5 s .*Connection refused"):
        join(env_of(1, 2, free_port()), 0.5)


def test_a_busy_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on this machine.*is taken.*--rdzv-endpoint"):
            join(env_of(0, 2, port), 5)


def test_one_process_needs_nobody() -> None:
    alone = Processes()
    assert alone.from_main([1]) == [1]
    assert alone.main
    alone.agree(None)
    alone.leave()
    with pytest.raises(NonFiniteError):
        alone.agree(NonFiniteError("nan"))


def meeting(problem_of: int | None) -> tuple[Any, str, bool]:
    processes = join(read_rank_env(), 30)
    told = processes.from_main({"rank": processes.rank})
    total = processes.sum(torch.tensor([1.0, float(processes.rank)])).tolist()
    message, shared = "", False
    try:
        processes.agree(NonFiniteError("a nan") if processes.rank == problem_of else None)
    except NanogptError as error:
        message, shared = f"{type(error).__name__}: {error}", error.shared
    processes.leave()
    return (told, total), message, shared


def test_ranks_talk_and_agree() -> None:
    for problem_of, expected in (
        (None, ""),
        (0, "NonFiniteError: a nan"),
        (2, f"rank 2 on {socket.gethostname()}: a nan"),
    ):
        for words, message, shared in ranks(3, meeting, problem_of):
            assert words == ({"rank": 0}, [3.0, 3.0])
            assert message.endswith(expected)
            assert shared == (problem_of is not None)


def dying(rank: int) -> str:
    """What rank 0 is told when another is gone."""
    processes = join(read_rank_env(), 30)
    if processes.rank == rank:
        os._exit(0)
    try:
        processes.sum(torch.ones(1))
    except RuntimeError as error:
        return f"{lost_contact(error)}"
    return "nothing"


def test_a_rank_that_is_gone_is_told_from_an_error_of_ones_own() -> None:
    assert not lost_contact(RuntimeError("shapes differ"))
    assert ranks(2, dying, 1) == ["True", None]


def cut_off() -> tuple[bool, bool]:
    """Whether rank 0 learns in time that the other says nothing any more, as a machine without power does."""
    distributed.PATIENCE = timedelta(seconds=2)
    processes, began = join(read_rank_env(), 30), time.monotonic()
    if processes.rank == 1:
        time.sleep(8)
        os._exit(0)
    try:
        processes.sum(torch.ones(1))
    except RuntimeError as error:
        return lost_contact(error), time.monotonic() - began < 6
    return False, False


def test_a_machine_that_is_lost_without_a_word_ends_the_others() -> None:
    assert ranks(2, cut_off) == [(True, True), None]


def test_gpus_wait_ten_minutes_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than the hour that a save by rank 0 may take, for which the others wait elsewhere."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **group: made.append(group))
    gpu = Compute(torch.device("cuda", 1), torch.bfloat16, compile=False, deterministic=False, reasons={})
    Processes(1, 8).on_device(gpu, "nccl")
    assert made == [{"backend": "nccl", "timeout": timedelta(minutes=10)}]


def parting() -> bool:
    """Whether a group is left on rank 0, whose partner went without a word."""
    processes = join(read_rank_env(), 30)
    if processes.rank == 1:
        os._exit(0)
    processes.leave()
    return torch.distributed.is_initialized()


def test_no_group_is_left_where_another_went_first() -> None:
    assert ranks(2, parting) == [False, None]


def with_a_full_disk(settings: dict[str, Any], run: Path) -> Any:
    """The first two saves of rank 0 find no room."""
    save, tries = saving.save_checkpoint, []

    def full(*args: Any, **more: Any) -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise DiskFullError(28, "no room", "ckpt.pt")
        save(*args, **more)

    saving.save_checkpoint = full
    return train(settings, run)


def test_a_full_disk_is_a_warning_on_every_rank(runs: Runner) -> None:
    wanted = runs.settings(eval_interval=2)
    assert ranks(2, with_a_full_disk, wanted, runs.root / "run") == [8, None]
    log = (runs.root / "run" / "logs" / "train.log").read_text()
    assert log.count("Training goes on; the next save tries again") == 2
    assert torch.load(runs.root / "run" / "ckpt.pt", weights_only=True)["step"] == 8


def with_a_nan(settings: dict[str, Any], run: Path) -> None:
    """Rank 1's first weight turns into NaN after step 3."""
    step = loop.Training.step

    def spoiled(self: loop.Training) -> None:
        step(self)
        if self.state.progress.step == 3 and self.processes.rank == 1:
            next(iter(self.state.optimizer.parameters.values())).data[0] = float("nan")

    loop.Training.step = spoiled  # type: ignore[method-assign]
    try:
        train(settings, run)
    except NonFiniteError:
        os._exit(NonFiniteError.exit_code)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_stops_all(runs: Runner, parallel: str) -> None:
    wanted = runs.settings(parallel=parallel, eval_interval=100)
    ranks(2, with_a_nan, wanted, runs.root / "run", codes=[3, 3])
