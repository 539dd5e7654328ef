"""The device table: narrow names first, whole words only, and nothing for what is not known."""

import pytest

from nanogpt_cli.machine.peaks import peak_tflops


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
