"""The life of a run that is killed again and again, measured by one that never was."""

import hashlib
import json
import random
import shutil
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.checkpoint import load_checkpoint, load_training_state
from tests.faults.harness import Command, Result, nanogpt
from tests.faults.taps import At, Event, Kill, Record, When

KILLED = -9
STEPS = 12
# everything a run can carry over a kill: dropout, accumulation, windows of the loss that cross saves, milestones
SETTINGS = {
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 16,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dropout": 0.1,
    "learning_rate": 0.1,  # so high that some evaluations are no new best; the last one is
    "seed": 3,
    "max_iters": STEPS,
    "eval_interval": 2,
    "eval_iters": 2,
    "save_interval": 3,
    "log_interval": 2,
    "keep_every": 6,
    "device": "cpu",
    "dtype": "float32",
    "peak_tflops": 1,
}
WHENS: tuple[When, ...] = ("half", "before", "after")  # only a write has a middle
TIMES = ("step_ms", "tokens_per_s", "mfu", "time_s")


def flags(**settings: Any) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())


def text(words: int = 1500) -> str:
    """Words of a small alphabet: no two parts of it are alike, so that the losses of the two splits differ."""
    draw = random.Random(7)
    return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(words))


@dataclass(frozen=True)
class KillAfter:
    """A kill at any instant at all."""

    seconds: float

    def __str__(self) -> str:
        return f"after {self.seconds:.2f} s"


class Lab:
    """A working folder with a data set and an unbroken run."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings = folder, {**SETTINGS, **settings}
        (folder / "my.txt").write_text(text())
        self.prepare_events = self._recorded("prepare my.txt --tokenizer char")
        began = time.monotonic()
        self.train_events = self._recorded(self.line("whole"))
        self.seconds = time.monotonic() - began
        self.whole = folder / "runs" / "whole"
        assert self.run(self.line("resumed"), Kill(At("rename", "ckpt.pt", 1, "after"))).code == KILLED
        self.resume_events = self._recorded("resume runs/resumed")

    def _recorded(self, line: str) -> list[Event]:
        record = Record(self.folder.with_name(f"{self.folder.name}-events"))
        result = nanogpt(self.folder, line, record)
        assert result.code == 0, result
        return record.events()

    def line(self, name: str) -> str:
        """The command that starts a run."""
        return f"train --dataset my --run runs/{name} {flags(**self.settings)}"

    def place(self, at: At) -> At:
        """Counted from the end of an unbroken run where nth is negative."""
        if at.nth > 0:
            return at
        total = sum(event.kind == at.kind and event.name.endswith(at.name) for event in self.train_events)
        return replace(at, nth=total + 1 + at.nth)

    def go_on(self, name: str, fault: Kill | KillAfter | None = None) -> Result:
        """Start the run, or resume it, as a user would who finds it stopped."""
        line = f"resume runs/{name}" if (self.folder / "runs" / name).exists() else self.line(name)
        return self.run(line, fault)

    def run(self, line: str, fault: Kill | KillAfter | None) -> Result:
        """A command, and what strikes it."""
        command = Command(line.split(), self.folder, [fault] if isinstance(fault, Kill) else [])
        if isinstance(fault, KillAfter):
            time.sleep(fault.seconds)
            command.process.kill()
        return command.wait()

    def live(self, name: str, faults: Sequence[Kill | KillAfter]) -> list[Result]:
        """Kill a run with one fault after the other, let it end, and compare it with the unbroken one."""
        results = []
        for fault in faults:
            results.append(self.go_on(name, fault))
            assert results[-1].code in (0, KILLED), results[-1]
            self.check_alive(name)
        end = self.go_on(name)
        assert end.code == 0, end
        self.check_end(name)
        return results

    def prepare_killed(self, name: str, fault: Kill | KillAfter, *, over: bool = False, again: str = "") -> int:
        """Kill the preparation of a data set: it is whole or refused, and made when the command is typed again.

        `over` makes it in place of another complete one; `again` is a flag of the second command.
        """
        line, folder = f"prepare my.txt --name {name} --tokenizer char", self.folder / "data" / name
        shutil.rmtree(folder, ignore_errors=True)
        if over:
            shutil.copytree(self.folder / "data" / "my", folder)
            other = nanogpt(self.folder, f"{line} --val-fraction 0.2 --force")
            assert other.code == 0, other
        old, again = digest(folder), "--force" if over else again
        if isinstance(fault, Kill):
            fault = Kill(replace(fault.at, name=fault.at.name.replace("my/", f"{name}/")))
        killed = self.run(f"{line} --force" if over else line, fault)
        assert killed.code in (0, KILLED), killed
        if digest(folder) != old and not self.is_whole(folder):
            refused = nanogpt(self.folder, f"train --dataset {name} --dry-run")
            assert refused.code == 2, refused
            assert "nanogpt prepare" in refused.err, refused
        made = nanogpt(self.folder, f"{line} {again}")
        assert made.code == 0, made
        assert self.is_whole(folder)
        assert files(folder) == ["meta.toml", "train.bin", "val.bin"]
        return killed.code

    def is_whole(self, folder: Path) -> bool:
        """Whether the folder passes for a complete data set; then it must be the one that was prepared unbroken."""
        try:
            open_data_set(folder, verify=True)
        except UserError:
            return False
        whole = self.folder / "data" / "my"
        for name in ("train.bin", "val.bin"):
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
        ours, theirs = (tomllib.loads((place / "meta.toml").read_text()) for place in (folder, whole))
        own = {key: ours[key] for key in ("request", "arguments")}
        assert ours == {**theirs, "name": folder.name, **own}
        return True

    def check_alive(self, name: str) -> None:
        """Whatever has just been killed: every file that has a name is whole."""
        run = self.folder / "runs" / name
        for path in run.glob("*.pt"):
            assert (load_checkpoint if path.name == "best.pt" else load_training_state)(path)["model"]
        assert (run / "config.toml").exists() or not run.exists()

    def check_end(self, name: str, excused: str = "nothing") -> None:
        """The run is the unbroken run, file by file, but for files that match `excused`; nothing else is left."""
        run = self.folder / "runs" / name
        gone = set(files(self.whole)) - set(files(run))
        assert set(files(run)) <= set(files(self.whole))
        assert all(Path(name).match(excused) for name in gone), gone
        for path in self.whole.glob("*.pt"):
            if path.name not in ("ckpt-previous.pt", *gone):  # a resumed run may have saved more often
                assert plain(load_checkpoint(run / path.name)) == plain(load_checkpoint(path)), path.name
        for path in run.glob("ckpt-previous.pt"):
            load_training_state(path)
        assert metrics(run) == metrics(self.whole)
        assert strays(self.folder) == []


def files(folder: Path) -> list[str]:
    """All files below a folder, but for samples, which are written as time allows."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "samples.jsonl"]
    return sorted(str(path.relative_to(folder)) for path in paths)


def strays(folder: Path) -> list[Path]:
    """What a killed process may leave for a while."""
    return [path for pattern in (".nanogpt-tmp-*", ".prepare") for path in folder.rglob(pattern)]


def clear(folder: Path, made: Sequence[str]) -> None:
    """Remove what a command has made in a working folder, and what it left unfinished."""
    for path in [*(folder / name for name in made), *strays(folder)]:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """A checkpoint as something that can be compared: tensors as bytes, without times."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "time_s"}
    return value


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times; each must be whole."""
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def digest(folder: Path) -> dict[str, str]:
    """What the files that make a data set hold."""
    paths = [folder / name for name in ("train.bin", "val.bin", "meta.toml")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}


def random_kill(draw: random.Random, events: Sequence[Event], seconds: float) -> Kill | KillAfter:
    """A kill at an event, all kinds of events being equally likely, or at any instant within `seconds`."""
    if draw.random() < 0.25:
        return KillAfter(draw.uniform(0.0, seconds))
    kind, name = draw.choice(sorted({(event.kind, tail(event)) for event in events}))
    nth = draw.randint(1, sum((event.kind, tail(event)) == (kind, name) for event in events))
    return Kill(At(kind, name, nth, draw.choice(WHENS[kind != "write" :])))


def tail(event: Event) -> str:
    """An event's name without the folder, which differs from run to run."""
    return event.name.rpartition("/")[2].replace("whole", "cut").replace("resumed", "cut").replace("my", "cut")
