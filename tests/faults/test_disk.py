"""Disks that are full, broken, read-only, elsewhere or gone, and runs that somebody else has open."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanogpt_cli.runs.checkpoint import load_training_state
from tests.faults.harness import Command, nanogpt
from tests.faults.lives import STEPS, Lab, files, metrics, strays
from tests.faults.taps import At, Event, Fail, Fault

ALWAYS = 10**9


def test_a_full_disk_in_the_middle_of_a_checkpoint(lab: Lab) -> None:
    """A warning with numbers; the older checkpoint stays, training goes on, and saves again when there is room."""
    full = Fail(At("write", "ckpt.pt~", 20, "half"), times=2, number=errno.ENOSPC)
    result = nanogpt(lab.folder, lab.line("cut"), full)
    assert result.code == 0, result
    assert "Step 3 was not saved: the disk is full" in result.err, result
    assert "MB needed" in result.err
    assert "runs/cut/ckpt.pt" in result.err
    assert "stays. Training goes on; the next save tries again." in result.err
    lab.check_end("cut")


def test_a_disk_that_stays_full(lab: Lab) -> None:
    """The end says so and exits with 1; with room again the run ends as if nothing had happened."""
    full = Fail(At("write", "ckpt.pt~", 30, "half"), times=ALWAYS, number=errno.ENOSPC)
    result = nanogpt(lab.folder, lab.line("cut"), full)
    assert result.code == 1, result
    assert "Traceback" not in result.err
    assert "Step 12 was not saved: the disk is full" in result.err
    assert "nanogpt resume runs/cut" in result.err
    assert strays(lab.folder) == []
    saved = load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")["step"]
    assert f"the checkpoint of step {saved} stays" in result.err
    lab.live("cut", [])


@dataclass(frozen=True)
class FreeSpace:
    """What the system says is free from the nth time on that it is asked, whatever is."""

    free: int
    nth: int = 1

    def install(self, folder: Path) -> None:
        class Usage(NamedTuple):
            total: int
            used: int
            free: int

        asked = 0

        def usage(path: Any) -> Usage:
            nonlocal asked
            asked += 1
            return Usage(1 << 40, 0, self.free if asked >= self.nth else 1 << 40)

        shutil.disk_usage = usage  # type: ignore[assignment]


NUMBERS = r"0\.0[1-9] MB (are )?needed( for a checkpoint)?, 0\.00 MB (are )?free"


def test_free_space_is_asked_for_first(lab: Lab) -> None:
    touched = Fail(At("create", "ckpt.pt~", 2), times=ALWAYS)  # would be another message
    result = nanogpt(lab.folder, lab.line("cut"), FreeSpace(1000, nth=3), touched)
    assert result.code == 1, result
    assert re.search(NUMBERS, result.err), result
    assert "the checkpoint of step 2 stays" in result.err, result
    lab.live("cut", [])


def test_no_training_where_nothing_could_be_saved(lab: Lab) -> None:
    new = nanogpt(lab.folder, lab.line("cut"), FreeSpace(1000))
    assert new.code == 1, new
    assert re.search(NUMBERS, new.err), new
    assert not (lab.folder / "runs" / "cut").exists()
    resumed = nanogpt(lab.folder, "resume runs/resumed --max-iters 20", FreeSpace(1000))
    assert resumed.code == 1, resumed
    assert re.search(NUMBERS, resumed.err), resumed


BROKEN = {
    "writing the checkpoint": At("write", "ckpt.pt~", 30, "half"),
    "making the checkpoint durable": At("fsync", "ckpt.pt~", 2),
    "renaming the checkpoint": At("rename", "ckpt.pt", 2),
    "keeping the checkpoint before it": At("rename", "ckpt-previous.pt", 2),
    "making its name durable": At("fsync", "runs/cut", 8),
    "writing the best weights": At("write", "best.pt~", 2, "half"),
    "keeping a milestone": At("rename", "ckpt-000006.pt"),
    "writing a metrics line": At("write", "metrics.jsonl", 3, "half"),
    "making metrics durable": At("fsync", "metrics.jsonl", 2),
    "writing the log": At("write", "train.log", 3),
}


@pytest.mark.parametrize("at", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_an_error_of_the_disk_costs_a_save_and_no_run(lab: Lab, at: At, number: int) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), Fail(at, number=number))
    assert result.code == 0, result
    if at.name != "train.log" and (at.kind, at.name) != ("write", "metrics.jsonl"):
        assert "was not saved" in result.err, result
        assert ("the disk is full" if number == errno.EDQUOT else os.strerror(errno.EIO)) in result.err
    run = lab.folder / "runs" / "cut"
    assert metrics(run) == metrics(lab.whole)
    assert load_training_state(run / "ckpt.pt")["step"] == STEPS
    assert strays(lab.folder) == []


def mount(place: Path, *options: str) -> None:
    """Make a small disk at `place`, or change it; skips the test where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """A disk of 600 kB: room for a run, not for much else."""
    place = lab.folder / "disk"
    place.mkdir(exist_ok=True)
    mount(place, "size=600k")
    yield place
    subprocess.run(["umount", str(place)], check=True)
    place.rmdir()


@dataclass(frozen=True)
class Fill(Fault):
    """Somebody else fills the disk."""

    file: Path = Path()

    def strike(self, event: Event) -> None:
        with self.file.open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                pass


@pytest.mark.parametrize("at", [At("create", "ckpt.pt~", 4), At("write", "ckpt.pt~", 40)], ids=["before", "during"])
def test_a_small_disk(lab: Lab, small_disk: Path, at: At) -> None:
    run = small_disk / "run"
    line = lab.line("cut").replace("runs/cut", str(run))
    result = nanogpt(lab.folder, line, Fill(at, file=small_disk / "ballast"))
    if "finished" in result.err:
        pytest.fail("the disk was not full")
    assert result.code == 1, result
    assert "was not saved: the disk is full" in result.err
    assert "MB needed" in result.err
    assert load_training_state(run / "ckpt.pt")["step"] < STEPS
    for line in (f"resume {run}", f"train --dataset my --run {small_disk / 'other'}"):
        full = nanogpt(lab.folder, line)
        assert full.code == 1, full
        assert re.search("disk .*is full", full.err), full
    assert {path.name for path in small_disk.iterdir()} == {"run", "ballast"}
    (small_disk / "ballast").unlink()
    assert nanogpt(lab.folder, f"resume {run}").code == 0
    shutil.copytree(run, lab.folder / "runs" / "cut")
    lab.check_end("cut")


def test_preparing_on_a_small_disk(lab: Lab, small_disk: Path) -> None:
    """Nothing that looks complete is left, and the same command makes it when there is room."""
    text, folder = lab.folder / "long.txt", small_disk / "long"
    text.write_text((lab.folder / "my.txt").read_text() * 30)  # 200,000 characters, 400 kB of tokens
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    line = f"prepare long.txt --tokenizer char --data-dir {folder}"
    result = nanogpt(lab.folder, line)
    assert result.code == 1, result
    assert str(small_disk) in result.err
    assert "is full" in result.err
    refused = nanogpt(lab.folder, f"train --data-dir {folder} --dry-run")
    assert refused.code == 2, refused
    ballast.unlink()
    assert nanogpt(lab.folder, line).code == 0
    assert nanogpt(lab.folder, f"train --data-dir {folder} --dry-run").code == 0
    assert strays(small_disk) == []


def test_exporting_to_a_full_disk(lab: Lab, small_disk: Path) -> None:
    line = lab.line("cut").replace("--n-embd=16", "--n-embd=128")
    assert nanogpt(lab.folder, f"{line} --max-iters 1").code == 0
    result = nanogpt(lab.folder, f"export runs/cut {small_disk / 'out'}")
    assert result.code == 1, result
    assert "Traceback" not in result.err
    assert "is full" in result.err or "no space" in result.err.lower(), result
    assert list(small_disk.iterdir()) == []


def test_another_disk(lab: Lab, small_disk: Path) -> None:
    """A disk where the run should be, a link to one, and a folder on one."""
    itself = nanogpt(lab.folder, lab.line("cut").replace("runs/cut", str(small_disk)))
    assert itself.code == 2, itself
    assert f"--run {small_disk / 'run'}" in itself.err
    (small_disk / "empty").mkdir()
    link = lab.folder / "runs" / "link"
    link.symlink_to(small_disk / "empty")
    linked = nanogpt(lab.folder, lab.line("link"))
    assert linked.code == 0, linked
    assert link.is_symlink()
    assert set(files(small_disk / "empty")) == set(files(lab.whole))
    assert nanogpt(lab.folder, "resume runs/link --max-iters 13").code == 0
    link.unlink()


@pytest.fixture
def read_only(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A finished run where nobody may write: root may write everywhere but on a disk that is read-only."""
    if os.getuid() == 0:
        folder: Path = request.getfixturevalue("small_disk")
        shutil.copytree(lab.folder / "runs" / "resumed", folder / "run")
        mount(folder, "remount", "ro")
        yield folder
        return
    folder = lab.folder / "disk"
    shutil.copytree(lab.folder / "runs" / "resumed", folder / "run")
    for path in (folder, folder / "run", folder / "run" / "logs"):
        path.chmod(0o555)
    yield folder
    for path in (folder, folder / "run", folder / "run" / "logs"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_run_directory(lab: Lab, read_only: Path) -> None:
    """Nothing can be trained there, and the message says why; what only reads works."""
    for line, place in (
        ("resume disk/run --max-iters 20", "disk/run"),
        (lab.line("cut").replace("runs/cut", "disk/other"), "disk/other"),
        (lab.line("cut").replace("runs/cut", "disk/run").replace("=12", "=20") + " --or-resume", "disk/run"),
    ):
        result = nanogpt(lab.folder, line)
        assert result.code == 2, result
        assert place in result.err
        assert "Read-only" in result.err or "Permission denied" in result.err, result
    for line in ("eval disk/run", "sample disk/run --max-new-tokens 5", "runs", "resume disk/run --dry-run"):
        result = nanogpt(lab.folder, line)
        assert result.code == 0, result


@dataclass(frozen=True)
class Vanish(Fault):
    """The run directory is moved away."""

    def strike(self, event: Event) -> None:
        Path("runs/cut").replace("runs/elsewhere")


def test_a_vanished_run_directory(lab: Lab) -> None:
    result = nanogpt(lab.folder, lab.line("cut"), Vanish(At("rename", "ckpt.pt", 2, "after")))
    elsewhere = lab.folder / "runs" / "elsewhere"
    assert result.code == 1, result
    assert "Traceback" not in result.err
    assert "runs/cut is gone" in result.err
    elsewhere.rename(lab.folder / "runs" / "cut")
    lab.live("cut", [])


def wait_for(command: Command, words: str) -> None:
    """Until a command has said something."""
    end = time.monotonic() + 60
    while words not in command.err():
        assert time.monotonic() < end, command.wait(0)
        time.sleep(0.02)


@dataclass(frozen=True)
class NoKernelLocks:
    """A file system where flock does not work."""

    def install(self, folder: Path) -> None:
        import fcntl

        def refuse(file: Any, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = refuse


@pytest.mark.parametrize("patches", [[], [NoKernelLocks()]], ids=["flock", "no flock"])
def test_one_writer_at_a_time(lab: Lab, patches: list[Any]) -> None:
    long = lab.line("cut").replace(f"--max-iters={STEPS}", "--max-iters=1000000")
    holder = Command(long.split(), lab.folder, patches)
    try:
        wait_for(holder, "saved step 3")
        for line in ("resume runs/cut", "resume runs/cut --max-iters 5", f"{long} --or-resume"):
            second = nanogpt(lab.folder, line, *patches)
            assert second.code == 2, second
            assert f"in use by process {holder.process.pid}" in second.err, second
        assert nanogpt(lab.folder, "eval runs/cut", *patches).code == 0
        assert "running" in nanogpt(lab.folder, "runs", *patches).out
    finally:
        holder.signal(signal.SIGKILL)
    assert holder.wait().code == -signal.SIGKILL
    step = load_training_state(lab.folder / "runs" / "cut" / "ckpt.pt")["step"]
    again = nanogpt(lab.folder, f"resume runs/cut --max-iters {step + 2}", *patches)
    assert again.code == 0, again


def test_two_at_once(lab: Lab) -> None:
    """Of two that start the same run at the same time one trains it, and the other says so."""
    both = [Command(lab.line("cut").split(), lab.folder, []) for _ in range(2)]
    results = [command.wait() for command in both]
    assert sorted(result.code for result in results) == [0, 2], results
    lab.check_end("cut")
