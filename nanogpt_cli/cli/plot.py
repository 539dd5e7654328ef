"""`nanogpt plot`: the curves of runs as a picture, or in the terminal."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json, complete_runs, unwritable_named


def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Runs to draw together.", autocompletion=complete_runs)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The picture, .png or .svg; - draws in the terminal. [default: curves.png, or - without matplotlib]"
        ),
    ] = None,
    over: Annotated[
        Literal["steps", "tokens", "time"],
        typer.Option(help="What to draw over: updates, tokens seen or training time."),
    ] = "steps",
    json: Json = False,
) -> None:
    """Draw losses, learning rate and tokens/s of one or more runs.

    Thin lines are training losses, thick ones with marks validation losses; where tokenizers differ, in bits per byte.
    """
    from nanogpt_cli.view.plot import draw
    from nanogpt_cli.weights.resolve import find_run

    found = [find_run(word) for word in runs]
    if not json and str(out or ("curves.png" if find_spec("matplotlib") else "-")) == "-":
        from nanogpt_cli.view.chart import Chart

        show.draw(Chart(found, over))
        return
    out = out or Path("curves.png")
    with unwritable_named(out, "Choose another place: --out FILE."):
        draw(found, out, over)
    if json:
        show.document({"file": str(out), "runs": [str(run.path) for run in found]})
        return
    show.say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} over {over}:")
    show.stream(f"{out}\n")
