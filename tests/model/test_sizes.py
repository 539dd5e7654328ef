"""Sizes and FLOPs against arithmetic written out by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token, memory_estimate, parameter_table

GPT2 = ModelSettings(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, bias=False)


def test_flops_of_gpt2_by_hand() -> None:
    block = 768 * (3 * 768) + 768 * 768 + 768 * (4 * 768) + (4 * 768) * 768 + 2 * 768  # attention, MLP, two gains
    n = 50304 * 768 + 12 * block + 768  # the tied table counts once, as the head; positions do not
    expected = 6 * n + 12 * 12 * 12 * 64 * 1024
    assert flops_per_token(GPT2) == expected
    assert expected / 1e6 == pytest.approx(854.8, abs=0.05)
    assert flops_per_token(GPT2, causal=True) == 6 * n + 6 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize(
    ("layers", "heads", "width", "count"),
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_the_released_sizes(layers: int, heads: int, width: int, count: int) -> None:
    settings = ModelSettings(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
    assert sum(parameter_table(settings).values()) == count
    assert checkpoint_bytes(settings, "adamw") == {"weights": 4 * count, "moments": 8 * count}


def test_an_untied_input_table_does_no_products() -> None:
    tied = ModelSettings(vocab_size=1000)
    untied = ModelSettings(vocab_size=1000, tie_weights=False)
    assert flops_per_token(tied) == flops_per_token(untied)
    assert sum(parameter_table(untied).values()) - sum(parameter_table(tied).values()) == 1000 * 128


def test_muon_keeps_one_moment_of_block_matrices() -> None:
    blocks = 12 * 12 * 768 * 768
    rest = sum(parameter_table(GPT2).values()) - blocks
    assert checkpoint_bytes(GPT2, "muon")["moments"] == 4 * blocks + 8 * rest


def test_memory_grows_with_the_batch_in_activations_and_logits_alone() -> None:
    one, two, three = (memory_estimate(GPT2, rows, "adamw", "bfloat16", device="cuda") for rows in (1, 2, 300))
    assert {part for part in one if one[part] != two[part]} == {"activations", "logits", "working space"}
    assert two["activations"] == 2 * one["activations"]
    assert three["logits"] == 12 * 2**27, "the loss holds a part of the logits"


def test_activations_of_gpt2_by_hand() -> None:
    token = 8 * 768 + 2 * (2 * 768 + 3 * 768 + 768 + 2 * 4 * 768)  # stream; norms, q k v, attention, MLP in bfloat16
    estimate = memory_estimate(GPT2, 2, "adamw", "bfloat16", device="cuda")
    assert estimate["activations"] == 2 * 1024 * 12 * token
    weights_seen = 12 * (256 + 512 + 768 + 1024) // 4
    estimate = memory_estimate(GPT2, 2, "adamw", "bfloat16", device="cpu")
    assert estimate["activations"] == 2 * 1024 * 12 * (token + 2 * weights_seen)


def test_activation_checkpointing_keeps_a_layers_input_and_one_layer() -> None:
    kept, again = (
        memory_estimate(GPT2, 2, "adamw", "bfloat16", device="cuda", activation_checkpointing=on)["activations"]
        for on in (False, True)
    )
    assert again == 2 * 1024 * 12 * 4 * 768 + kept // 12


MEASURE = """
import resource, sys, torch
from pathlib import Path
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.machine.device import memory_gib
from nanogpt_cli.model.gpt import GPT
torch.set_num_threads(2)
dtype, rows, settings = eval(sys.argv[1])
torch.randn(10).sum()
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
model = GPT(ModelSettings(**settings))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randint(settings["vocab_size"], (rows, settings["block_size"]))
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = model(x, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(round(memory_gib(torch.device("cpu")) * 2**30) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux shows it")
@pytest.mark.parametrize(
    ("dtype", "rows", "shape"),
    [
        (
            "bfloat16",
            48,
            {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "vocab_size": 100, "dropout": 0.1},
        ),
        ("float32", 2, {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 512, "vocab_size": 50304}),
    ],
)
def test_the_estimate_is_near_what_is_used(dtype: str, rows: int, shape: dict[str, Any]) -> None:
    command = [sys.executable, "-c", MEASURE, repr((dtype, rows, shape))]
    used = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    estimate = sum(memory_estimate(ModelSettings(**shape), rows, "adamw", dtype, device="cpu").values())
    assert 0.6 < estimate / used < 1.6
