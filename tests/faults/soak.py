"""Many kills, seeded: python -m tests.faults.soak --kills 100 --seed 0

Runs live through several kills each and must end as the run that was never killed; data sets are killed while they are
prepared. Prints a table: where, how often, what came of it. Any difference ends it with a traceback.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
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


def soak(folder: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> dict[str, Counter[str]]:
    """Kill at least so many times; returns how often, by place and by outcome: "killed", or "was done" before."""
    draw, counts = random.Random(seed), defaultdict[str, Counter[str]](Counter)
    labs = [Lab(folder / f"lab{number}", **settings) for number, settings in enumerate(KINDS)]
    while sum(count["killed"] for count in counts.values()) < kills:
        lab = draw.choice(labs)
        if draw.random() < 0.2:
            command, events = "prepare", [event for event in lab.prepare_events if ".cache" not in event.name]
            faults = [random_kill(draw, events, 0.1)]
            codes = [lab.prepare_killed("cut", faults[0], over=draw.random() < 0.3)]
        else:
            command, faults = "train", [random_kill(draw, lab.train_events, lab.seconds)]
            faults += [random_kill(draw, lab.resume_events, lab.seconds) for _ in range(draw.randrange(LONGEST_LIFE))]
            codes = [result.code for result in lab.live("cut", faults)]
            shutil.rmtree(lab.folder / "runs" / "cut")
        for fault, code in zip(faults, codes, strict=True):
            counts[f"{command:7}  {place(fault)}"]["killed" if code == KILLED else "was done"] += 1
        say(f"{command} {', '.join(map(str, faults))}: whole")
    return counts


def place(fault: Kill | KillAfter) -> str:
    """Where a kill struck, for the table."""
    if isinstance(fault, KillAfter):
        return "at any instant"
    return f"{fault.at.when:6} {fault.at.kind:8} {fault.at.name}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = soak(Path(folder), arguments.kills, arguments.seed)
    print("killed  was done  where")
    for where, count in sorted(counts.items()):
        print(f"{count['killed']:6} {count['was done']:9}  {where}")
    killed, seconds = sum(count["killed"] for count in counts.values()), time.monotonic() - began
    print(f"{killed} kills in {seconds:.0f} s, seed {arguments.seed}: every run ended as the unbroken one")


if __name__ == "__main__":
    main()
