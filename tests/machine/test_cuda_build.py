"""What torch.compile makes of training on a GPU, read from the code it generates: needs a CUDA build of torch, no GPU.

pip install torch pytest pytest-timeout .        # on Linux: a CUDA build
python -m pytest -m cuda_build -s tests/machine/test_cuda_build.py
"""

from dataclasses import replace

import pytest
import torch

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.model.gpt import GPT
from tests.cuda_code import Pass, generated, pretend_gpu

ROWS, TABLE = 12, 50304  # nanoGPT's micro-batch of GPT-2, and its vocabulary

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]


def passes(preset: str, n_layer: int) -> tuple[Pass, Pass]:
    """Forward and backward of a preset with so many layers."""
    settings = replace(combine(preset_layer(preset)).config.model, n_layer=n_layer, vocab_size=TABLE)
    with torch.device("meta"):
        model = GPT(settings)
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch)
        return generated(model, ROWS, patch)


@pytest.mark.parametrize(("preset", "launches", "gib"), [("gpt2", 31, 1.18), ("gpt2_modern", 33, 1.23)])
def test_a_layer_takes_no_more_launches_and_bytes_than_it_did(preset: str, launches: int, gib: float) -> None:
    """Forward and backward together, of 12 rows x 1,024 tokens; what the embeddings and the loss take cancels out."""
    one, two = passes(preset, 1), passes(preset, 2)
    more = sum(b.launches - a.launches for a, b in zip(one, two, strict=True))
    moved = sum(b.fused_bytes - a.fused_bytes for a, b in zip(one, two, strict=True)) / 2**30
    print(f"\n{preset}: {more} launches and {moved:.3f} GiB a layer")
    assert more <= launches
    assert moved <= gib
    # not even one float32 copy of the logits, which would be 16 times as large as the table's gradient
    assert max(part.largest_float32 for part in two) <= TABLE * 768
