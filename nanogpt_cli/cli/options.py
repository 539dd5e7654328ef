"""Flags that commands share: the settings, generated from the schema, a model and its device, and words to complete."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.config.schema import SECTIONS, settings
from nanogpt_cli.config.setting import Setting
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.rank_env import DEFAULT_TIMEOUT, Nodes

if TYPE_CHECKING:
    from nanogpt_cli.machine.device import Compute
    from nanogpt_cli.weights.load import LoadedModel

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}


def flag(metavar: str, text: str, **more: Any) -> Any:
    """An option that takes a value, shown as `metavar`."""
    return typer.Option(metavar=metavar, help=text, **more)


def complete_presets() -> list[str]:
    """The words that a shell offers for `--preset`; those below are for other arguments."""
    from nanogpt_cli.config.presets import preset_names

    return preset_names()


def complete_runs() -> list[str]:
    """A path is completed by the shell itself where no name fits."""
    from nanogpt_cli.runs.directory import list_runs

    return [str(run.path) for run in list_runs()]


def complete_data_sets() -> list[str]:
    return sorted(folder.name for folder in Path("data").glob("*") if folder.is_dir())


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, a checkpoint file, a nanoGPT out_dir, a Hugging Face folder, or gpt2, gpt2-medium...",
        autocompletion=complete_runs,
    ),
]
Checkpoint = Annotated[str, flag("best|last|FILE", "Which weights of a run.")]
Device = Annotated[str, flag("auto|cpu|cuda|mps", "Where to compute.")]
Dtype = Annotated[str, flag("float32|bfloat16|float16|auto", "Number format of matrix products.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]


def with_settings(
    *, only: tuple[str, ...] | None = None, resumed: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes `**flags`: every setting becomes an option, None where it is not given.

    Args:
        only: the settings to take; by default all, and the flags that say where processes are started.
        resumed: there is a run: help shows no defaults, since the run has its own, and lists what may change. The
            others are accepted all the same, so that the answer can say what the run has.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(function, eval_str=True).parameters.values()
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in given if p.kind is not p.VAR_KEYWORD]
        names = only or tuple(settings())
        parameters = own + [_setting(settings()[name], resumed, not resumed and not only) for name in names]
        parameters += MACHINES if only is None else []
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def machines(flags: dict[str, Any]) -> Nodes:
    """The flags that say where processes are started, taken out: they are no settings. UserError if they contradict."""
    return Nodes(*(flags.pop(parameter.name) for parameter in MACHINES))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _setting(known: Setting, resumed: bool, defaults: bool) -> inspect.Parameter:
    switch = known.kind is bool
    words = [*known.choices, *([] if known.kind is str and known.choices else [METAVARS[known.kind]])]
    option = typer.Option(
        f"{known.flag}/{known.flag.replace('--', '--no-', 1)}" if switch else known.flag,
        help=_help(known, defaults),
        rich_help_panel=f"[{known.section}] {(SECTIONS[known.section].__doc__ or '').split('.')[0]}",
        show_default=False,
        hidden=resumed and known.resume == "fixed",
        metavar=None if switch else "|".join(words),
        autocompletion=None if switch else lambda: list(known.choices),
    )
    kind: Any = bool | None if switch else str | None  # the schema reads texts; it knows more than Typer
    return _parameter(known.name, kind, None, option)


def _help(known: Setting, defaults: bool) -> str:
    """The setting's own sentence, then its default with its unit, or the unit alone."""
    if not defaults:
        return f"{known.text} [{known.unit}]" if known.unit and known.default is not None else known.text
    if known.default is None:
        return f"{known.text} [default: {known.derived or 'none'}]"
    if known.kind is bool:
        return f"{known.text} [default: {'on' if known.default else 'off'}]"
    between = ", " if known.default == "auto" and known.unit else " "
    return f"{known.text} [default: {known.default}{between}{known.unit}".rstrip() + "]"


MACHINES = [
    _parameter(name, kind, default, flag(metavar, text, rich_help_panel="Several machines"))
    for name, kind, default, metavar, text in (
        ("nnodes", int, 1, "INT", "Machines; start the command on each."),
        ("node_rank", int, 0, "INT", "Number of this machine, from 0; machine 0 writes the run."),
        ("rdzv_endpoint", str, "", "HOST:PORT", "Machine 0 and a free port on it, the same on every machine."),
        ("rdzv_timeout", float, DEFAULT_TIMEOUT, "SECONDS", "How long to wait for all processes to join."),
        ("max_restarts", int, 0, "INT", "Go on from the last checkpoint so often when a process dies."),
    )
]


def load(model: str, checkpoint: str) -> "LoadedModel":
    """The model, after saying what it is."""
    from nanogpt_cli.weights.resolve import find_model

    find_model(model)  # a mistyped name is answered before torch is imported
    from nanogpt_cli.weights.load import load_model

    loaded = load_model(model, checkpoint)
    show.say(f"model: {loaded.source}")
    show.notes(loaded.notes)
    return loaded


def move_to_device(loaded: "LoadedModel", device: str, dtype: str) -> "Compute":
    """Move a model to where it is computed with, and say so."""
    import torch

    from nanogpt_cli.config.schema import SystemSettings
    from nanogpt_cli.machine.device import choose_compute

    system = SystemSettings(device=device, dtype=dtype, compile="off")  # type: ignore[arg-type]
    compute = choose_compute(system, loaded.model.config, long_run=False)
    compute.prepare()
    if compute.dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")  # TF32 would not be what was asked for
    loaded.model.to(compute.device)
    show.say(f"device: {compute.describe()}, {compute.dtype_name}")
    warn_of_slow_numbers(compute)
    return compute


def warn_of_slow_numbers(compute: "Compute") -> None:
    if compute.device.type == "cpu" and compute.dtype_name == "float16":
        show.warn("float16 on a CPU is many times slower than float32 or bfloat16: --dtype auto chooses between these")


@contextlib.contextmanager
def unwritable_named(place: Path, advice: str) -> Iterator[None]:
    """While a result is written to `place`, which the user named; `advice` says how to name another.

    Raises:
        UserError: the system does not let it be written.
        DiskFullError: as it is.
    """
    from nanogpt_cli.files import DiskFullError

    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error.strerror or error}. {advice}") from None
