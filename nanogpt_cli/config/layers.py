"""From defaults, preset, file and flags to one checked `Config`, with the origin of every value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from nanogpt_cli.config.schema import SECTIONS, Config, settings
from nanogpt_cli.config.setting import shown
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.foreign import read_toml

Tables = dict[str, Any]  # section -> table in all that is well formed; what a file holds is checked by `combine`
IGNORED_TABLE = "derived"  # config.toml notes there what was worked out; never read back
FLAG = "flag"


class Rank(IntEnum):
    """Which kind of layer a setting comes from; where two differ, the higher one was meant."""

    DEFAULT = 0
    PRESET = 1
    FILE = 2
    GIVEN = 3  # with this command or call


@dataclass(frozen=True)
class Layer:
    """Settings from one place: `origin` is how messages call it ("preset gpt2", "my.toml", "flag")."""

    origin: str
    tables: Tables
    rank: Rank = Rank.FILE
    name: str | None = None  # what a run made from it is called


@dataclass(frozen=True)
class Layered:
    """The outcome of `combine`: the settings, and by name the layer of each that is no default."""

    config: Config
    origins: Mapping[str, Layer] = field(default_factory=dict)

    def rank(self, name: str) -> Rank:
        """The kind of layer that a setting comes from."""
        return self.origins[name].rank if name in self.origins else Rank.DEFAULT


def config_layer(path: Path) -> Layer:
    """The settings of a `--config` file; UserError if it is no TOML, with Python of nanoGPT as the TOML to save."""
    if path.suffix == ".py":
        from nanogpt_cli.config.nanogpt import refuse_python

        refuse_python(path)
    # a run's own: it is made again under its name
    name = path.absolute().parent.name if path.name == "config.toml" else path.stem
    return Layer(str(path), read_toml(path), name=name)


def flag_layer(flags: dict[str, Any]) -> Layer:
    """A layer from flag texts by setting name; None means the flag was not given.

    The declared type decides how a text is read, so `--wandb-run-name 123` is a string and `--seed 1_000` a number.
    """
    tables: Tables = {}
    for name, text in flags.items():
        if text is not None:
            known = settings()[name]
            tables.setdefault(known.section, {})[name] = known.read(text)
    return Layer(FLAG, tables, Rank.GIVEN)


def combine(*layers: Layer) -> Layered:
    """Lay the layers over the defaults, later ones on top, and check the whole; UserError tells every problem."""
    values: dict[str, Any] = {}
    origins: dict[str, Layer] = {}
    problems: list[str] = []
    for layer in layers:
        for section, table in layer.tables.items():
            if section == IGNORED_TABLE:
                continue
            if section not in SECTIONS or not isinstance(table, dict):
                problems.append(_no_section(layer.origin, section, table))
                continue
            if len(table) > 10 * len(settings()):
                known_keys = f"there are {len(settings())} settings"
                problems.append(f"{layer.origin}: [{section}] has {len(table):,} keys, and {known_keys} in all.")
                continue
            for key, value in table.items():
                known = settings().get(key)
                if known is None or known.section != section:
                    problems.append(_unknown(layer.origin, section, key))
                else:
                    values[key], origins[key] = value, layer
    tables: Tables = {section: {} for section in SECTIONS}
    misfits = set()
    for key, value in values.items():  # only what still counts after layering is checked
        known, origin = settings()[key], origins[key].origin
        try:
            tables[known.section][key] = known.check(value)
        except ValueError as error:
            misfits.add(key)
            where = known.flag if origin == FLAG else f"{origin}: [{known.section}] {key}"
            problems.append(f"{where} is {shown(value)}: {error}.")
    config = Config(**{section: cls(**tables[section]) for section, cls in SECTIONS.items()})  # type: ignore[arg-type]
    for names, text in _contradictions(config):
        if misfits.isdisjoint(keys := names.split()):
            files = [origins[key].origin for key in keys if key in origins and origins[key].origin != FLAG]
            problems.append(f"{files[0]}: {text}" if files else text)
    if len(problems) > 1:
        problems = [f"{len(problems)} problems in the settings:", *(f"  {problem}" for problem in problems)]
    if problems:
        raise UserError("\n".join(problems))
    return Layered(config, origins)


def _no_section(origin: str, section: str, table: Any) -> str:
    word = shown(section).strip("'")
    if section in SECTIONS:
        return f"{origin}: {word} must be a table: write [{word}] on a line of its own."
    if section in settings():
        return f"{origin}: {word} stands outside of any section: it belongs in [{settings()[section].section}]."
    if not isinstance(table, dict):
        return f"{origin}: {word}: unknown setting.{did_you_mean(section, list(settings()))}"
    return f"{origin}: [{word}] is no section.{did_you_mean(section, list(SECTIONS))} Sections: {', '.join(SECTIONS)}."


def _unknown(origin: str, section: str, key: str) -> str:
    known = settings().get(key)
    home = f" It belongs in [{known.section}]." if known else did_you_mean(key, list(settings()))
    return f"{origin}: [{section}] {shown(key).strip(chr(39))}: unknown setting.{home}"


def _contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that are fine alone and wrong together, each with what to change."""
    o, start = config.optim, config.train.init_from
    yield from config.model.contradictions()
    if o.min_lr is not None and o.min_lr > o.learning_rate:
        text = f"min_lr = {o.min_lr:g} is above learning_rate = {o.learning_rate:g}: the rate would rise. "
        yield "min_lr learning_rate", text + "Lower it, or --min-lr none for learning_rate / 10."
    if o.warmup_iters and o.lr_decay_iters and o.schedule != "constant" and o.warmup_iters >= o.lr_decay_iters:
        text = (
            f"warmup_iters = {o.warmup_iters} leaves no update for the decay, which ends at lr_decay_iters = "
            f"{o.lr_decay_iters}. Lower it, or --warmup-iters none for a share of the run."
        )
        yield "warmup_iters lr_decay_iters", text
    if start == "scratch":  # nanoGPT's words
        yield "init_from", "init_from = scratch: leave it out, random weights are the default."
    if start == "resume":
        yield "init_from", "init_from = resume: to continue a run type nanogpt resume RUN."


def without_effect(layered: Layered) -> list[str]:
    """Settings that were given by flag or file and change nothing beside the others, each with the reason."""
    config, o = layered.config, layered.config.optim
    cases = [
        (o.schedule == "constant", ("min_lr", "lr_decay_iters"), "a constant schedule has no decay"),
        (o.optimizer != "muon", ("muon_lr", "muon_momentum"), f"the optimizer is {o.optimizer}"),
        (config.model.tie_weights, ("head_lr_scale",), "the head is the token table, see --no-tie-weights"),
        (not config.log.wandb, ("wandb_project", "wandb_run_name"), "--wandb is off"),
    ]
    idle = {name: why for holds, names, why in cases if holds for name in names}
    found = []
    for name, layer in layered.origins.items():
        known = settings()[name]
        value = getattr(getattr(config, known.section), name)
        if name in idle and value != known.default and layer.rank > Rank.PRESET:
            found.append(f"{known.flag} {value} has no effect: {idle[name]}")
    return found
