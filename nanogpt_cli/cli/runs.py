"""`nanogpt runs`: what there is, how far it is, and how good."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the runs.", show_default=True)] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs with their step, best validation loss and state.

    States: running, finished (max_iters is reached), stopped (resume goes on), damaged (a file cannot be read).
    JSON: a list of objects with name, path, state, step, max_iters, best_val_loss, best_step; what is unknown is null.
    """
    from nanogpt_cli.errors import UserError
    from nanogpt_cli.runs.directory import RUNS, list_runs, status

    if folder != RUNS and not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Runs usually are in {RUNS}/.")
    found = [status(run) for run in list_runs(folder)]
    if json:
        show.document([asdict(one) for one in found])
    elif not found:
        show.say(f"There are no runs in {folder}/ yet. To start one: nanogpt train")
    else:
        rows = [
            (
                one.name,
                one.state,
                f"{show.number(one.step, ',d')} / {show.number(one.max_iters, ',d')}",
                show.number(one.best_val_loss, ".4f"),
                show.number(one.best_step, ",d"),
            )
            for one in found
        ]
        show.table(["run", "state", "step", "best val loss", "at step"], rows, left=2)
