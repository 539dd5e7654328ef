"""Ranks started by our launcher, by torchrun, and by srun; and every way in which one of them can go wrong.

Each launch here costs some seconds, for torch is loaded afresh in every worker. Whatever fails must have ended within
30 s, with one message and the right exit code, and leave no process behind.
"""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.errors import NanogptError, StoppedError, UserError
from nanogpt_cli.machine.rank_env import Nodes
from tests import faulty
from tests.ranks import as_srun, free_port, ranks, resume, train
from tests.runner import Runner, same_weights

LIMIT = 30.0  # seconds from a fault to the end of everything

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups of POSIX")


class Lab:
    """Launches two ranks from this process, with faults in them."""

    def __init__(self, runs: Runner, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.runs, self.patch, self.folder = runs, patch, folder
        self.said: list[str] = []

    def run(self, name: str) -> Path:
        return self.runs.root / name

    def faults(self, *faults: list[Any]) -> None:
        self.patch.setattr(sys, "executable", faulty.faulty_python(self.folder, list(faults)))

    def train(self, name: str, machines: Nodes = Nodes(), **changes: Any) -> Any:  # noqa: B008
        wanted = self.runs.settings(**{"gpus": 2, "batch_size": 4, **changes})
        return train(wanted, self.run(name), machines=machines, say=self.said.append)

    def steps(self, name: str) -> list[int]:
        return [line["step"] for line in self.runs.lines(name) if "loss" in line]

    def processes(self) -> list[str]:
        """Processes that work on these runs."""
        listed = subprocess.run(["ps", "axwwo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if str(self.runs.root) in line]

    def seconds_since_fault(self) -> float:
        return time.time() - float((self.folder / "struck").read_text())

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)

    def signal_at_step(self, name: str, step: int, *signums: int) -> None:
        """Send signals to this process, half a second apart, when the run is that far."""

        def send() -> None:
            self.wait_for(lambda: self.run(name).exists() and step in self.steps_so_far(name))
            for signum in signums:
                os.kill(os.getpid(), signum)
                time.sleep(0.5)

        threading.Thread(target=send, daemon=True).start()

    def steps_so_far(self, name: str) -> list[int]:
        return self.steps(name) if (self.run(name) / "logs" / "metrics.jsonl").exists() else []


@pytest.fixture
def lab(runs: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lab]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)
    found = Lab(runs, monkeypatch, tmp_path)
    yield found
    assert found.processes() == []


def test_the_number_of_processes_is_kept_and_resume_is_bit_identical(lab: Lab) -> None:
    assert lab.train("cut", max_iters=4, lr_decay_iters=8, warmup_iters=1, dropout=0.1) == 4
    assert "resumed" not in lab.run("cut").joinpath("logs/environment.toml").read_text()
    assert resume(lab.run("cut"), 8) == 8
    assert lab.run("cut").joinpath("logs/environment.toml").read_text().count("[[resumed]]") == 1
    layout = torch.load(lab.run("cut") / "ckpt.pt", weights_only=True)["layout"]
    assert (layout["ranks"], layout["threads"], layout["parallel"]) == (2, 1, "ddp")
    whole = lab.runs.settings(max_iters=8, lr_decay_iters=8, warmup_iters=1, dropout=0.1)
    ranks(2, train, whole, lab.run("whole"))
    assert same_weights(lab.run("cut") / "ckpt.pt", lab.run("whole") / "ckpt.pt")
    assert lab.steps("cut") == list(range(1, 9))


def test_a_fine_tune_on_several_ranks(lab: Lab) -> None:
    """The ranks continue a run directory that has no checkpoint yet."""
    base = lab.runs.train("base", max_iters=2, n_layer=2).run.path
    given = {"init_from": base, "n_layer": None, "n_head": None, "n_embd": None, "block_size": None}
    assert lab.train("fine", max_iters=4, **given) == 4
    architecture = torch.load(lab.run("fine") / "ckpt.pt", weights_only=True)["config"]["model"]
    assert (architecture["n_layer"], architecture["vocab_size"]) == (2, 23)


def test_a_launch_measures_the_machine_and_reads_the_data_once(lab: Lab) -> None:
    """By the launcher, for all ranks."""
    lab.faults(["count", -1, 0])
    faulty.count_calls(lab.patch.setattr)
    assert lab.train("run", max_iters=2, device="cpu", peak_tflops="auto") == 2
    assert sorted((lab.folder / "counted").read_text().split()) == ["check_content"] * 2 + ["measure_peak_flops"]


def test_a_rank_that_raises_is_heard_once_and_the_run_goes_on(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.faults(["raise", 1, 5])
    with pytest.raises(NanogptError) as caught:
        lab.train("run")
    assert lab.seconds_since_fault() < LIMIT
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert message.startswith("rank 1 failed:\nTraceback")
    assert message.count("ArithmeticError: a fault for the test") == 1
    assert f"nanogpt resume {lab.run('run')}" in message
    assert "Error" not in capfd.readouterr().err
    lab.runs.resume("run", gpus=1)
    assert lab.steps("run") == list(range(1, 9))


def test_a_killed_rank_and_a_restart_from_the_last_checkpoint(lab: Lab) -> None:
    lab.faults(["kill_once", 1, 6])
    assert lab.train("run", Nodes(max_restarts=1), save_interval=4) == 8
    assert len(lab.said) == 1
    assert lab.said[0].startswith("rank 1 was killed by SIGKILL (the system does that when memory runs out).")
    assert "Restart 1 of 1" in lab.said[0]
    assert lab.steps("run") == list(range(1, 9))


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_waits_for_the_save(lab: Lab, capfd: pytest.CaptureFixture[str], signum: signal.Signals) -> None:
    lab.faults(["sleep", -1, 2], ["slow_save", 0, 0])
    lab.signal_at_step("run", 3, signum)
    with pytest.raises(StoppedError) as caught:
        lab.train("run", eval_interval=100, max_iters=100)
    saved = torch.load(lab.run("run") / "ckpt.pt", weights_only=True)["step"]
    assert caught.value.exit_code == 128 + signum
    assert f"Stopped by {signum.name} after step {saved}, which is saved" in str(caught.value)
    assert capfd.readouterr().err.count(f"{signum.name}: stopping after this step, then saving") == 1


@pytest.mark.slow
def test_a_second_signal_ends_at_once(lab: Lab) -> None:
    lab.faults(["sleep", -1, 2], ["slow_save", 0, 0])
    lab.signal_at_step("run", 3, signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(StoppedError, match="at once by a second signal") as caught:
        lab.train("run", eval_interval=100, max_iters=1000)
    assert caught.value.exit_code == 130
    assert time.monotonic() - began < LIMIT


@pytest.mark.slow
def test_a_mistake_only_one_rank_sees_keeps_its_exit_code(lab: Lab) -> None:
    lab.faults(["mistake", 1, 2])
    with pytest.raises(NanogptError) as caught:
        lab.train("run", Nodes(max_restarts=3))
    assert (caught.value.exit_code, str(caught.value)) == (2, "rank 1: a mistake for the test")


@pytest.mark.slow
def test_a_rank_that_hangs_when_another_has_died_is_ended(lab: Lab) -> None:
    lab.faults(["raise", 1, 2], ["hang", 0, 2])
    with pytest.raises(NanogptError, match="rank 1 failed"):
        lab.train("run")
    assert lab.seconds_since_fault() < LIMIT


def test_a_killed_launcher_takes_its_ranks_along_and_the_run_is_saved(lab: Lab) -> None:
    command = [sys.executable, faulty.__file__, json.dumps([["sleep", -1, 2]]), "train", "--run", str(lab.run("run"))]
    flags = lab.runs.settings(gpus=2, max_iters=1000, eval_interval=1000)
    command += [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    with (lab.folder / "err").open("w") as err:
        launcher = subprocess.Popen(command, stderr=err, cwd=lab.folder)
        lab.wait_for(lambda: 3 in lab.steps_so_far("run"))
        launcher.kill()
        launcher.wait()
    killed = time.monotonic()
    lab.wait_for(lambda: not lab.processes(), LIMIT)
    assert time.monotonic() - killed < LIMIT
    assert torch.load(lab.run("run") / "ckpt.pt", weights_only=True)["step"] >= 3
    assert (lab.folder / "err").read_text().count("stopped by SIGTERM") == 1


def test_joining_ends_in_time_naming_the_missing_machine(lab: Lab) -> None:
    machines = Nodes(2, 0, f"127.0.0.1:{free_port()}", timeout=2)
    with pytest.raises(NanogptError, match=r"1 of 2 processes met .*missing: rank 1 \(machine 1\)") as caught:
        lab.train("run", machines, gpus=1)
    assert caught.value.exit_code == UserError.exit_code


def command_line(lab: Lab, *more: str, **changes: Any) -> list[str]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in lab.runs.settings(**changes).items()]
    return ["nanogpt_cli", "train", f"--run={lab.run('run')}", *flags, *more]


def test_two_launchers_are_two_machines(lab: Lab) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", *command_line(lab, "--nnodes=2", f"--node-rank={number}", endpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    (out, err), silence = (machine.communicate(timeout=100) for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], err
    assert "2 (1 on each of 2 machines)" in err
    assert len(out) > 100  # the closing sample
    assert silence == ("", "")
    assert lab.steps("run") == list(range(1, 9))


def test_torchrun(lab: Lab) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    done = subprocess.run([*torchrun, *command_line(lab)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("model  ") == 1
    assert done.stderr.count("what to type next") == 1
    assert len(done.stdout) > 100
    assert lab.steps("run") == list(range(1, 9))


def test_srun(lab: Lab) -> None:
    wanted = lab.runs.settings()
    assert ranks(2, train, wanted, lab.run("run"), environ=as_srun) == [8, None]
    assert lab.steps("run") == list(range(1, 9))
    config = (lab.run("run") / "config.toml").read_text()
    assert "gpus = 2" in config


def test_what_rank_0_refuses_ends_all_ranks(lab: Lab) -> None:
    lab.runs.train("run")
    told = lab.folder / "err"
    ranks(2, train_or_exit, told, lab.runs.settings(), lab.run("run"), environ=as_srun, codes=[2, 2])
    assert told.read_text().count("there is a run already") == 1


def train_or_exit(told: Path, *arguments: Any) -> None:
    """What the command does with an error; standard error is the file `told`."""
    os.dup2(os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    try:
        train(*arguments)
    except NanogptError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


@pytest.mark.slow
def test_the_terminal_is_usable_after_rank_0_was_killed(lab: Lab) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, faulty.__file__, json.dumps([["sleep", -1, 2], ["kill", 0, 6]])]
    process = subprocess.Popen(
        [*command, *command_line(lab, gpus=2)[1:]], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    written, ended = b"", False
    while not ended:
        ended = process.poll() is not None
        while select.select([ours], [], [], 0.2)[0]:
            written += os.read(ours, 65536)
    assert process.returncode == 1
    assert "╭".encode() in written  # there was a panel
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l")
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
