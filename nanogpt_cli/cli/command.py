"""How commands look and parse: help in sections, argument lines normalised, unknown words answered with the nearest.

Help is plain text on purpose. Typer's Rich panels cost more than all the rest of a `--help`.
"""

import functools
import inspect
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nanogpt_cli.cli.parsing import Flags, normalise, stray_words
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.terminal import QUIET

WIDTH = 100  # of help texts, at most
NAMES = 34  # of the column of flags, at most
OF_ALL = ("-q", "--quiet", "--json")  # flags that every command has


class Command(TyperCommand):
    """A command whose line is normalised first and whose options are listed by panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer sees the normalised line; completion of a half line sees it as it is."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        rest = super().parse_args(ctx, normalise(args, Flags.of(ctx)))
        if ctx.args:
            before = args[args.index(ctx.args[0]) - 1] if ctx.args[0] in args[1:] else ""
            raise UserError(stray_words(Flags.of(ctx), ctx.args, before))
        return rest

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The docstring, and lines to type."""
        super().format_help_text(ctx, formatter)
        if lines := read_toml(Path(__file__).with_name("examples.toml")).get(ctx.info_name):
            with formatter.section(_bold("Examples")):
                formatter.write("".join(f"  {line}\n" for line in lines))

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """The usage line under a heading that stands out."""
        pieces = " ".join(self.collect_usage_pieces(ctx))
        formatter.write_usage(ctx.command_path, pieces, prefix=f"{_bold('Usage:')} ")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options by the panel each was given, in the order of the panels' first options."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or usual
                name = record[0].partition(" <")[0] if usual == "Arguments" else record[0].removesuffix(" <str>")
                panels.setdefault(panel, []).append((_cyan(name), record[1]))
        for panel in sorted(panels, key=lambda name: name not in ("Arguments", "Options")):
            with formatter.section(_bold(panel)):
                formatter.write_dl(panels[panel], col_max=NAMES)


class Group(TyperGroup):
    """The program: its commands are found by name, and only the one that runs is imported and built."""

    names: tuple[str, ...]  # set by main

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Flags in front of the command are normalised or, where all commands have them, put behind it."""
        if args[:1] == ["help"]:  # help CMD is CMD --help
            args = [*args[1:2], "--help"]
        front = next((i for i, word in enumerate(args) if not word.startswith("-")), len(args))
        if not ctx.resilient_parsing:
            moved = [word for word in args[:front] if word in OF_ALL and front < len(args)]
            own = [word for word in args[:front] if word not in moved]
            args = [*normalise(own, Flags.of(ctx)), *args[front : front + 1], *moved, *args[front + 1 :]]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, built now; None if there is none."""
        if cmd_name not in self.names:
            return None
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        context = {"max_content_width": WIDTH, "allow_extra_args": True}  # Click's own answer to more words is terse
        one.command(cmd_name, cls=Command, context_settings=context)(with_quiet(command_function(cmd_name)))
        return typer.main.get_command(one)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A misspelt command is answered with the nearest one."""
        word = args[0]
        if word not in self.names and not ctx.resilient_parsing:
            from nanogpt_cli.config.nanogpt import elsewhere

            answer = elsewhere()["commands"].get(word)
            meant = f" {answer}" if answer else did_you_mean(word, self.names)
            raise UserError(f"nanogpt {word}: no such command.{meant} There are: {', '.join(self.names)}.")
        return super().resolve_command(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "COMMAND ...", prefix=f"{_bold('Usage:')} ")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The commands with the first line of their docstrings, then the few options."""
        with formatter.section(_bold("Commands")):
            formatter.write_dl([(_cyan(name), summary(name)) for name in self.names])
        records = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        with formatter.section(_bold("Options")):
            formatter.write_dl([(_cyan(record[0]), record[1]) for record in records if record])


def command_function(name: str) -> Any:
    return getattr(import_module(f"nanogpt_cli.cli.{name}"), name)


def with_quiet(function: Callable[..., None]) -> Callable[..., None]:
    """The command with -q, which all have."""

    @functools.wraps(function)
    def command(*, quiet: bool, **given: Any) -> None:
        if quiet:
            os.environ[QUIET] = "1"
        try:
            function(**given)
        finally:
            os.environ.pop(QUIET, None)

    option = typer.Option("--quiet", "-q", help="Say nothing but warnings, errors and the result.")
    known = inspect.signature(function, eval_str=True).parameters.values()
    quiet = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
    parameters = [*(one.replace(kind=one.KEYWORD_ONLY) for one in known), quiet]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def summary(name: str) -> str:
    """The first line of a command's docstring, without importing the command: that would triple what --help takes."""
    loader: Any = find_spec(f"nanogpt_cli.cli.{name}").loader  # type: ignore[union-attr]
    (function,) = (code for code in loader.get_code(loader.name).co_consts if getattr(code, "co_name", "") == name)
    return str(function.co_consts[0]).strip().partition("\n")[0].rstrip(".")


def styled(text: str, **style: Any) -> str:
    """Colour for a terminal that wants it; Typer itself leaves it out of pipes and files."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return typer.style(text, **style) if wanted else text


def _bold(text: str) -> str:
    return styled(text, bold=True)


def _cyan(text: str) -> str:
    return styled(text, fg="cyan")
