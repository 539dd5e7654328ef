"""How much memory there is, of this machine and of a device, and how running out of it is told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from nanogpt_cli.errors import NanogptError

CGROUP = Path("/sys/fs/cgroup")
# how backends that have no exception of their own say it: CPU allocators, MPS, cuBLAS
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


def free_memory() -> int | None:
    """Bytes of the machine's memory that this process may still take; None where the system does not say."""
    known = Path("/proc/meminfo")
    if not known.exists():
        return None
    free = next(1024 * int(line.split()[1]) for line in known.read_text().splitlines() if "MemAvailable" in line)
    in_container = free_in_cgroup(CGROUP)
    return free if in_container is None else min(free, in_container)


def free_in_cgroup(folder: Path) -> int | None:
    """Bytes that a container (cgroup v2), which may have less than its machine, can still take; None without a limit.

    Pages of files that were read count as current; the kernel drops the inactive ones before it refuses anything.
    """
    limit = folder / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    current = int((folder / "memory.current").read_text())
    return int(limit.read_text()) - current + int(counts["inactive_file"])


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU, or those that are free for a CPU; None where that is not known."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory  # asking what is free would itself take some
        return total
    return free_memory() if device.type == "cpu" else None


@contextlib.contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn running out of memory into a NanogptError that ends with `advice`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).strip().partition("\n")[0]
        raise NanogptError(f"Out of memory{f' ({told})' if told else ''}.\n{advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, numpy or Python says that memory, of a device or the host, was not enough."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in OUT_OF_MEMORY)
