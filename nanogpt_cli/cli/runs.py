"""`nanogpt runs`: what there is, how far it is and how good, or several runs side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json, complete_runs, flag
from nanogpt_cli.errors import UserError, did_you_mean


def runs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER | RUN...]",
            help="A folder of runs to list [default: runs], or runs to put side by side.",
            autocompletion=complete_runs,
        ),
    ] = None,
    sort: Annotated[str | None, flag("KEY", "Order by a key of the JSON, smallest first and unknown last.")] = None,
    json: Json = False,
) -> None:
    """List the runs with their step, best validation loss and state, or put some side by side.

    States: running, finished (max_iters is reached), stopped (resume goes on), damaged (a file cannot be read). Where
    tokenizers differ, only bits per byte compare. Side by side, runs that differ only in their seed are one row with
    mean and standard deviation; time is that inside steps.
    """
    from nanogpt_cli.runs.compare import compare
    from nanogpt_cli.runs.directory import RUNS, list_runs, status
    from nanogpt_cli.runs.facts import run_facts
    from nanogpt_cli.weights.resolve import find_run, look_up

    there = words or [str(RUNS)]
    listing = len(there) == 1 and (there == [str(RUNS)] or (Path(there[0]).is_dir() and look_up(there[0]) is None))
    if listing:
        found = []
        for run in list_runs(Path(there[0])):
            state, facts = status(run), run_facts(run)
            about = {key: getattr(facts, key) for key in ("data_set", "tokenizer", "tokenizer_id")}
            found.append(asdict(state) | about | {"bits_per_byte": facts.bits_per_byte(state.best_val_loss)})
    else:
        found = compare([find_run(word) for word in there])
    if sort is not None and found:
        key = sort.replace("-", "_")
        if key not in found[0]:
            near = did_you_mean(key, [*found[0]])
            raise UserError(f"--sort {sort}: no such key.{near} There are {', '.join(found[0])}.")
        texts = any(isinstance(one[key], list | dict) for one in found)
        found.sort(key=lambda one: (one[key] is None, str(one[key]) if texts else one[key]))
    if json:
        show.document(found)
    elif not found:
        show.say(f"There are no runs in {there[0]}/ yet. To start one: nanogpt train")
    elif listing:
        _list(found)
    else:
        _compare(found)


def _list(found: list[dict[str, Any]]) -> None:
    differ = len({one["tokenizer_id"] for one in found}) > 1
    rows = [
        (
            one["name"],
            one["state"],
            f"{show.number(one['step'], ',d')} / {show.number(one['max_iters'], ',d')}",
            show.number(one["best_val_loss"], ".4f"),
            *([show.number(one["bits_per_byte"], ".4f")] if differ else []),
            show.number(one["best_step"], ",d"),
            one["data_set"] or "n/a",
            one["tokenizer"] or "n/a",
        )
        for one in found
    ]
    losses = ["best val loss", *(["bits/byte"] if differ else [])]
    show.table(["run", "state", "step", *losses, "at step", "data set", "tokenizer"], rows, left=2)


def _compare(found: list[dict[str, Any]]) -> None:
    from nanogpt_cli.view.plain import duration, quantity

    names, losses = list(found[0]["settings"]), {"best_val_loss": "best val loss", "bits_per_byte": "bits/byte"}
    if len({one["tokenizer_id"] for one in found}) > 1:  # tokens are no common measure
        del losses["best_val_loss"]
    shown = [{key: show.number(one[key], ".4f") for key in one if key.startswith(("best", "bits"))} for one in found]
    rows = [
        (
            ", ".join(one["runs"]),
            *one["settings"].values(),
            ", ".join(dict.fromkeys(show.number(step, ",d") for step in one["steps"])),
            *(f"{numbers[key]} ± {numbers[f'{key}_deviation']}" for key in losses),
            "n/a" if one["time_s"] is None else duration(one["time_s"]),
            "n/a" if one["tokens_per_s"] is None else quantity(one["tokens_per_s"]),
        )
        for one, numbers in zip(found, shown, strict=True)
    ]
    show.table(["run", *names, "step", *losses.values(), "time", "tokens/s"], rows)
    if any(one["best_val_loss_deviation"] is None for one in found):
        show.notes(["with one seed the spread between seeds is unknown: a small difference may be chance"])
