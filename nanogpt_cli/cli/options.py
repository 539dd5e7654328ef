"""The flags of train and resume, generated from the schema: one flag a setting, listed by section with defaults."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from nanogpt_cli.cli import machines
from nanogpt_cli.config.schema import SECTIONS, settings
from nanogpt_cli.config.setting import Setting

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}


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
        parameters = own + [_parameter(settings()[name], resumed, not resumed and not only) for name in names]
        parameters += machines.PARAMETERS if only is None else []
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def _parameter(known: Setting, resumed: bool, defaults: bool) -> inspect.Parameter:
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
    annotation = Annotated[kind, option]
    return inspect.Parameter(known.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _panel(section: str) -> str:
    """The TOML table, and what it is about."""
    return f"[{section}] {(SECTIONS[section].__doc__ or '').split('.')[0]}"


def _help(known: Setting, defaults: bool) -> str:
    """The setting's own sentence, then its default with its unit, or the unit alone."""
    if known.default is None:
        default = known.derived or "none"
    elif known.kind is bool:
        default = "on" if known.default else "off"
    else:
        default = str(known.default)
    unit = f" {known.unit}" if known.unit and known.default is not None else ""
    if not defaults:
        return f"{known.text} [{unit.strip()}]" if unit else known.text
    return f"{known.text} [default: {default}{',' if default == 'auto' and unit else ''}{unit}]"
