"""`nanogpt plot`: the curves of runs as a picture."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import complete_runs, unwritable_named


def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Runs to draw together.", autocompletion=complete_runs)
    ],
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg.")] = Path("curves.png"),
    over: Annotated[
        Literal["steps", "tokens", "time"],
        typer.Option(help="What to draw over: updates, tokens seen or training time."),
    ] = "steps",
) -> None:
    """Draw losses, learning rate and tokens/s of one or more runs.

    Thin lines are training losses, thick ones with marks validation losses. The name of the picture is printed.
    """
    from nanogpt_cli.view.plot import draw
    from nanogpt_cli.weights.resolve import find_run

    with unwritable_named(out, "Choose another place: --out FILE."):
        draw([find_run(word) for word in runs], out, over)
    show.say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} over {over}:")
    show.result(str(out))
