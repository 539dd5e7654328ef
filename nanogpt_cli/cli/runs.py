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
    Where tokenizers differ, only bits per byte compare; they stand in a column of their own.
    JSON: a list of objects with name, path, state, step, max_iters, best_val_loss, best_step, data_set, tokenizer,
    bits_per_byte; what is unknown is null.
    """
    from nanogpt_cli.errors import UserError
    from nanogpt_cli.runs.directory import RUNS, list_runs, status
    from nanogpt_cli.runs.facts import run_facts

    if folder != RUNS and not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Runs usually are in {RUNS}/.")
    there = list_runs(folder)
    found, facts = [status(run) for run in there], [run_facts(run) for run in there]
    bits = [one.bits_per_byte(state.best_val_loss) for one, state in zip(facts, found, strict=True)]
    if json:
        more = [{"data_set": one.data_set, "tokenizer": one.tokenizer} for one in facts]
        show.document(
            [asdict(one) | two | {"bits_per_byte": three} for one, two, three in zip(found, more, bits, strict=True)]
        )
    elif not found:
        show.say(f"There are no runs in {folder}/ yet. To start one: nanogpt train")
    else:
        differ = len({one.tokenizer_id for one in facts}) > 1
        rows = [
            (
                one.name,
                one.state,
                f"{show.number(one.step, ',d')} / {show.number(one.max_iters, ',d')}",
                show.number(one.best_val_loss, ".4f"),
                *([show.number(bit, ".4f")] if differ else []),
                show.number(one.best_step, ",d"),
                known.data_set or "n/a",
                known.tokenizer or "n/a",
            )
            for one, known, bit in zip(found, facts, bits, strict=True)
        ]
        losses = ["best val loss", *(["bits/byte"] if differ else [])]
        show.table(["run", "state", "step", *losses, "at step", "data set", "tokenizer"], rows, left=2)
