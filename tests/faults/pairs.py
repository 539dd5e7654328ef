"""Two commands at once: the first one stands still at one of its operations while the second one runs to its end."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from nanogpt_cli.runs.checkpoint import load_checkpoint
from tests.faults.harness import Command, Result, nanogpt
from tests.faults.lives import KILLED, Lab, clear, plain, strays
from tests.faults.taps import At, Event, Fault, Kill, Record

PATIENCE = 60.0  # seconds for what the other one does meanwhile


@dataclass(frozen=True)
class Wait(Fault):
    """Says that it is there, by a file, and goes on when there is another."""

    here: Path = Path()
    on: Path = Path()

    def strike(self, event: Event) -> None:
        self.here.touch()
        end = time.monotonic() + PATIENCE
        while not self.on.exists() and time.monotonic() < end:
            time.sleep(0.002)


@dataclass(frozen=True)
class Pair:
    """What is typed, {train} standing for the line that starts runs/cut, what is there before, and what comes of it."""

    first: str
    second: str
    whole: tuple[str, ...] = ("runs/cut",)  # what is as if it had been made alone, where it is made
    there: str = ""  # a run is there and unfinished, or a data set is there


BOTH, DATA, FORKED = ("runs/cut", "runs/cut-b"), ("data/cut",), "resume runs/cut --checkpoint ckpt.pt --run runs/cut-b"
ON_CUT = "train --dataset cut --run runs/cut-b --max-iters 1 --eval-iters 1"
PAIRS = {
    "train + resume": Pair("{train}", "resume runs/cut"),
    "train + train": Pair("{train}", "{train}"),
    "train + train, or resume": Pair("{train}", "{train} --or-resume"),
    "train + train of a longer name": Pair("{train}", "{train}-b", BOTH),
    "train + train of a shorter name": Pair("{train}-b", "{train}", BOTH),
    "train + train within": Pair("{train}", "{train}/inner", ("runs/cut/inner", "runs/cut")),
    "train + runs": Pair("{train}", "runs"),
    "train + eval": Pair("{train}", "eval runs/cut"),
    "train + export": Pair("{train}", "export runs/cut out"),
    "resume + resume": Pair("resume runs/cut", "resume runs/cut", there="runs/cut"),
    "resume + fork": Pair("resume runs/cut", FORKED, there="runs/cut"),
    "resume + sample": Pair("resume runs/cut", "sample runs/cut --max-new-tokens 3", there="runs/cut"),
    "resume + watch": Pair("resume runs/cut", "watch runs/cut --save out", there="runs/cut"),
    "export + train": Pair("export runs/whole out", "{train}"),
    "export + export": Pair("export runs/whole out", "export runs/whole out"),
    "prepare + prepare": Pair("{prepare}", "{prepare}", DATA),
    "prepare + prepare of other text": Pair("{prepare}", "prepare other.txt --name cut --tokenizer bytes", ()),
    "prepare + prepare of a longer name": Pair("{prepare}", "{prepare}-b", ("data/cut", "data/cut-b")),
    "prepare + train": Pair("{prepare}", ON_CUT, DATA),
    "prepare again + train": Pair("{prepare} --force", ON_CUT, DATA, there="data/cut"),
}
MADE = ("runs/cut", "runs/cut-b", "data/cut", "data/cut-b", "out")


class Stage:
    """The working folder of a pair."""

    def __init__(self, lab: Lab, pair: Pair) -> None:
        self.lab, self.pair, self.folder = lab, pair, lab.folder
        (self.folder / "other.txt").write_text("some other text. " * 100)
        self.set_up()
        record = Record(self.folder.with_name(f"{self.folder.name}-pair"))
        alone = nanogpt(self.folder, self.line(pair.first), record)
        assert alone.code == 0, alone
        self.operations = len(record.events())

    def line(self, words: str) -> str:
        """What is typed."""
        prepare = "prepare my.txt --tokenizer char --name cut"
        train, name = self.lab.line("cut"), "--run runs/cut"
        words = words.replace("{prepare}", prepare)
        if "{train}" not in words:
            return words
        after = words.removeprefix("{train}")
        ending, _, more = after.partition(" ")
        return f"{train.replace(name, name + ending)} {more}"

    def set_up(self) -> None:
        """The state before."""
        clear(self.folder, MADE)
        if place := self.pair.there:
            kept = self.folder / f"kept-{place.partition('/')[0]}"
            if not kept.exists():
                line = self.line("{train}" if place == "runs/cut" else "{prepare}")
                assert nanogpt(self.folder, line, Kill(At("rename", "best.pt", 1, "after"))).code in (0, KILLED)
                (self.folder / place).rename(kept)
            shutil.copytree(kept, self.folder / place)

    def play(self, nth: int) -> str:
        """Both commands, the first one standing still at its n-th operation until the second ends, or waits for it."""
        self.set_up()
        here, on = (self.folder.with_name(f"{self.folder.name}-{name}") for name in ("here", "on"))
        for path in (here, on):
            path.unlink(missing_ok=True)
        first = Command(self.line(self.pair.first).split(), self.folder, [Wait(At(nth=nth), here=here, on=on)])
        try:
            while first.process.is_alive() and not here.exists():
                time.sleep(0.002)
            second = Command(self.line(self.pair.second).split(), self.folder, [])
            while second.process.is_alive() and "waiting for it" not in second.err():
                time.sleep(0.005)
        finally:
            on.touch()
        ends = first.wait(), second.wait()
        self.check(*ends)
        return " and ".join(f"exit {end.code}" for end in ends)

    def check(self, first: Result, second: Result) -> None:
        """Both ended as promised: one of them did its work, the other too or it says in one message why not."""
        for result in (first, second):
            assert result.code in (0, 2), result
            assert "Traceback" not in result.err, result
            assert result.err.count("error:") == (result.code == 2), result
        assert 0 in (first.code, second.code), (first, second)
        lab, folder = self.lab, self.folder
        for name in self.pair.whole:
            if (folder / name / "meta.toml").exists():
                assert lab.is_whole(folder / name)
            elif (folder / name / "config.toml").exists():
                lab.check_end(name.removeprefix("runs/"))
                shutil.rmtree(folder / name)
        if self.pair.second == FORKED:
            for name in ("ckpt.pt", "best.pt"):
                ours, theirs = (load_checkpoint(run / name) for run in (folder / "runs" / "cut-b", lab.whole))
                assert plain(ours) == plain(theirs), name
        assert strays(folder) == []
