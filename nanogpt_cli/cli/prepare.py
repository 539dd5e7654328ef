"""`nanogpt prepare`: text to token files."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from nanogpt_cli.data.job import Prepared

OWN_TEXT = "Own text"


def prepare(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="NAME | PATH...", help="a known data set, or files, folders, patterns")
    ] = None,
    name: Annotated[str | None, typer.Option(help="what to call it: the files go to data/NAME")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder for the token files instead of data/NAME")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="char, bytes, gpt2 or another encoding of tiktoken [default: by size]")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes [default: one a core]")] = None,
    force: Annotated[bool, typer.Option("--force", help="make it again, replacing what is there")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="only check what is there against its hashes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the result as one JSON document on stdout")] = False,
) -> None:
    """Turn text into token files."""
    from nanogpt_cli.cli import show
    from nanogpt_cli.data import catalogue
    from nanogpt_cli.data.prepare import prepare_named, prepare_paths

    words = what or []
    if not words:
        raise UserError(f"Say what to prepare: a path, or one of {', '.join(catalogue.names())}.")
    entry = catalogue.find(words[0]) if len(words) == 1 else None
    if entry is not None:
        done = prepare_named(entry, name=name, folder=data_dir, tokenizer=tokenizer, workers=workers, force=force)
    else:
        done = prepare_paths(
            words, name=name, folder=data_dir, tokenizer=tokenizer or "auto", workers=workers, force=force
        )
    print(done.meta["splits"])
