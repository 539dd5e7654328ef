"""Many kills, seeded: python -m tests.faults.soak --kills 100 --seed 0

Runs live through several kills each and must end as the run that was never killed; data sets are killed while they are
prepared. Prints a table: where, how often, what came of it. Any difference ends it with a traceback.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.lives import KILLED, KillAfter, Lab, random_kill
from tests.faults.taps import Kill

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "muon"},
    {"dtype": "float16", "sampling": "random"},
    {"keep_previous": "false", "save_interval": 1, "log_interval": 3},
)
LONGEST_LIFE = 6  # kills


def soak(folder: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> Counter[tuple[str, str, str]]:
    """Kill at least so many times; returns how often, by command, place and outcome."""
    draw, counts = random.Random(seed), Counter[tuple[str, str, str]]()
    labs = [Lab(folder / f"lab{number}", **settings) for number, settings in enumerate(KINDS)]
    while sum(times for (_, _, outcome), times in counts.items() if outcome == "killed") < kills:
        lab = draw.choice(labs)
        if draw.random() < 0.2:
            faults = [random_kill(draw, [e for e in lab.prepare_events if ".cache" not in e.name], 0.1)]
            codes = [lab.prepare_killed("cut", faults[0], over=draw.random() < 0.3)]
            command = "prepare"
        else:
            faults = [random_kill(draw, lab.train_events, 0.8)]
            faults += [random_kill(draw, lab.resume_events, 0.8) for _ in range(draw.randrange(LONGEST_LIFE))]
            codes = [result.code for result in lab.live("cut", faults)]
            command = "train"
            shutil.rmtree(lab.folder / "runs" / "cut")
        for fault, code in zip(faults, codes, strict=True):
            counts[command, place(fault), "killed" if code == KILLED else "done before"] += 1
        say(f"{command} {', '.join(map(str, faults))}: whole")
    return counts


def place(fault: Kill | KillAfter) -> str:
    """Where a kill struck, for the table."""
    if isinstance(fault, KillAfter):
        return "any instant"
    return f"{fault.at.when:6} {fault.at.kind} {fault.at.name}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = soak(Path(folder), arguments.kills, arguments.seed)
    for (command, where, outcome), times in sorted(counts.items()):
        print(f"{times:5} x {command:8} {where:36} {outcome}")
    killed = sum(times for (_, _, outcome), times in counts.items() if outcome == "killed")
    seconds = time.monotonic() - began
    print(f"{killed} kills in {seconds:.0f} s, seed {arguments.seed}: every run ended as the unbroken one")


if __name__ == "__main__":
    main()
