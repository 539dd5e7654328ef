"""The flags of train and resume that say where processes are started; none of them is a setting of the run."""

import inspect
from typing import Annotated, Any

import typer

from nanogpt_cli.training.place import DEFAULT_TIMEOUT, Machines

PANEL = "Several machines"


def _option(name: str, kind: Any, default: Any, metavar: str, text: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(help=text, metavar=metavar, rich_help_panel=PANEL)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


PARAMETERS = [
    _option("nnodes", int, 1, "INT", "Machines; start the command on each."),
    _option("node_rank", int, 0, "INT", "Number of this machine, from 0; machine 0 writes the run."),
    _option("rdzv_endpoint", str, "", "HOST:PORT", "Machine 0 and a free port on it, the same on every machine."),
    _option("rdzv_timeout", float, DEFAULT_TIMEOUT, "SECONDS", "How long to wait for all processes to join."),
    _option("max_restarts", int, 0, "INT", "Go on from the last checkpoint so often when a process dies."),
]


def taken(flags: dict[str, Any]) -> Machines:
    """The flags of this module, taken out of those of a command.

    Raises:
        UserError: they do not go together.
    """
    return Machines(*(flags.pop(parameter.name) for parameter in PARAMETERS))
