"""What a setting is: a dataclass field that knows its type, range, unit, help and whether a resumed run may change it.

Plain dataclasses and no validation library: every `--help` pays for reading the schema.
"""

import contextlib
import dataclasses
import math
import re
import reprlib
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nanogpt_cli.errors import UserError

Resume = Literal["free", "fixed"]
TEXT = r"(?=.*\S)[^\x00-\x1f\x7f\ud800-\udfff]+"  # surrogates: bytes of a file name that are no UTF-8
LARGEST = 2**63 - 1  # what torch, numpy and TOML readers of other languages can hold
ON_OFF = {True: "on", False: "off"}
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """What is known of one setting besides its value; made from the class that declares it."""

    name: str
    section: str
    kind: type  # bool, int, float or str
    choices: tuple[str, ...]  # the only texts allowed, where there are any
    optional: bool  # unset is a value: None here, an absent key in TOML, `none` as a flag
    default: Any
    text: str  # for help
    resume: Resume = "free"
    unit: str = ""
    derived: str = ""  # what an unset optional setting becomes, in words
    ge: float | None = None
    gt: float | None = None
    lt: float | None = None
    pattern: str = TEXT
    pattern_text: str = "a text (not empty, no control characters)"

    @property
    def flag(self) -> str:
        """The one spelling that help lists."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> Any:
        """`value` in the declared type: whole numbers pass for floats; ValueError says what is needed instead."""
        if value is None and self.optional:
            return None
        if type(value) is bool and "on" in self.choices:
            return ON_OFF[value]
        if isinstance(value, str) and value in self.choices:
            return value
        if type(value) is int and abs(value) > LARGEST:
            raise ValueError(f"whole numbers up to {LARGEST:,} are possible")
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind or not self._inside(value):
            raise ValueError(self._needed())
        return value

    def read(self, text: Any) -> Any:
        """The value a flag's text stands for; a text that fits nothing is returned as it is, for `check` to name."""
        if not isinstance(text, str):
            return text
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool or "on" in self.choices:
            return BOOLEANS.get(text.lower(), text)
        if self.kind in (int, float):
            with contextlib.suppress(ValueError):
                return self.kind(text)
        return text

    def _inside(self, value: Any) -> bool:
        if isinstance(value, str):
            return not self.choices and bool(re.fullmatch(self.pattern, value))
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.lt is None or value < self.lt)
        )

    def _needed(self) -> str:
        if self.kind is str and self.choices:
            return f"allowed are {', '.join(self.choices)}"
        bounds = [("of at least", self.ge), ("above", self.gt), ("below", self.lt)]
        limits = " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
        kinds = {bool: "true or false", str: self.pattern_text, int: "a whole number", float: "a number"}
        return " or ".join([*self.choices, f"{kinds[self.kind]} {limits}".strip()]) + " is needed"


def setting(default: Any, text: str, **more: Any) -> Any:
    """One setting with its help; `more` are fields of `Setting`: its limits, unit and so on."""
    return dataclasses.field(default=default, metadata={"text": text, **more})


def fixed(default: Any, text: str, **more: Any) -> Any:
    """A setting that belongs to the run for its whole life."""
    return setting(default, text, resume="fixed", **more)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A TOML table, checked whenever one is made; UserError names every value that does not fit, and what would."""

    def __post_init__(self) -> None:
        problems = []
        for known in settings_of(type(self)).values():
            try:
                object.__setattr__(self, known.name, known.check(getattr(self, known.name)))
            except ValueError as error:
                problems.append(f"{known.name} is {shown(getattr(self, known.name))}: {error}.")
        if problems:
            raise UserError("\n".join(problems))


_READ: dict[type[Section], dict[str, Setting]] = {}  # every class is read once


def settings_of(cls: type[Section]) -> dict[str, Setting]:
    """The settings of one section by name."""
    if cls in _READ:
        return _READ[cls]
    found, hints, section = (
        _READ.setdefault(cls, {}),
        get_type_hints(cls),
        cls.__name__.removesuffix("Settings").lower(),
    )
    for field in dataclasses.fields(cls):
        hint = hints[field.name]  # such as Literal["auto"] | float, or int | None
        parts = [hint] if get_origin(hint) is Literal or isinstance(hint, type) else list(get_args(hint))
        choices = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
        kind = next((part for part in parts if isinstance(part, type) and part is not NoneType), str)
        optional = NoneType in parts
        found[field.name] = Setting(field.name, section, kind, choices, optional, field.default, **field.metadata)
    return found


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print the longest whole numbers."""
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length()} bits"


def shown(value: Any) -> str:
    """`value` for a message: on part of a line, whatever its size and depth."""
    short = _Short()
    short.maxstring = short.maxother = 60
    return short.repr(value)
