"""Started in place of `python`: the command `nanogpt` with a fault in it, in a launcher's workers too.

    python faulty.py FAULTS nanogpt-arguments...

FAULTS is a JSON list of [what, rank, step] with `what` one of raise, kill, kill_once, hang, sleep (0.2 s every step
from there on), mistake (a UserError), slow_save (5 s) and count (a line in the file `counted` for each call of
COUNTED); rank -1 is every rank. A file `done` in the working folder switches them off; `struck` holds the time of the
last one.
"""

import importlib
import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTED = (
    ("nanogpt_cli.training.plan", "measure_peak_flops"),
    ("nanogpt_cli.data.tokens.data_set", "check_content"),  # of one split
)
SCRIPT = """#!/bin/sh
shift 2
exec {python} {faulty} '{faults}' "$@"
"""


def faulty_python(folder: Path, faults: list[list[Any]]) -> str:
    """A script that a launcher takes for python, with these faults in what it starts."""
    script = folder / "python"
    script.write_text(SCRIPT.format(python=sys.executable, faulty=__file__, faults=json.dumps(faults)))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def install(faults: list[list[Any]]) -> None:
    from nanogpt_cli.machine.rank_env import read_rank_env
    from nanogpt_cli.training import loop, saving

    rank = read_rank_env().rank
    mine = [(what, step) for what, of, step in faults if of in (rank, -1)]
    step = loop.Training.step
    save = saving.save_checkpoint

    def faulty_step(self: loop.Training) -> None:
        for what, when in mine:
            now = self.state.progress.step
            if not Path("done").exists() and (now == when or (what == "sleep" and now >= when)):
                strike(what)
        step(self)

    def slow_save(*args: Any, **more: Any) -> None:
        time.sleep(5)
        save(*args, **more)

    loop.Training.step = faulty_step  # type: ignore[method-assign]
    if any(what == "count" for what, _ in mine):
        count_calls(setattr)
    if any(what == "slow_save" for what, _ in mine):
        saving.save_checkpoint = slow_save


def count_calls(replace: Callable[[Any, str, Any], None]) -> None:
    for module, name in COUNTED:
        original = getattr(importlib.import_module(module), name)

        def counting(*args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            with Path("counted").open("a") as file:
                file.write(f"{name}\n")
            return original(*args, **more)

        replace(sys.modules[module], name, counting)


def strike(what: str) -> None:
    if what == "sleep":
        time.sleep(0.2)
        return
    Path("struck").write_text(str(time.time()))
    if what == "raise":
        raise ArithmeticError("a fault for the test")
    if what == "mistake":
        from nanogpt_cli.errors import UserError

        raise UserError("a mistake for the test")
    if what == "kill_once":
        Path("done").touch()
    if what.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        while True:
            time.sleep(1)


def main() -> None:
    faults = json.loads(sys.argv[1])
    sys.argv = ["nanogpt", *sys.argv[2:]]
    if faults:
        install(faults)
    with tempfile.TemporaryDirectory() as folder:
        sys.executable = faulty_python(Path(folder), faults)
        from nanogpt_cli.cli.main import main as nanogpt

        nanogpt()


if __name__ == "__main__":
    main()
