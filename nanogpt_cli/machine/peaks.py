"""Dense peaks of devices, found in peaks.toml by the words of the name that torch shows, or measured."""

import re
import time
import tomllib
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.machine.device import synchronize

_KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text("utf-8"))


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s; None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it.
        dtype: "float32" (with TF32 products), "bfloat16" or "float16".
    """
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
