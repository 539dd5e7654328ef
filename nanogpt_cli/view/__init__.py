"""What a person sees of a run: plain lines, a live panel, plots, trackers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from nanogpt_cli.view.plain import View


def make_view(stream: TextIO | None = None, rank: int = 0, log_file: Path | None = None) -> "View":
    """The view for this place: a display in a notebook, a panel on a terminal, else lines; nothing on later ranks.

    `stream` is standard error if it is not given; `log_file` gets every line as well.
    """
    from nanogpt_cli.terminal import quiet
    from nanogpt_cli.view.live import LiveView, NotebookView, in_notebook, usable_terminal
    from nanogpt_cli.view.plain import PlainView, View

    stream = sys.stderr if stream is None else stream
    if rank != 0:
        return View()
    if quiet():
        return PlainView(None, log_file)
    if in_notebook():
        return NotebookView(log_file)
    return LiveView(stream, log_file) if usable_terminal(stream) else PlainView(stream, log_file)
