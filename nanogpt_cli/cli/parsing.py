"""What people type, in the one form that Typer understands: nanoGPT's `--key=value` lines work as they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nanogpt_cli.config.setting import BOOLEANS
from nanogpt_cli.errors import UserError, did_you_mean, typed

MAY_BE_EMPTY = ("--prompt", "--stop")  # an empty text means something, or has a better answer
UNSET = "Is a variable of your shell unset?"
TOGGLE = "auto|on|off"  # the metavar of such flags; bare means on
TOGGLE_WORDS = ("auto", *BOOLEANS)


@dataclass(frozen=True)
class Flags:
    """The flags of one command."""

    command: str  # as typed, for messages: "nanogpt train"
    options: dict[str, Any]  # what Typer knows of a flag, by each of its long names

    @classmethod
    def of(cls, ctx: Any) -> Self:
        """Those of the command that `ctx` is about to parse."""
        found = [option for option in ctx.command.get_params(ctx) if option.param_type_name == "option"]
        names = ((name, option) for option in found for name in (*option.opts, *option.secondary_opts))
        return cls(ctx.command_path, {name: option for name, option in names if name.startswith("--")})


def normalise(arguments: list[str], flags: Flags) -> list[str]:
    """The same line with `-` for `_` in flag names, values joined by `=`, and booleans as `--flag` or `--no-flag`.

    Values are never touched, also where they look like flags. What stands behind `--` is no flag.

    Raises:
        UserError: an unknown flag, one without its value, a boolean with a value that is none, or an empty word.
    """
    done: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*done, argument, *rest]
        if not argument:
            raise UserError(f"{flags.command}: '' is an empty word. {UNSET}")
        if not argument.startswith("--"):
            done.append("--help" if argument == "-h" else argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        positive = name.replace("--no-", "--", 1)
        option = flags.options.get(name)
        if option is not None and option.is_flag:
            if equals and value.lower() not in BOOLEANS:
                raise UserError(f"{flags.command}: {name} is '{value}': true or false is needed.")
            if not equals or BOOLEANS[value.lower()]:
                done.append(name)
            else:  # `--flag=false` is `--no-flag`, or nothing where there is no such flag
                done += (option.secondary_opts if name in option.opts else option.opts)[:1]
        elif positive in flags.options and flags.options[positive].metavar == TOGGLE:
            if positive != name and equals:
                raise UserError(f"{flags.command}: {name} takes no value.")
            if not equals:  # `--compile` is `--compile=on`, `--no-compile` is `--compile=off`
                follows = positive == name and rest and rest[0].lower() in TOGGLE_WORDS
                value = rest.pop(0) if follows else "on" if positive == name else "off"
            done.append(f"{positive}={value}")
        elif option is not None:
            value = value if equals else _next_value(name, rest, flags)
            if not value and name not in MAY_BE_EMPTY:
                raise UserError(f"{flags.command}: {name} needs a value; '' is none. {UNSET}")
            done.append(f"{name}={value}")
        else:
            raise UserError(unknown_flag(name, flags))
    return done


def _next_value(name: str, rest: list[str], flags: Flags) -> str:
    """The argument behind a flag that needs one; a flag of this command there means that it was forgotten."""
    following = rest[0].partition("=")[0].replace("_", "-") if rest else ""
    if not rest or following in flags.options:
        found = f"{rest[0]} follows" if rest else "nothing follows"
        raise UserError(f"{flags.command}: {name} needs a value; {found}. Type {name}=VALUE.")
    return rest.pop(0)


def unknown_flag(name: str, flags: Flags) -> str:
    """What to type instead of a flag that does not exist."""
    from nanogpt_cli.config.nanogpt import elsewhere

    if answer := elsewhere()["flags"].get(name.removeprefix("--").replace("-", "_")):
        return f"{flags.command}: there is no {name}. {answer}"
    near = did_you_mean(name, sorted(flags.options))
    return f"{flags.command}: there is no {name}.{near} {flags.command} --help lists all."


def stray_words(flags: Flags, words: list[str], before: str) -> str:
    """What to type instead of words that the command does not take; `before` stands before the first of them."""
    command, word = flags.command, words[0]
    if before in flags.options and flags.options[before].metavar == TOGGLE:
        return f"{command}: {before} is {word!r}: {', '.join(TOGGLE.split('|'))} are allowed."
    found = f"{command}: {typed(word)} is one word too many."
    if command.endswith(" sample"):
        return f"{found} A prompt is --prompt {typed(' '.join(words))}"
    if command.endswith(" eval"):
        return f"{found} Other data is --data NAME or --data-dir DIR."
    if command.endswith(" train"):
        return f"{found} {_for_train(words[-1])}"
    return f"{found} {command} --help says more."


def _for_train(word: str) -> str:
    """Everything that train takes has a flag."""
    from nanogpt_cli.config.presets import preset_names
    from nanogpt_cli.runs.directory import RUNS, RunDirectory

    path = Path(word)
    if word.replace("-", "_") in preset_names():
        return f"A recipe is --preset {word}"
    if any(RunDirectory(place).config.exists() for place in (path, RUNS / word)):
        return f"To continue a run: nanogpt resume {typed(word)}"
    if path.suffix in (".toml", ".py"):
        return f"A file of settings is --config {typed(word)}"
    return f"A data set or a text file is --dataset {typed(word)}, a recipe --preset NAME."
