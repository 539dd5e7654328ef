"""The device table: narrow names first, whole words only, and nothing for what is not known."""

import pytest
import torch

from nanogpt_cli.machine.peaks import measure_peak_flops, peak_tflops


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A30", 165),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 154.85),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla T4", None),
        ("Foo", None),
    ],
)
def test_names_as_torch_shows_them(name: str, bfloat16: float | None) -> None:
    assert peak_tflops(name, "bfloat16") == bfloat16


def test_every_format_has_its_own_peak() -> None:
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float16") == 312
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 156
    assert peak_tflops("Tesla V100-SXM2-16GB", "float16") == 125
    assert peak_tflops("Tesla V100-PCIE-32GB", "float16") == 112
    assert peak_tflops("Tesla T4", "float16") == 65
    assert peak_tflops("Tesla T4", "float32") is None


def test_float16_on_a_cpu_is_measured_in_the_format_it_is_worked_out_in() -> None:
    """The product of two float16 squares runs at a hundredth of what training's products reach: 942% MFU."""
    cpu = torch.device("cpu")
    half, single = (measure_peak_flops(cpu, dtype) for dtype in (torch.float16, torch.float32))
    assert half > single / 4


def test_an_unlisted_gpu_is_measured_as_it_will_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32, and with several products between two waits."""
    events: list[str] = []

    def product(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        events.append(torch.get_float32_matmul_precision())
        return self

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    monkeypatch.setattr("nanogpt_cli.machine.peaks.synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.zeros(2, 2))
    before = torch.get_float32_matmul_precision()
    measure_peak_flops(torch.device("cuda"), torch.float32, seconds=0.001)
    assert set(events) == {"high", "wait"}
    assert events[2:12].count("wait") == 1
    assert torch.get_float32_matmul_precision() == before
