"""Dense peaks of devices, in TFLOP/s by number format, found by the words of the name that torch shows.

Numbers are those of the makers' data sheets without sparsity, as collected by the projects that report MFU. float16 is
as fast as bfloat16 on every NVIDIA device from Ampere on. A device that is not listed has no peak here: a wrong one
would make a wrong MFU.
"""

import re
import time

import torch

from nanogpt_cli.machine.device import synchronize

# words that must all be in the name, bfloat16 TFLOP/s, TF32 TFLOP/s; the first match counts, so the narrow come first
_NVIDIA: list[tuple[str, float, float | None]] = [
    ("gb200", 2500, None),
    ("gb300", 2500, None),
    ("grace blackwell", 2500, None),
    ("b300", 2250, None),
    ("b200", 2250, None),
    ("b100", 1800, None),
    ("h200 nvl", 836, 420),
    ("h200 pcie", 836, 420),
    ("gh200", 989.5, 494.5),
    ("h200", 989.5, 494.5),
    ("h100 nvl", 835.5, 417.5),
    ("h100 pcie", 756.5, 378),
    ("h100", 989.5, 494.5),
    ("h800 nvl", 989, None),
    ("h800", 756, None),
    ("h20", 148, None),
    ("a100", 312, 156),
    ("a800", 312, 156),
    ("a40", 149.7, 74.8),
    ("a30", 165, None),
    ("a10", 125, 62.5),
    ("l40s", 362, None),
    ("l40", 181, 90.5),
    ("l4", 121, 60),
    ("rtx a6000", 154.85, 77.4),
    ("rtx 5090", 209.5, None),
    ("rtx 4090", 165.2, 82.6),
    ("rtx 4080 super", 104.5, 52.2),
    ("rtx 4080", 97.5, 48.8),
    ("rtx 4070 ti super", 88.2, 44.1),
    ("rtx 4070 ti", 80.2, 40.1),
    ("rtx 4070 super", 71.0, 35.5),
    ("rtx 4070", 58.3, 29.1),
    ("rtx 4060 ti", 44.1, 22.0),
    ("rtx 4060", 30.2, 15.1),
    ("rtx 3090 ti", 80, 40),
    ("rtx 3090", 71, 35.6),
    ("rtx 3080 ti", 68.2, 34.1),
    ("rtx 3080", 59.5, 29.8),
    ("rtx 3070 ti", 43.5, 21.7),
    ("rtx 3070", 40.6, 20.3),
    ("rtx 3060 ti", 32.4, 16.2),
    ("rtx 3060", 25.5, 12.7),
    ("mi355x", 2500, None),
    ("mi325x", 1307.4, None),
    ("mi300x", 1307.4, None),
    ("mi300a", 980.6, None),
    ("mi250x", 191.5, None),  # torch sees one of its two dies
]

# no bfloat16 units: float16 alone has a peak
_FLOAT16_ONLY: list[tuple[str, float]] = [
    ("v100s", 130),
    ("v100 pcie", 112),
    ("v100", 125),
    ("t4", 65),
]

# look like something in the table and are slower: half-rate parts, laptop versions and slices of a device
_UNKNOWN = ("mig", "laptop", "max q", "mobile", "6000 ada", "pro 6000")


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in TFLOP/s; None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it.
        dtype: "float32" (with TF32 products), "bfloat16" or "float16".
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    if any(_has(words, unknown) for unknown in _UNKNOWN):
        return None
    for name, float16 in _FLOAT16_ONLY:
        if _has(words, name):
            return float16 if dtype == "float16" else None
    for name, bfloat16, tf32 in _NVIDIA:
        if _has(words, name):
            return tf32 if dtype == "float32" else bfloat16
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """FLOP/s of a square matrix product in `dtype`: the peak of a device that stands in no table."""
    if device.type == "cpu" and dtype == torch.float16 and not _cpu_has_float16():
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


def _cpu_has_float16() -> bool:
    abilities = torch.cpu.get_capabilities()
    return bool(abilities.get("avx512_fp16") or abilities.get("amx_fp16"))


def _has(words: list[str], name: str) -> bool:
    """Whether all words of `name` stand among `words` as whole words: "a10" is not in "a100"."""
    return all(word in words for word in name.split())
