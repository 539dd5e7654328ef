"""What this machine was found to do, kept in the user's cache: one measurement on a busy machine says little."""

import contextlib
import math
import platform
from typing import Any

import torch

from nanogpt_cli.errors import UserError
from nanogpt_cli.files import user_cache, write_toml
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.machine.device import device_name

FILE = "speed.toml"


def best_peak(device: torch.device, dtype: str, measured: float) -> float:
    """The highest peak seen here, FLOP/s, this measurement's included."""
    everything, here = _read(device, dtype)
    best = max(measured, _number(here.get("peak")))
    here["peak"] = best
    _write(everything)
    return best


def expected_mfu(device: torch.device, dtype: str, width: int) -> float | None:
    """The share of the peak that the last run of about this width reached here; None if there was none."""
    _, here = _read(device, dtype)
    shares = {int(name): _number(share) for name, share in here.get("mfu", {}).items() if name.isdigit()}
    near = min((w for w in shares if 0 < shares[w] <= 1), key=lambda w: abs(math.log(w / width)), default=None)
    return None if near is None else shares[near]


def note_mfu(device: torch.device, dtype: str, width: int, mfu: float) -> None:
    """Remember the share of the peak that a run of this width reached."""
    everything, here = _read(device, dtype)
    here.setdefault("mfu", {})[str(width)] = mfu
    _write(everything)


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0


def _read(device: torch.device, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that is known, and its part about this device and number format, to be filled."""
    try:
        everything = read_toml(user_cache() / FILE)
    except (UserError, OSError):  # not there yet, damaged, or without a home: a cache has no say in whether work begins
        everything = {}
    key = f"{platform.node()} {device_name(device)} {dtype}"
    if not isinstance(everything.get(key), dict) or not isinstance(everything[key].get("mfu", {}), dict):
        everything[key] = {}
    return everything, everything[key]


def _write(everything: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # as above
        write_toml(user_cache() / FILE, everything)
