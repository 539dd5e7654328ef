"""Write commands.md, the reference of all commands, from their --help: python docs/generate.py"""

import contextlib
import io
import os
from pathlib import Path

from nanogpt_cli.cli.main import COMMANDS, run

PAGE = Path(__file__).with_name("commands.md")


def help_of(*words: str) -> str:
    """What `nanogpt WORDS --help` prints, without colours."""
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "100"}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run([*words, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def reference() -> str:
    """The page."""
    pieces = ["# All commands", "Made from `--help` by `python docs/generate.py`.", f"```text\n{help_of()}\n```"]
    for name in COMMANDS:
        pieces += [f"## {name}", f"```text\n{help_of(name)}\n```"]
    return "\n\n".join(pieces) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
