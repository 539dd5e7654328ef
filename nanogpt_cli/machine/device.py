"""What a run computes with: device, number format and compilation, each chosen with its reason."""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._triton

from nanogpt_cli.config.schema import ModelSettings, SystemSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.keyed import Purpose, seed32

# from this width on bfloat16 takes 0.55 to 0.75 of float32's time on a CPU (measured); below, steps are short anyway
CPU_BFLOAT16_WIDTH = 64
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Compute:
    """The choices of one process; `reasons` says why, by setting name."""

    device: torch.device
    dtype: torch.dtype
    compile: bool
    deterministic: bool
    reasons: dict[str, str]

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" for torch.bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Mixed precision around forward passes; nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def describe(self) -> str:
        """One line for the user, such as "cpu (AVX512, 2 threads)"."""
        return f"{self.device} ({device_name(self.device)})"

    def prepare(self) -> None:
        """Set up this process for good, as a command may: as `process_settings`, and how memory is freed."""
        keep_freed_memory(self.device)
        self._switch()

    @contextlib.contextmanager
    def process_settings(self) -> Iterator[None]:
        """While a run trains: TF32, deterministic algorithms, the CUDA device. Then all is, threads too, as before."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        filling: Any = torch.utils.deterministic
        with contextlib.ExitStack() as before:
            before.callback(torch.set_num_threads, torch.get_num_threads())
            before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            before.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
            before.callback(setattr, filling, "fill_uninitialized_memory", filling.fill_uninitialized_memory)
            if self.device.type == "cuda":
                before.callback(torch.cuda.set_device, torch.cuda.current_device())
            if CUBLAS_WORKSPACE not in os.environ:
                before.callback(os.environ.pop, CUBLAS_WORKSPACE, None)
            self._switch()
            yield

    def _switch(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        if self.deterministic:
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
            torch.use_deterministic_algorithms(True)
            # filling every fresh tensor would only help to find reads of uninitialised memory
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_compute(
    system: SystemSettings, model: ModelSettings, *, local_rank: int = 0, long_run: bool = True
) -> Compute:
    """Device, dtype and compile for this process; UserError if what was asked for is not to be had here.

    Args:
        local_rank: number of this process on its machine; picks the CUDA device.
        long_run: whether the run is long enough to repay compilation.
    """
    device, device_reason = _choose_device(system.device, local_rank)
    dtype, dtype_reason = _choose_dtype(system.dtype, device, model)
    compiled, compile_reason = _choose_compile(system.compile, device, long_run)
    deterministic = system.deterministic or device.type == "cpu"
    reasons = {"device": device_reason, "dtype": dtype_reason, "compile": compile_reason}
    return Compute(device, dtype, compiled, deterministic, reasons)


def _choose_device(asked: str, local_rank: int) -> tuple[torch.device, str]:
    if asked == "auto":
        lack = ""
        if torch.cuda.is_available():
            lack = _lacks_kernels(torch.device("cuda", local_rank))
            if not lack:
                return torch.device("cuda", local_rank), "a CUDA device is present"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "Apple's GPU is present"
        return torch.device("cpu"), lack or "no CUDA device and no Apple GPU here"
    device = torch.device(asked)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this machine or this torch build has no Apple GPU. Use --device auto or cpu.")
    if device.type != "cuda":
        return device, "as set"
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        build = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        if torch.version.cuda is not None and "CUDA_VISIBLE_DEVICES" in os.environ:
            build += f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})"
        raise UserError(
            f"--device {asked}: torch {torch.__version__} {build}. "
            "Use --device auto or cpu, or install a CUDA build (https://pytorch.org/get-started)."
        )
    device = torch.device("cuda", local_rank if device.index is None else device.index)
    if device.index >= count:
        raise UserError(f"--device {asked}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}.")
    if lack := _lacks_kernels(device):
        raise UserError(
            f"--device {asked}: {lack}. Use --device auto or cpu, or install a build of torch for this GPU "
            "(https://pytorch.org/get-started/previous-versions)."
        )
    return device, "as set"


def _lacks_kernels(device: torch.device) -> str:
    """Why this build of torch cannot run anything on a GPU, in words; empty if it can."""
    if torch.version.hip is not None:
        return ""
    here = torch.cuda.get_device_capability(device)
    for name in torch.cuda.get_arch_list():  # such as sm_86, sm_90a, compute_120
        kind, _, number = name.partition("_")
        built = divmod(int(number.rstrip("af")), 10)
        # kernels run on later GPUs of the same generation, intermediate code is translated for any later one
        if built <= here and (kind == "compute" or built[0] == here[0]):
            return ""
    return f"torch {torch.__version__} has no kernels for a GPU of CUDA capability {here[0]}.{here[1]}"


def _choose_dtype(asked: str, device: torch.device, model: ModelSettings) -> tuple[torch.dtype, str]:
    if device.type == "cuda" and asked in ("auto", "bfloat16"):
        capability = torch.cuda.get_device_capability(device)
        shown = f"CUDA capability {capability[0]}.{capability[1]}"
        if capability < (8, 0):
            return torch.float16, f"{shown} has no bfloat16"
        return torch.bfloat16, "as set" if asked == "bfloat16" else shown
    if asked != "auto":
        return getattr(torch, asked), "as set"
    if device.type == "mps":
        return torch.float32, "the dependable format on Apple GPUs"
    if not cpu_has_bfloat16():
        return torch.float32, "this CPU has no bfloat16 instructions"
    if model.n_embd < CPU_BFLOAT16_WIDTH:
        return torch.float32, f"n_embd {model.n_embd} is too narrow for bfloat16 to pay on a CPU"
    return torch.bfloat16, "this CPU multiplies bfloat16 natively"


def keep_freed_memory(device: torch.device) -> None:
    """Where a CPU trains let glibc reuse blocks above 32 MB, whose every page the kernel would clear again.

    Measured: a tenth of a step of GPT-2 124M. Other systems' allocators keep theirs.
    """
    there = device.type == "cpu" and sys.platform == "linux"
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if there else None:
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(parameter, 2**31 - 1)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has native bfloat16 products (AVX512-BF16 or AMX)."""
    abilities = torch.cpu.get_capabilities()
    return bool(abilities.get("avx512_bf16") or abilities.get("amx_bf16"))


def _choose_compile(asked: str, device: torch.device, long_run: bool) -> tuple[bool, str]:
    lack = _lacks_for_compile(device)
    if asked == "on" and lack:
        raise UserError(f"--compile on: {lack}. Use --compile auto or off.")
    if asked != "auto":
        return asked == "on", "as set"
    if lack:
        return False, lack
    if device.type != "cuda":  # measured: a compiled step takes 1.1 to 1.8 times as long in bfloat16, else 0.8 to 1.4
        return False, "on a CPU eager code is as fast"
    if not long_run:
        return False, "the run is too short to repay it"
    return True, "CUDA device and a long run"


def _lacks_for_compile(device: torch.device) -> str:
    """What is missing for torch.compile here, in words; empty if nothing."""
    if device.type == "mps":
        return "torch.compile is not dependable on Apple GPUs"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device)[0] < 7:
            return "the GPU is too old for Triton (CUDA capability below 7.0)"
        return "" if torch.utils._triton.has_triton() else "Triton is not installed"
    compiler = os.environ.get("CXX") or ("cl" if sys.platform == "win32" else "c++" if shutil.which("c++") else "g++")
    return "" if shutil.which(compiler) else f"no C++ compiler was found ({compiler})"


def device_name(device: torch.device) -> str:
    """As the driver calls a GPU; a CPU by its instructions and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return "Apple GPU"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_gib(device: torch.device) -> float | None:
    """Peak memory of this process so far: the device's, or resident memory on a CPU. None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    status = Path("/proc/self/status")
    if status.exists():  # Linux; not ru_maxrss there: a new program inherits that of the one that started it
        return int(status.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS counts bytes


def key_dropout(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Set the default generators for one step: dropout becomes a function of (seed, step, rank)."""
    bits = seed32(seed, Purpose.DROPOUT, stream=step, substream=rank)
    torch.default_generator.manual_seed(bits)  # torch.manual_seed would visit every backend: 80 us
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(bits)
    elif device.type == "mps":
        torch.mps.manual_seed(bits)


@contextlib.contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
