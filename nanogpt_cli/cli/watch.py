"""`nanogpt watch`: the curves of runs as a live page in the browser, or as one file."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json, complete_runs, flag, unwritable_named


def watch(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="By default all.", autocompletion=complete_runs)
    ] = None,
    save: Annotated[Path | None, flag("FILE", "Write the page as one .html file to send, and stop.")] = None,
    port: Annotated[int, flag("N", "Where to listen on 127.0.0.1; 0 is any free port.", min=0, max=65535)] = 6070,
    json: Json = False,
) -> None:
    """Show runs as a live page in the browser: losses, rate, speed, samples, settings that differ.

    The page is served to this machine alone until Ctrl-C, and works without a network. Its address is printed.
    """
    from nanogpt_cli.files import atomic_write
    from nanogpt_cli.runs.directory import RunDirectory, list_runs
    from nanogpt_cli.view.watch import Server, page
    from nanogpt_cli.weights.resolve import find_run

    def find() -> list[RunDirectory]:
        return [find_run(word) for word in runs] if runs else list_runs()

    paths = [str(run.path) for run in find()]
    if save is not None:
        content = page(find())
        with unwritable_named(save, "Choose another place: --save FILE."):
            atomic_write(save, lambda file: file.write(content))
        show.document({"file": str(save), "runs": paths}) if json else print(save)
        return
    with Server(find, port) as server, contextlib.suppress(KeyboardInterrupt):
        url = f"http://127.0.0.1:{server.server_port}/"
        show.document({"url": url, "runs": paths}) if json else print(url, flush=True)
        show.say("Ctrl-C ends it.")
        server.serve_forever()
