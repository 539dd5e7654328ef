"""`nanogpt presets`: what recipes there are, and what one of them says."""

from typing import Annotated

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json, complete_presets
from nanogpt_cli.errors import UserError


def presets(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[show NAME]",
            help="Print one preset as TOML.",
            autocompletion=lambda: ["show", *complete_presets()],
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the presets; `presets show NAME` prints one.

    A preset is a complete recipe: train --preset NAME needs nothing else, and any flag overrides it.
    """
    from nanogpt_cli.config.presets import preset_layer, preset_names, preset_path, preset_summary

    if not words:
        found = [
            {"name": name, "dataset": preset_layer(name).tables["data"]["dataset"], "summary": preset_summary(name)}
            for name in preset_names()
        ]
        if json:
            show.document(found)
        else:
            show.table(["preset", "data set", "what it is"], [list(one.values()) for one in found], left=3)
        return
    if words[0] != "show" or len(words) != 2:
        raise UserError(f"nanogpt presets {' '.join(words)}: type nanogpt presets, or nanogpt presets show NAME.")
    path = preset_path(words[1])
    if json:
        show.document({"name": path.stem, "settings": preset_layer(path.stem).tables})
    else:
        print(path.read_text(encoding="utf-8"), end="")
