"""What a device can do: its dense peak, listed in peaks.toml or measured, and how much of it runs have reached here.

What was measured is kept in the user's cache: one measurement on a busy machine says little.
"""

import contextlib
import math
import platform
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.errors import UserError
from nanogpt_cli.files import user_cache, write_toml
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.machine.device import device_name, synchronize

_KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text("utf-8"))


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak in TFLOP/s, float32 with TF32 products, of a device by its CUDA name; None where it is not known."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())

    def is_named(name: str) -> bool:
        return all(word in words for word in name.split())  # whole words: "a10" is not in "a100"

    if any(map(is_named, _KNOWN["unknown"])):
        return None
    for name, float16 in _KNOWN["float16_only"]:
        if is_named(name):
            return float(float16) if dtype == "float16" else None
    bfloat16, *tf32 = next((peaks for name, *peaks in _KNOWN["devices"] if is_named(name)), (None,))
    return bfloat16 if dtype != "float32" else tf32[0] if tf32 else None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """FLOP/s of a square matrix product in `dtype`: the peak of a device that stands in no table."""
    has_float16 = any(torch.cpu.get_capabilities().get(units) for units in ("avx512_fp16", "amx_fp16"))
    if device.type == "cpu" and dtype == torch.float16 and not has_float16:
        dtype = torch.float32  # which the products convert to, in some shapes in a hundredth of the speed
    size, at_once = (1024, 1) if device.type == "cpu" else (4096, 8)  # a wait after each product reads low on a GPU
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as training has it
    best = float("inf")
    a @ b  # the first call picks kernels
    synchronize(device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(at_once):
            a @ b
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / at_once)
    torch.set_float32_matmul_precision(precision)
    return 2 * size**3 / best


def best_peak(device: torch.device, dtype: str, measured: float) -> float:
    """The highest peak seen here, FLOP/s, this measurement's included."""
    everything, here = _read(device, dtype)
    here["peak"] = best = max(measured, _number(here.get("peak")))
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
        everything = read_toml(user_cache() / "speed.toml")
    except (UserError, OSError):  # not there yet, damaged, or without a home: a cache has no say in whether work begins
        everything = {}
    key = f"{platform.node()} {device_name(device)} {dtype}"
    if not isinstance(everything.get(key), dict) or not isinstance(everything[key].get("mfu", {}), dict):
        everything[key] = {}
    return everything, everything[key]


def _write(everything: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # as above
        write_toml(user_cache() / "speed.toml", everything)
