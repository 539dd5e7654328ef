"""Flags that commands share: those of train and resume, generated from the schema, and what helps to declare others."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from nanogpt_cli.config.schema import SECTIONS, settings
from nanogpt_cli.config.setting import Setting
from nanogpt_cli.machine.rank import DEFAULT_TIMEOUT, Machines

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}
MACHINES_PANEL = "Several machines"


def flag(metavar: str, text: str, **more: Any) -> Any:
    """An option that takes a value, shown as `metavar`."""
    return typer.Option(metavar=metavar, help=text, **more)


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


def machines(flags: dict[str, Any]) -> Machines:
    """The flags that say where processes are started, taken out of those of a command; they are no settings.

    Raises:
        UserError: they do not go together.
    """
    return Machines(*(flags.pop(parameter.name) for parameter in MACHINES))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _setting(known: Setting, resumed: bool, defaults: bool) -> inspect.Parameter:
    switch = known.kind is bool
    words = [*known.choices, *([] if known.kind is str and known.choices else [METAVARS[known.kind]])]
    option = typer.Option(
        f"{known.flag}/{known.flag.replace('--', '--no-', 1)}" if switch else known.flag,
        help=_help(known, defaults),
        rich_help_panel=_panel(known.section),
        show_default=False,
        hidden=resumed and known.resume == "fixed",
        metavar=None if switch else "|".join(words),
        autocompletion=None if switch else lambda: list(known.choices),
    )
    kind: Any = bool | None if switch else str | None  # the schema reads texts; it knows more than Typer
    return _parameter(known.name, kind, None, option)


def _panel(section: str) -> str:
    """The TOML table, and what it is about."""
    return f"[{section}] {(SECTIONS[section].__doc__ or '').split('.')[0]}"


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


def _machine(name: str, kind: Any, default: Any, metavar: str, text: str) -> inspect.Parameter:
    return _parameter(name, kind, default, flag(metavar, text, rich_help_panel=MACHINES_PANEL))


MACHINES = [
    _machine("nnodes", int, 1, "INT", "Machines; start the command on each."),
    _machine("node_rank", int, 0, "INT", "Number of this machine, from 0; machine 0 writes the run."),
    _machine("rdzv_endpoint", str, "", "HOST:PORT", "Machine 0 and a free port on it, the same on every machine."),
    _machine("rdzv_timeout", float, DEFAULT_TIMEOUT, "SECONDS", "How long to wait for all processes to join."),
    _machine("max_restarts", int, 0, "INT", "Go on from the last checkpoint so often when a process dies."),
]
