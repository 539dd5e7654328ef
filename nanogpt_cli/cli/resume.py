"""`nanogpt resume`: a run goes on where it stopped."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nanogpt_cli.cli import complete
from nanogpt_cli.cli.options import with_settings
from nanogpt_cli.config.layers import Layer, flag_layer


@with_settings(resumed=True)
def resume(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run, or with --run a nanoGPT out_dir.", autocompletion=complete.runs),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go back to this state, in the new run --run.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="NEW", help="Continue in a new run and leave RUN as it is.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    **flags: Any,
) -> None:
    """Continue a run; RUN is all it needs.

    --max-iters N extends it. What else may change is listed here; each change is logged. The architecture, data set,
    optimizer and seed are the run's for life.
    """
    continue_run(source, flag_layer(flags), checkpoint, run, dry_run=dry_run)


def continue_run(
    source: str,
    changes: Layer,
    checkpoint: Path | None = None,
    new_run: Path | None = None,
    *,
    dry_run: bool,
) -> None:
    """Work out how the run goes on, and carry it out."""
    from nanogpt_cli.cli.carry_out import carry_out
    from nanogpt_cli.runs.directory import refuse_existing
    from nanogpt_cli.training.resume import plan_resume

    if new_run is not None:
        refuse_existing(new_run)
    carry_out(plan_resume(source, changes, checkpoint=checkpoint, new_run=new_run), dry_run=dry_run)
