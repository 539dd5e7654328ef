"""`nanogpt train`: layers of settings become a request for a new run."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nanogpt_cli.cli.options import DryRun, Json, complete_presets, flag, machines, with_settings
from nanogpt_cli.errors import UserError


@with_settings()
def train(
    preset: Annotated[
        str | None,
        flag("NAME", "Start from a recipe; nanogpt presets lists them.", autocompletion=complete_presets),
    ] = None,
    config: Annotated[Path | None, flag("FILE", "Settings in TOML, over the preset's.")] = None,
    minutes: Annotated[
        float | None, flag("N", "Instead of a preset: the best model that this machine can train in N minutes in all.")
    ] = None,
    hours: Annotated[float | None, flag("N", "As --minutes, in hours.")] = None,
    depth: Annotated[int | None, flag("N", "Instead of a preset: a model of N layers and all that suits it.")] = None,
    run: Annotated[Path | None, flag("DIR", "Where the run is kept [default: runs/NAME, a free one].")] = None,
    save_config: Annotated[Path | None, flag("FILE", "Write all settings of the plan to a TOML file.")] = None,
    dry_run: DryRun = False,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue if DIR holds this run already: for jobs that are requeued.")
    ] = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Train a model: a new run, from scratch or from given weights.

    Settings come from defaults, then --preset, then --config, then flags, whatever their order on the line.
    """
    from nanogpt_cli.cli.report import train_and_report
    from nanogpt_cli.config.dial import make_dial
    from nanogpt_cli.config.layers import combine, config_layer, flag_layer
    from nanogpt_cli.config.presets import preset_layer

    where = machines(flags)
    layers = (
        *([preset_layer(preset)] if preset else []),
        *([config_layer(config)] if config else []),
        flag_layer(flags),
    )
    began = time.perf_counter() - time.process_time()  # about when this process did: until here it has only computed
    dial = make_dial(layers, minutes=minutes, hours=hours, depth=depth, began=began)
    if save_config is not None and save_config.exists():
        raise UserError(f"--save-config {save_config}: it exists already. Choose another name.")
    combine(*layers)  # what is wrong with them is answered before torch is imported
    from nanogpt_cli.training.request import TrainRequest

    request = TrainRequest(layers, run, or_resume, dial)
    train_and_report(request, where, dry_run=dry_run, as_json=json, save_config=save_config)
