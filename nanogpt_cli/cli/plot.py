"""`nanogpt plot`: the curves of runs as a picture."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nanogpt_cli.cli import complete, show
from nanogpt_cli.cli.writing import writing


class Axis(StrEnum):
    """What a curve is drawn over."""

    steps = "steps"
    tokens = "tokens"
    time = "time"


def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Runs to draw together.", autocompletion=complete.runs)
    ],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg.")] = Path("curves.png"),
    over: Annotated[Axis, typer.Option(help="What to draw over: updates, tokens seen or training time.")] = Axis.steps,
) -> None:
    """Draw losses, learning rate and tokens/s of one or more runs.

    Thin lines are training losses, thick ones with marks validation losses. The name of the picture is printed.
    """
    from nanogpt_cli.runs.directory import find_run
    from nanogpt_cli.runs.plot import draw

    with writing(out, "Choose another place: --out FILE."):
        draw([find_run(word) for word in runs], out, over.value)
    show.say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} over {over.value}:")
    print(out)
