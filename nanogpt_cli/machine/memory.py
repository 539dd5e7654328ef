"""How much memory there is: of this machine, and of a device."""

from pathlib import Path

import torch


def free_memory() -> int | None:
    """Bytes of the machine's memory that this process may still take; None where the system does not say."""
    known, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not known.exists():
        return None
    free = next(1024 * int(line.split()[1]) for line in known.read_text().splitlines() if "MemAvailable" in line)
    if limit.exists() and limit.read_text().strip() != "max":  # a container has less than its machine
        free = min(free, int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
    return free


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU, or those that are free for a CPU; None where that is not known."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory  # asking what is free would itself take some
        return total
    return free_memory() if device.type == "cpu" else None
