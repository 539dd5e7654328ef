"""`nanogpt resume`: a run goes on where it stopped."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nanogpt_cli.cli.options import DryRun, Json, complete_runs, flag, machines, with_settings


@with_settings(resumed=True)
def resume(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run, or with --run a nanoGPT out_dir.", autocompletion=complete_runs),
    ],
    checkpoint: Annotated[Path | None, flag("FILE", "Go back to this state, in the new run --run.")] = None,
    run: Annotated[Path | None, flag("NEW", "Continue in a new run and leave RUN as it is.")] = None,
    dry_run: DryRun = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Continue a run; RUN is all it needs.

    --max-iters N extends it. What else may change is listed here; each change is logged. The architecture, data set,
    optimizer and seed are the run's for life.
    """
    from nanogpt_cli.cli.report import train_and_report
    from nanogpt_cli.config.layers import flag_layer

    where, changes = machines(flags), flag_layer(flags)
    from nanogpt_cli.training.resume import ResumeRequest

    train_and_report(ResumeRequest(source, changes, checkpoint, run), where, dry_run=dry_run, as_json=json)
