"""`nanogpt train`: from layers of settings to a plan, from the plan to a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import DryRun, complete_presets, flag, machines, with_settings
from nanogpt_cli.config.layers import FLAG, Layer, Layered, combine, config_layer, flag_layer
from nanogpt_cli.config.presets import preset_layer, preset_path
from nanogpt_cli.config.schema import settings
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    from nanogpt_cli.progress import Progress
    from nanogpt_cli.training.plan import Plan


@with_settings()
def train(
    preset: Annotated[
        str | None,
        flag("NAME", "Start from a recipe; nanogpt presets lists them.", autocompletion=complete_presets),
    ] = None,
    config: Annotated[Path | None, flag("FILE", "Settings in TOML, over the preset's.")] = None,
    run: Annotated[Path | None, flag("DIR", "Where the run is kept [default: runs/NAME, a free one].")] = None,
    dry_run: DryRun = False,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue if DIR holds this run already: for jobs that are requeued.")
    ] = False,
    **flags: Any,
) -> None:
    """Train a model: a new run, from scratch or from given weights.

    Settings come from defaults, then --preset, then --config, then flags, whatever their order on the line.
    """
    from nanogpt_cli.cli.progress import ProgressBar
    from nanogpt_cli.cli.report import carry_out

    where = machines(flags)
    layers = [*([preset_layer(preset)] if preset else []), *([config_layer(config)] if config else [])]
    layered = combine(*layers, flag_layer(flags))

    def make_plan(**machine: Any) -> "Plan":
        with ProgressBar() as progress:
            return _plan(layered, preset, config, run, or_resume, progress, **machine)

    carry_out(make_plan, lambda: layered.config.system.gpus, where, dry_run=dry_run)


def _plan(
    layered: Layered,
    preset: str | None,
    config: Path | None,
    run: Path | None,
    or_resume: bool,
    progress: "Progress",
    **machine: Any,
) -> "Plan":
    """The plan of a new run, or with `or_resume` of the one that is there; prepares the data set where it can."""
    from nanogpt_cli.runs.directory import RUNS, RunDirectory, new_run_path, refuse_existing
    from nanogpt_cli.training.plan import check_settings, plan_run
    from nanogpt_cli.training.resume import plan_resume

    if run is not None and not or_resume:
        refuse_existing(run)
    if not or_resume:  # a run that goes on does not need what it was started from
        check_settings(layered.config, **machine)
    layered = _with_prepared_data(layered, progress)
    path = run or RUNS / _base_name(preset, config, layered)
    if or_resume and RunDirectory(path).config.exists():
        return plan_resume(str(path), _changes(path, layered), progress=progress, **machine)
    if run is None and not or_resume:
        path = new_run_path(path.parent, path.name)
    return plan_run(layered, path, progress=progress, **machine)


def _base_name(preset: str | None, config: Path | None, layered: Layered) -> str:
    """The config file's name, else the preset's (with the data set where it is another), else the data set's."""
    if config is not None:
        return config.stem
    data = layered.config.data
    if preset is None:
        return Path(data.data_dir or data.dataset).name
    own = preset_layer(preset).tables["data"]["dataset"]
    stem = preset_path(preset).stem
    return stem if data.dataset == own else f"{stem}-{data.dataset}"


def _with_prepared_data(layered: Layered, progress: "Progress") -> Layered:
    """Make sure that the data set is there: a text file is prepared first, and so is a small one of the catalogue."""
    from nanogpt_cli.data.text.prepare import ensure_prepared

    data = layered.config.data
    if data.data_dir is None:
        name = ensure_prepared(data.dataset, progress=progress)
        if name != data.dataset:
            layered.config = layered.config.replace("data", dataset=name)
    return layered


def _changes(path: Path, layered: Layered) -> Layer:
    """`--or-resume` on a run: what this line gives and the run has otherwise.

    Raises:
        UserError: the run is another one than the line describes.
    """
    from nanogpt_cli.runs.directory import RunDirectory, read_config

    show.say(f"{path} is there: continuing it")
    started = combine(Layer(str(path / "config.toml"), read_config(RunDirectory(path)))).config
    changes: dict[str, dict[str, Any]] = {}
    for name in layered.origins:
        section = settings()[name].section
        value = getattr(getattr(layered.config, section), name)
        if name != "data_dir" and value != getattr(getattr(started, section), name):
            changes.setdefault(section, {})[name] = value
    others = [name for table in changes.values() for name in table if settings()[name].resume == "fixed"]
    if others:
        raise UserError(
            f"{path} holds another run: {', '.join(others)} differ from its config.toml. "
            "Choose another --run, or give the settings it was started with."
        )
    return Layer(FLAG, changes)
