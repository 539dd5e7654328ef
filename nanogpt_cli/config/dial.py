"""What a user may ask for in place of a preset: so many minutes, or a depth."""

import time
from dataclasses import dataclass
from typing import Any

from nanogpt_cli.config.layers import IGNORED_TABLE, Layer, Rank, Tables, combine
from nanogpt_cli.config.schema import settings
from nanogpt_cli.errors import UserError

DEPTHS, MOST_MINUTES = range(1, 33), 100_000
CLASHES = ("init_from", "max_iters", "lr_decay_iters", "warmup_iters")

Told = dict[str, tuple[Any, str]]  # for [derived]: by key, what was found, and why
KEYS = ("minutes", "step_ms", "depth", "expected_loss", "fetch_s")


@dataclass(frozen=True)
class Dial:
    """One of the two is given.

    Args:
        minutes: how long the command may take in all.
        depth: layers of the model; it reads as many tokens as suit it.
        began: when the command began, by time.perf_counter.
        for_good: whether the process may be set up for good, as a command may do with its own.
    """

    minutes: float | None
    depth: int | None
    began: float
    for_good: bool


def make_dial(
    layers: tuple[Layer, ...],
    *,
    minutes: float | None = None,
    hours: float | None = None,
    depth: int | None = None,
    began: float | None = None,
) -> Dial | None:
    """What was asked for beside the settings of `layers`; None if nothing was. `began` is a command's own start.

    Raises:
        UserError: more than one, one out of range, or settings that would decide what the dial decides.
    """
    given = {"--minutes": minutes, "--hours": hours, "--depth": depth}
    typed = {flag: value for flag, value in given.items() if value is not None}
    if not typed:
        return None
    if len(typed) > 1:
        raise UserError(f"{' and '.join(typed)} exclude each other: a time chooses the depth that is best in it.")
    ((flag, value),) = typed.items()
    if depth is not None and depth not in DEPTHS:
        raise UserError(f"--depth is {depth}: a whole number from {DEPTHS[0]} to {DEPTHS[-1]} is needed.")
    if hours is not None:
        minutes = 60 * hours
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise UserError(f"{flag} is {value:g}: a time above 0 and of at most {MOST_MINUTES:,} minutes is needed.")
    _check_beside(f"{flag} {value:g}", layers)
    return Dial(minutes, depth, began or time.perf_counter(), for_good=began is not None)


def _check_beside(flag: str, layers: tuple[Layer, ...]) -> None:
    preset = next((layer.name for layer in layers if layer.rank == Rank.PRESET), None)
    if preset is not None:
        raise UserError(f"{flag} chooses the model itself: leave out --preset {preset}, or {flag}.")
    origins = combine(*layers).origins
    for name in CLASHES:
        if name in origins:
            instead = "" if flag.startswith("--depth") else " A run that ends by the clock: --max-minutes."
            by_flag = origins[name].rank == Rank.GIVEN
            setting = settings()[name].flag if by_flag else f"{name} of {origins[name].origin}"
            raise UserError(
                f"{flag} decides how long and at which rates a new model learns: leave out {setting}.{instead}"
            )


def told_before(tables: Tables) -> Told:
    """What the dial told of a run when it began, from its config.toml; what somebody changed there is no number."""
    derived = tables.get(IGNORED_TABLE)
    reasons = derived.get("reasons") if isinstance(derived, dict) else None
    if not isinstance(derived, dict) or not isinstance(reasons, dict):
        return {}
    return {key: (derived[key], str(reasons.get(key))) for key in KEYS if type(derived.get(key)) in (int, float)}
