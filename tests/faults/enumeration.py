"""Every file operation of a command goes wrong once, in every way.

    python -m tests.faults.enumeration --jobs 2

Train, resume, prepare (alone and with workers), export and a run of two ranks are first run unbroken, and their
dealings with files counted. Then, for every number up to that, the command is run with its n-th operation failing (EIO,
ENOSPC), with the process killed before, in and after it, and with a signal to stop; then a user types the obvious next
command, and the end is held against the unbroken one, byte for byte. So it is for every state of the disk after a power
cut in these commands (power.py), and, at every tenth operation, while another command runs (pairs.py). Prints command,
fault, operations, times, what came of it, seconds; a fault that lost something, changed something, or ended in a
traceback is told at once, and --only runs it alone.
"""

import argparse
import errno
import functools
import hashlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from nanogpt_cli.runs.checkpoint import load_training_state
from tests.faults.harness import Command, Patch, Result, nanogpt
from tests.faults.lives import KILLED, Lab, clear, strays
from tests.faults.pairs import PAIRS, Stage
from tests.faults.power import Disk, Film, State, Step, important
from tests.faults.taps import At, Fail, Fault, Kill, Record, Signal

SMALL = {"max_iters": 4, "eval_interval": 2, "eval_iters": 1, "save_interval": 2, "log_interval": 2, "keep_every": 4}
FAULTS: dict[str, Callable[[At], Fault]] = {
    "EIO": lambda at: Fail(at, number=errno.EIO),
    "ENOSPC": lambda at: Fail(at, number=errno.ENOSPC),
    "killed": Kill,
    "killed in it": lambda at: Kill(replace(at, when="half")),
    "killed after": lambda at: Kill(replace(at, when="after")),
    "stopped": Signal,
}
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)
CODES = {  # besides 0: some operations are worth no failure
    "EIO": (1, 2),
    "ENOSPC": (1, 2),
    "killed": (KILLED,),
    "killed in it": (KILLED,),
    "killed after": (KILLED,),
    "stopped": STOPPED,
}


@dataclass(frozen=True)
class AsRank:
    """One of two processes that torchrun would have started."""

    rank: int
    port: int

    def install(self, folder: Path) -> None:
        names = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        os.environ.update({name: str(value) for name, value in {**names, **more}.items()})


class Scene:
    """A command in a state of a working folder, and what must hold after it was broken and typed again."""

    made: tuple[str, ...] = ("runs/cut",)  # what it may make and change; all else is others'
    excused = "nothing"  # milestones whose save failed, where the program said so

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.begin()
        record = Record(lab.folder.with_name(f"{lab.folder.name}-{type(self).__name__}"))
        result = self.run(record)
        assert result.code == 0, result
        self.operations = len(record.events())

    def begin(self) -> None:
        """Make the state in which the command is typed."""
        clear(self.lab.folder, self.made)

    def run(self, *patches: Patch) -> Result:
        """The command."""
        return nanogpt(self.lab.folder, self.line(), *patches)

    def line(self) -> str:
        raise NotImplementedError

    def end(self) -> None:
        """Type what a user would type next, and compare."""
        end = self.lab.go_on("cut")
        assert end.code == 0, end
        self.lab.check_end("cut", self.excused)

    def look(self, saved: int, over: bool) -> None:
        """After a power cut: the step that was told to be `saved` is there, and all of it once the command was over."""
        self.lab.check_alive("cut")
        assert saved == self.lab.settings["max_iters"] or not over
        path = self.lab.folder / "runs" / "cut" / "ckpt.pt"
        assert saved == 0 or load_training_state(path)["step"] >= saved

    def outside(self) -> dict[str, str]:
        """What others have in the working folder."""
        kept = [path for path in self.lab.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        names = {str(path.relative_to(self.lab.folder)): path for path in kept}
        mine = (*self.made, ".streams", ".cache")
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in names.items()
            if not name.startswith(mine) and ".nanogpt-tmp-" not in name
        }


class Train(Scene):
    def line(self) -> str:
        return self.lab.line("cut")


class Resume(Scene):
    def begin(self) -> None:
        super().begin()
        half = self.lab.folder / "half"
        if not half.exists():
            assert self.lab.run(self.lab.line("cut"), Kill(At("rename", "ckpt.pt", 1, "after"))).code == KILLED
            (self.lab.folder / "runs" / "cut").rename(half)
        shutil.copytree(half, self.lab.folder / "runs" / "cut")

    def line(self) -> str:
        return "resume runs/cut"


class Prepare(Scene):
    made = ("data/cut",)
    workers = 1

    def line(self) -> str:
        return f"prepare my.txt --name cut --tokenizer char --workers {self.workers}"

    def end(self) -> None:
        end = self.run()
        assert end.code == 0, end
        assert self.lab.is_whole(self.lab.folder / "data" / "cut")
        assert strays(self.lab.folder) == []

    def look(self, saved: int, over: bool) -> None:
        assert self.lab.is_whole(self.lab.folder / "data" / "cut") or not over


class PrepareWithWorkers(Prepare):
    workers = 2


class Export(Scene):
    made = ("out", "whole-out")

    def line(self) -> str:
        return "export runs/whole out"

    def end(self) -> None:
        out, whole = (self.lab.folder / name for name in self.made)
        if not out.exists():
            again = self.run()
            assert again.code == 0, again
        made = nanogpt(self.lab.folder, f"export runs/whole {whole.name}")
        assert made.code == 0, made
        assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
        assert strays(self.lab.folder) == []

    def look(self, saved: int, over: bool) -> None:
        assert (self.lab.folder / "out").exists() or not over


class TwoRanks(Scene):
    """Faults strike rank 0, which writes; rank 1 ends with it."""

    def run(self, *patches: Patch) -> Result:
        return self._both(self.lab.line("cut"), *patches)

    def _both(self, line: str, *patches: Patch) -> Result:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = self.lab.folder
        both = [Command(line.split(), folder, [AsRank(rank, port), *patches * (rank == 0)]) for rank in range(2)]
        first, second = (command.wait() for command in both)
        assert "Traceback" not in second.err, second
        return first

    def end(self) -> None:
        run = self.lab.folder / "runs" / "cut"
        end = self._both("resume runs/cut" if run.exists() else self.lab.line("cut"))
        assert end.code == 0, end
        whole = self.lab.folder / "runs-of-two"
        if not whole.exists():  # the first to come here was not broken
            run.rename(whole)
            return
        own, self.lab.whole = self.lab.whole, whole
        try:
            self.lab.check_end("cut", self.excused)
        finally:
            self.lab.whole = own


SCENES: tuple[type[Scene], ...] = (Train, Resume, Prepare, PrepareWithWorkers, Export, TwoRanks)
FILMED = (Train, Resume, Prepare, Export)
NAMES = [*(scene.__name__ for scene in SCENES), "Pairs"]
PAUSED = 10  # of the operations of a command every so-many-th is one that another command runs at


@dataclass(frozen=True)
class Outcome:
    """What came of one fault; `wrong` is empty where all that is promised held."""

    scene: str
    fault: str
    nth: int
    how: str
    seconds: float = 0.0
    wrong: str = ""


def judged(scene: str, fault: str, nth: int, play: Callable[[], str]) -> Outcome:
    """What `play` says came of a fault, or what it found to be wrong."""
    began = time.monotonic()
    try:
        how, wrong = play(), ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        how, wrong = "wrong", f"{type(error).__name__} in {place.name}: {place.line} {error}"
    return Outcome(scene, fault, nth, how, time.monotonic() - began, wrong)


def strike(scene: Scene, fault: str, nth: int) -> Outcome:
    """Break the command once, let it be typed again, look at everything."""
    scene.begin()
    before = scene.outside()

    def play() -> str:
        result = scene.run(FAULTS[fault](At(nth=nth)))
        assert result.code in (0, *CODES[fault]), f"it ended with {result}"
        assert "Traceback" not in result.err, result
        if result.code in (1, 2):
            assert "/" in result.err or "cut" in result.err, f"no file is named: {result}"
        scene.excused = "ckpt-0*.pt" if "without this milestone" in result.err else "nothing"
        scene.end()
        changed = {name for name, hash_ in scene.outside().items() if before.get(name, hash_) != hash_}
        assert not changed, f"{changed} changed"
        assert before.keys() <= scene.outside().keys(), "a file of others is gone"
        return f"exit {result.code}"

    return judged(type(scene).__name__, fault, nth, play)


def filmed(scene: Scene) -> list[Step]:
    """The unbroken command, operation by operation."""
    scene.begin()
    film = Film(scene.lab.folder.with_name(f"{scene.lab.folder.name}-film"))
    result = scene.run(film)
    assert result.code == 0, result
    return film.steps()


def power_cuts(scene: Scene, steps: list[Step], every: int = 1) -> Iterator[Outcome]:
    """The disk after every possible power cut; where it differs in what counts, the next command is typed."""
    folder, made, ended = scene.lab.folder, scene.made, set()
    disk = Disk(steps, folder)

    def promised(now: int) -> tuple[int, bool]:
        saved = re.findall(r"saved step (\d+)", disk.said(now, "runs/cut/logs/train.log"))
        return max(map(int, saved), default=0), now == len(steps) - 1

    for number, (now, state) in enumerate(disk.states(promised)):
        if number % every:
            continue
        clear(folder, made)
        disk.build(state, folder, made)

        def play(now: int = now, state: State = state) -> str:
            scene.look(*promised(now))
            if (found := important(state, made)) in ended:
                return "whole"
            ended.add(found)
            scene.end()
            return "whole, went on"

        yield judged(type(scene).__name__, "power cut", number, play)


def while_another_runs(lab: Lab, name: str, every: int) -> Iterator[Outcome]:
    """A pair of commands, the first one standing still at every so-many-th operation."""
    stage = Stage(lab, PAIRS[name])
    for nth in range(1, stage.operations + 1, every):
        yield judged(name, "another command", nth, functools.partial(stage.play, nth))


def enumerate_faults(
    lab: Lab, part: int = 0, parts: int = 1, *, chosen: tuple[str, ...] = (), every: int = 1
) -> Iterator[Outcome]:
    """Every `parts`-th of all faults, from number `part` on; of each scene and fault every `every`-th operation."""
    number = 0
    for kind in SCENES:
        if chosen and kind.__name__ not in chosen:
            continue
        scene = kind(lab)
        scene.end()
        for fault_number, fault in enumerate(FAULTS):
            for nth in range(1 + fault_number * every // len(FAULTS), scene.operations + 1, every):
                if number % parts == part:
                    yield strike(scene, fault, nth)
                number += 1
        if kind in FILMED and FILMED.index(kind) % parts == part:
            yield from power_cuts(scene, filmed(scene), every)
    for place, name in enumerate(PAIRS):
        if (not chosen or "Pairs" in chosen) and place % parts == part:
            yield from while_another_runs(lab, name, PAUSED * every)


def _part(folder: Path, part: int, parts: int, chosen: tuple[str, ...], every: int) -> list[Outcome]:
    found = []
    for outcome in enumerate_faults(Lab(folder / str(part)), part, parts, chosen=chosen, every=every):
        found.append(outcome)
        if outcome.wrong:
            print(f"{outcome.scene} {outcome.fault} {outcome.nth}: {outcome.wrong}", file=sys.stderr, flush=True)
    return found


def table(outcomes: list[Outcome]) -> str:
    """Command, fault, operations, times, seconds, outcomes."""
    rows = [f"{'command':34}  {'fault':15} operations  times  seconds  outcomes"]
    for scene, fault in dict.fromkeys((one.scene, one.fault) for one in outcomes):
        alike = [one for one in outcomes if (one.scene, one.fault) == (scene, fault)]
        how = ", ".join(f"{times} {end}" for end, times in sorted(Counter(one.how for one in alike).items()))
        last, seconds = max(one.nth for one in alike), sum(one.seconds for one in alike)
        rows.append(f"{scene:34}  {fault:15} {last:10} {len(alike):6} {seconds:8.0f}  {how}")
    return "\n".join(rows)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="only every so-many-th operation")
    parser.add_argument("--scenes", nargs="*", default=[], choices=NAMES)
    parser.add_argument("--only", nargs=3, metavar=("SCENE", "FAULT", "N"), help="one fault alone")
    arguments = parser.parse_args()
    began = time.monotonic()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        if arguments.only:
            scene, fault, nth = arguments.only
            lab = Lab(folder / "lab")
            one = next(kind for kind in SCENES if kind.__name__ == scene)(lab)
            one.end()
            print(strike(one, fault, int(nth)))
            return 0
        work = [
            (folder, part, arguments.jobs, tuple(arguments.scenes), arguments.every) for part in range(arguments.jobs)
        ]
        with ProcessPoolExecutor(arguments.jobs) as pool:
            found = [one for part in pool.map(_part, *zip(*work, strict=True)) for one in part]
    print(table(found))
    wrong = sum(bool(one.wrong) for one in found)
    print(f"{len(found)} faults in {time.monotonic() - began:.0f} s; {wrong} lost, changed or ended in a traceback")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
