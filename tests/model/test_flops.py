"""Sizes and FLOPs against arithmetic written out by hand."""

import pytest

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.model.flops import checkpoint_bytes, flops_per_token, memory_estimate, parameter_table

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
    one, two = (memory_estimate(GPT2, rows, "adamw", "bfloat16") for rows in (1, 2))
    assert {part for part in one if one[part] != two[part]} == {"activations", "logits"}
    assert two["activations"] == 2 * one["activations"]
