"""The gate for the terminal: text of others may not command it, and one that is gone ends no work."""

import contextlib
import os
import re
from pathlib import Path
from typing import TextIO

# C0 but tab and newline, DEL, C1, and what turns the reading direction; lone surrogates are what a file name cannot say
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

QUIET = "NANOGPT_QUIET"  # an environment variable, so that processes which a command starts are quiet too


def quiet() -> bool:
    """Whether the user wants to see nothing but warnings, errors and results."""
    return bool(os.environ.get(QUIET))


def escaped(text: str) -> str:
    """`text` with every character that could command a terminal written out, as Python does: ESC is \\x1b."""
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_stream(text: str, stream: TextIO) -> str:
    """A result as `stream` may have it: as it is in a pipe or file, escaped on a terminal."""
    return escaped(text) if stream.isatty() else text


def give_up(stream: TextIO) -> None:
    """Let what is still to come to a stream that is broken go nowhere, also at the end of the process."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
