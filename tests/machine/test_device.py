"""Choices of device, dtype and compilation, with faked abilities: each has a reason, each refusal a way out."""

import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from nanogpt_cli.config.schema import ModelSettings, SystemSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine import device
from nanogpt_cli.machine.device import choose_compute, key_dropout

WIDE, NARROW = ModelSettings(n_embd=384, n_head=6), ModelSettings(n_embd=32)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(
        capability: tuple[int, int], count: int = 1, arch_list: tuple[str, ...] = ("sm_70", "sm_80", "sm_90a")
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake GPU")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arch_list)
        monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)

    return pretend


@pytest.fixture
def only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("only_cpu")
def test_a_cpu_is_good_enough() -> None:
    compute = choose_compute(SystemSettings(), NARROW)
    assert (compute.device.type, compute.dtype, compute.deterministic) == ("cpu", torch.float32, True)
    assert all(compute.reasons.values())


@pytest.mark.usefixtures("only_cpu")
@pytest.mark.parametrize("asked", ["cuda", "cuda:0", "mps"])
def test_what_is_not_there_is_refused_with_a_way_out(asked: str) -> None:
    with pytest.raises(UserError, match="--device auto or cpu"):
        choose_compute(SystemSettings(device=asked), NARROW)


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 0), "float16")])
def test_dtype_follows_the_device(fake_cuda: Any, capability: tuple[int, int], dtype: str) -> None:
    fake_cuda(capability)
    compute = choose_compute(SystemSettings(), WIDE)
    assert compute.dtype_name == dtype
    assert f"{capability[0]}.{capability[1]}" in compute.reasons["dtype"]


def test_bfloat16_asked_for_on_an_old_gpu_falls_back_saying_so(fake_cuda: Any) -> None:
    fake_cuda((7, 0))
    compute = choose_compute(SystemSettings(dtype="bfloat16"), WIDE)
    assert compute.dtype == torch.float16
    assert "no bfloat16" in compute.reasons["dtype"]


def test_a_numbered_device_is_its_type_everywhere(fake_cuda: Any) -> None:
    fake_cuda((9, 0), count=2)
    compute = choose_compute(SystemSettings(device="cuda:1"), WIDE)
    assert (compute.device.type, compute.device.index) == ("cuda", 1)
    with pytest.raises(UserError, match="cuda:0 to cuda:1"):
        choose_compute(SystemSettings(device="cuda:2"), WIDE)


DEFAULT_WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((7, 0), DEFAULT_WHEEL, False),
        ((6, 1), DEFAULT_WHEEL, False),
        ((7, 5), DEFAULT_WHEEL, True),
        ((8, 9), DEFAULT_WHEEL, True),
        ((12, 1), DEFAULT_WHEEL, True),
        ((13, 0), DEFAULT_WHEEL, False),
        ((13, 0), (*DEFAULT_WHEEL, "compute_120"), True),
    ],
)
def test_a_gpu_that_this_torch_has_no_kernels_for_is_not_chosen(
    fake_cuda: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch_list: tuple[str, ...], runs: bool
) -> None:
    fake_cuda(capability, arch_list=arch_list)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    compute = choose_compute(SystemSettings(), NARROW)
    assert compute.device.type == ("cuda" if runs else "cpu")
    if not runs:
        assert f"no kernels for a GPU of CUDA capability {capability[0]}." in compute.reasons["device"]
        with pytest.raises(UserError, match=r"no kernels.*Use --device auto or cpu, or install"):
            choose_compute(SystemSettings(device="cuda"), NARROW)


def test_compile_pays_on_long_cuda_runs_alone(fake_cuda: Any) -> None:
    fake_cuda((9, 0))
    assert choose_compute(SystemSettings(), WIDE, long_run=True).compile
    assert not choose_compute(SystemSettings(), WIDE, long_run=False).compile
    assert choose_compute(SystemSettings(compile="on"), WIDE, long_run=False).compile
    assert not choose_compute(SystemSettings(compile="off"), WIDE).compile


def test_without_a_compiler_auto_goes_on_and_on_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    compute = choose_compute(SystemSettings(device="cpu"), WIDE)
    assert not compute.compile
    assert "no C++ compiler" in compute.reasons["compile"]
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        choose_compute(SystemSettings(device="cpu", compile="on"), WIDE)


@pytest.mark.parametrize("able", [True, False])
def test_cpu_bfloat16_needs_instructions_and_width(monkeypatch: pytest.MonkeyPatch, able: bool) -> None:
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: able)
    wide = choose_compute(SystemSettings(device="cpu"), WIDE)
    narrow = choose_compute(SystemSettings(device="cpu"), NARROW)
    assert wide.dtype == (torch.bfloat16 if able else torch.float32)
    assert narrow.dtype == torch.float32


def test_dropout_is_a_function_of_its_key() -> None:
    def draw(*key: int) -> list[float]:
        key_dropout(torch.device("cpu"), *key)
        return torch.rand(4).tolist()

    first = draw(1, 10, 0)
    torch.rand(1000)
    assert draw(1, 10, 0) == first
    assert len({tuple(draw(*key)) for key in [(1, 10, 0), (1, 10, 1), (1, 11, 0), (2, 10, 0), (10, 1, 0)]}) == 5


FAULTS = """
import resource, sys, torch
from nanogpt_cli.machine.device import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))
def faults():
    torch.zeros(2**24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
seen = [faults() for _ in range(15)]
print(seen[-1] - seen[5])
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_not_cleared_by_the_kernel_again() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True).stdout)
        for how in ("kept", "default")
    )
    assert kept < 1000 < given_back


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory as Linux counts it")
def test_memory_is_this_process_own_and_not_that_of_who_started_it() -> None:
    ballast = np.ones(1 << 27)  # 1 GiB, which the system counts for the child too until it runs its own program
    code = "import torch; from nanogpt_cli.machine.device import memory_gib; print(memory_gib(torch.device('cpu')))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 0.05 < float(told) < 0.9
    assert ballast[-1] == 1
