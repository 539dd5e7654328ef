"""`nanogpt resume`: a run goes on where it stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.cli.options import DryRun, complete_runs, flag, machines, with_settings
from nanogpt_cli.config.layers import Layer, combine, flag_layer

if TYPE_CHECKING:
    from nanogpt_cli.training.plan import Plan


@with_settings(resumed=True)
def resume(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run, or with --run a nanoGPT out_dir.", autocompletion=complete_runs),
    ],
    checkpoint: Annotated[Path | None, flag("FILE", "Go back to this state, in the new run --run.")] = None,
    run: Annotated[Path | None, flag("NEW", "Continue in a new run and leave RUN as it is.")] = None,
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Continue a run; RUN is all it needs.

    --max-iters N extends it. What else may change is listed here; each change is logged. The architecture, data set,
    optimizer and seed are the run's for life.
    """
    from nanogpt_cli.cli.progress import ProgressBar
    from nanogpt_cli.cli.report import carry_out
    from nanogpt_cli.runs.directory import read_config, refuse_existing
    from nanogpt_cli.training.resume import plan_resume
    from nanogpt_cli.weights.resolve import find_run

    where = machines(flags)
    changes = flag_layer(flags)

    def make_plan(**machine: Any) -> "Plan":
        if run is not None:
            refuse_existing(run)
        with ProgressBar() as progress:
            return plan_resume(source, changes, checkpoint=checkpoint, new_run=run, progress=progress, **machine)

    def processes() -> int:
        return combine(Layer(source, read_config(find_run(source))), changes).config.system.gpus

    carry_out(make_plan, processes, where, dry_run=dry_run)
