"""From defaults, preset, file and flags to one checked `Config`, with the origin of every value."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from nanogpt_cli.config.schema import SECTIONS, Config, fields
from nanogpt_cli.errors import UserError, did_you_mean

Tables = dict[str, dict[str, Any]]
IGNORED_TABLE = "derived"  # config.toml notes there what was worked out; never read back


@dataclass(frozen=True)
class Layer:
    """Settings from one place: `origin` is how messages call it ("preset gpt2", "my.toml", "flag")."""

    origin: str
    tables: Tables


@dataclass
class Layered:
    """The outcome of `combine`: the settings and where each value that is no default came from."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)  # setting name -> origin


def read_toml(path: Path) -> Tables:
    """The tables of a TOML file.

    Raises:
        UserError: the file is missing, unreadable, or no TOML; says where.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not a TOML file: {error or 'nested too deeply'}") from None


def flag_layer(flags: dict[str, Any]) -> Layer:
    """A layer from flag texts by setting name; None means the flag was not given.

    The declared type decides how a text is read, so `--wandb-run-name 123` is a string and `--seed 1_000` a number.
    """
    tables: Tables = {}
    for name, text in flags.items():
        if text is not None:
            section, info = fields()[name]
            tables.setdefault(section, {})[name] = read_flag(text, info.annotation)
    return Layer("flag", tables)


def read_flag(text: Any, kind: Any) -> Any:
    """The value a flag's text stands for; a text that does not fit is returned as it is, for validation to name."""
    if not isinstance(text, str):
        return text  # booleans arrive as such
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if NoneType in choices and text.lower() == "none":
        return None
    for choice in choices:
        if get_origin(choice) is Literal and text in get_args(choice):
            return text
        base = _base(choice)
        if base in (int, float):
            try:
                return base(text)
            except ValueError:
                continue
    return text


def _base(kind: Any) -> Any:
    """int for Annotated[int, ...]; the type itself otherwise."""
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def combine(*layers: Layer) -> Layered:
    """Lay the layers over the defaults, later ones on top, and check the whole.

    Raises:
        UserError: every problem at once, each with its origin and key.
    """
    merged: Tables = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for layer in layers:
        for section, table in layer.tables.items():
            if section == IGNORED_TABLE:
                continue
            problems += _unknown(layer.origin, section, table)
            if section in SECTIONS and isinstance(table, dict):
                for key, value in table.items():
                    merged.setdefault(section, {})[key] = value
                    origins[key] = layer.origin
    known = {s: {k: v for k, v in t.items() if k in SECTIONS[s].model_fields} for s, t in merged.items()}
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        problems += [_problem(detail, origins) for detail in error.errors()]
        raise UserError(_listed(problems)) from None
    problems += contradictions(config, origins)
    if problems:
        raise UserError(_listed(problems))
    return Layered(config, origins)


def _unknown(origin: str, section: str, table: Any) -> list[str]:
    if section not in SECTIONS:
        home = (
            f" It belongs in [{fields()[section][0]}]."
            if section in fields()
            else did_you_mean(section, list(SECTIONS))
        )
        return [f"{origin}: [{section}] is no section.{home} Sections: {', '.join(SECTIONS)}."]
    if not isinstance(table, dict):
        return [f"{origin}: {section} must be a table: write [{section}] on a line of its own."]
    found = []
    for key in table.keys() - SECTIONS[section].model_fields.keys():
        home = f" It belongs in [{fields()[key][0]}]." if key in fields() else did_you_mean(key, list(fields()))
        found.append(f"{origin}: [{section}] {key}: unknown setting.{home}")
    return sorted(found)


def _problem(detail: Any, origins: dict[str, str]) -> str:
    section, *path = detail["loc"]
    key = str(path[0]) if path else ""
    origin = origins.get(key, "defaults")
    where = f"--{key.replace('_', '-')}" if origin == "flag" else f"{origin}: [{section}] {key}"
    return f"{where} is {detail['input']!r}: {_in_words(detail)}."


_WORDS = {
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "string_type": "a text is needed",
}


def _in_words(detail: Any) -> str:
    if detail["type"] in _WORDS:
        return _WORDS[detail["type"]]
    if detail["type"] == "string_pattern_mismatch":
        return "allowed are auto, cpu, cuda, cuda:N and mps"
    message = str(detail["msg"])
    return message.replace("Input should be", "it must be").lower()


def contradictions(config: Config, origins: dict[str, str]) -> list[str]:
    """Settings that are fine alone and wrong together, each with what to change."""
    m, o, t = config.model, config.optim, config.train
    found = []
    if m.n_embd % m.n_head:
        found.append(f"n_embd = {m.n_embd} is not divisible by n_head = {m.n_head}: every head needs the same width.")
    elif m.position == "rotary" and (m.n_embd // m.n_head) % 2:
        found.append(f"rotary positions need an even head width; n_embd / n_head = {m.n_embd // m.n_head}.")
    if o.min_lr is not None and o.min_lr > o.learning_rate:
        found.append(
            f"min_lr = {o.min_lr:g} is above learning_rate = {o.learning_rate:g}: the rate would rise. "
            "Lower --min-lr, or leave it out (learning_rate / 10)."
        )
    if o.warmup_iters and o.schedule != "constant" and o.warmup_iters >= (o.lr_decay_iters or t.max_iters):
        found.append(
            f"warmup_iters = {o.warmup_iters} leaves no update for the decay, which ends at "
            f"{o.lr_decay_iters or t.max_iters}. Lower --warmup-iters, or leave it out."
        )
    return [f"{_blame(text, origins)}{text}" for text in found]


def _blame(text: str, origins: dict[str, str]) -> str:
    named = [origins[key] for key in origins if f"{key} =" in text and origins[key] != "flag"]
    return f"{named[0]}: " if named else ""


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the settings:\n" + "\n".join(f"  {p}" for p in problems)
