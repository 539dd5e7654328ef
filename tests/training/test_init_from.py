"""Training from given weights: which settings yield to them, and which data they cannot read."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanogpt_cli.config.layers import Layer, Layered, Rank, combine, flag_layer
from nanogpt_cli.data.tokenizers import CharTokenizer
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.errors import UserError
from nanogpt_cli.training.init_from import initial_architecture, initial_weights
from tests.conftest import TEXT, write_data_set
from tests.models import SETTINGS, make_run, random_weights

TOKENIZER = CharTokenizer(TEXT)
MODEL = replace(SETTINGS, vocab_size=TOKENIZER.size, bias=False)
LARGE = {"n_layer": 12, "n_embd": 768, "n_head": 12, "block_size": 1024, "bias": True}
PRESET = Layer("preset gpt2", {"model": LARGE}, Rank.PRESET)

Start = Callable[[Layered], tuple[Any, dict[str, torch.Tensor]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), MODEL, TOKENIZER)
    data_set = open_data_set(write_data_set(Path("data/tiny")))

    def start(layered: Layered) -> tuple[Any, dict[str, torch.Tensor]]:
        architecture, loaded = initial_architecture(layered, data_set)
        assert "runs/a" in loaded.source
        return architecture, initial_weights(dataclasses.replace(layered.config, model=architecture))

    return start


def test_a_preset_yields_to_weights_that_a_flag_names(start: Start) -> None:
    settings, weights = start(combine(PRESET, flag_layer({"init_from": "a", "dropout": "0.1"})))
    assert settings == replace(MODEL, dropout=0.1)
    assert all(torch.equal(weights[n], t) for n, t in random_weights(MODEL).items())


@pytest.mark.parametrize("layers", [1, 2])
def test_settings_of_the_same_or_a_higher_layer_are_refused(start: Start, layers: int) -> None:
    flags: dict[str, Any] = {"n_layer": "3", "bias": True, "n_embd": "16", "n_head": "2"}
    if layers == 1:
        layered = combine(PRESET, flag_layer({"init_from": "a", **flags}))
    else:
        layered = combine(Layer("my.toml", {"train": {"init_from": "a"}}), flag_layer(flags))
    with pytest.raises(UserError, match=r"n_layer = 3 .the weights have 2.; bias = True") as error:
        start(layered)
    assert "n_embd" not in str(error.value)


def test_the_context_is_cropped_but_never_longer(start: Start) -> None:
    settings, weights = start(combine(flag_layer({"init_from": "a", "block_size": "5"})))
    assert settings.block_size == len(weights["wpe.weight"]) == 5
    shorter = Layer("preset small", {"model": {"block_size": 7}}, Rank.PRESET)
    assert start(combine(shorter, flag_layer({"init_from": "a"})))[0].block_size == 7
    with pytest.raises(UserError, match="longer than the 16 positions"):
        start(combine(flag_layer({"init_from": "a", "block_size": "17"})))


def test_data_of_another_alphabet_is_refused(start: Start) -> None:
    other = open_data_set(write_data_set(Path("data/other"), TEXT.upper()))
    with pytest.raises(UserError, match="the same ids mean different text"):
        initial_architecture(combine(flag_layer({"init_from": "a"})), other)
