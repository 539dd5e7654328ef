"""Files, presets and their order."""

import contextlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_cli.config.derived import schedule_of
from nanogpt_cli.config.layers import Layer, combine, config_layer, flag_layer, without_effect
from nanogpt_cli.config.presets import preset_layer, preset_names, preset_path, preset_summary, presets_folder
from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import read_toml


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_say_what_they_are_for(name: str) -> None:
    config = combine(preset_layer(name)).config
    assert config.data.dataset
    assert preset_summary(name)[0].isalnum()
    assert schedule_of(config).factor(0) > 0


def test_the_promised_presets_are_there() -> None:
    promised = {
        "shakespeare_char",
        "nanogpt_cpu",
        "shakespeare_char_cpu",
        "gpt2",
        "gpt2_medium",
        "gpt2_large",
        "gpt2_xl",
    }
    assert promised | {"finetune_shakespeare"} <= set(preset_names())


def test_nanogpt_cpu_is_the_readme_recipe_number_by_number() -> None:
    config = combine(preset_layer("nanogpt_cpu")).config
    m, o, t = config.model, config.optim, config.train
    assert (m.n_layer, m.n_head, m.n_embd, m.block_size, m.dropout, m.bias) == (4, 4, 128, 64, 0.0, False)
    assert (m.activation, config.data.sampling) == ("gelu", "random")
    assert (t.batch_size, t.gradient_accumulation_steps, t.max_iters) == (12, 1, 2000)
    assert (t.eval_interval, t.eval_iters, t.log_interval) == (250, 20, 1)
    assert (o.learning_rate, o.min_lr, o.warmup_iters, o.lr_decay_iters, o.beta2) == (1e-3, 1e-4, 100, 2000, 0.99)


def test_preset_names_take_dash_for_underscore() -> None:
    assert preset_path("shakespeare-char").stem == "shakespeare_char"


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no such preset\. Did you mean shakespeare_char\?.*There are: .*gpt2"):
        preset_layer("shakespere_char")
    with pytest.raises(UserError, match="no such preset"):
        preset_layer("../presets/gpt2")


def test_presets_folder_is_found() -> None:
    assert (presets_folder() / "gpt2.toml").is_file()


def test_flags_beat_files_and_files_beat_presets(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[optim]\nlearning_rate = 2e-3\n[train]\nbatch_size = 7\n")
    layered = combine(preset_layer("gpt2"), config_layer(file), flag_layer({"batch_size": "5", "seed": None}))
    assert layered.config.train.batch_size == 5
    assert layered.config.optim.learning_rate == 2e-3
    assert layered.config.model.n_layer == 12
    assert layered.origins["batch_size"].origin == "flag"
    assert layered.origins["learning_rate"].origin == str(file)
    assert layered.origins["n_layer"].origin == "preset gpt2"
    assert "seed" not in layered.origins


def test_a_flag_mends_a_bad_value_of_a_file() -> None:
    assert combine(Layer("a.toml", {"train": {"seed": "x"}}), flag_layer({"seed": "3"})).config.train.seed == 3


def test_sections_may_stand_in_any_order() -> None:
    tables = {"train": {"seed": 3}, "model": {"n_layer": 2}, "optim": {"beta1": 0.8}}
    configs = {combine(Layer("a", dict(order))).config for order in itertools.permutations(tables.items())}
    assert len(configs) == 1


@pytest.mark.parametrize(
    "text", ["a = ", "[data", "x = 1\nx = 2", "import os", f"seed = {'9' * 5000}", "a = " + "[" * 9999]
)
def test_what_is_no_toml_is_a_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"bad\.toml: not a TOML file: ."):
        read_toml(file)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: no such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(UserError, match=r"latin\.toml: not UTF-8 text \(at byte 5\)"):
        read_toml(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nseed = 3\r\n")
    assert combine(config_layer(file)).config.train.seed == 3


@given(content=st.binary(max_size=200) | st.text(alphabet="[]{}=\"'\n.,#abc019-:_ ", max_size=80).map(str.encode))
def test_no_file_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.toml"
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        assert combine(config_layer(file)).config


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"schedule": "constant", "min_lr": "1e-5"}, "--min-lr 1e-05 has no effect: a constant schedule has no decay"),
        ({"schedule": "constant", "lr_decay_iters": "9"}, "--lr-decay-iters 9 has no effect"),
        ({"muon_lr": "0.1"}, "--muon-lr 0.1 has no effect: the optimizer is adamw"),
        ({"head_lr_scale": "2"}, "--head-lr-scale 2.0 has no effect: the head is the token table"),
        ({"wandb_project": "mine"}, "--wandb-project mine has no effect: --wandb is off"),
    ],
)
def test_what_changes_nothing_is_told(flags: dict[str, str], reason: str) -> None:
    layered = combine(flag_layer(flags))
    (found,) = without_effect(layered)
    assert found.startswith(reason)


def test_a_preset_may_hold_what_a_flag_puts_out_of_use() -> None:
    flags = {"optimizer": "adamw", "schedule": "constant", "tie_weights": True, "muon_momentum": "0.95"}
    layered = combine(preset_layer("gpt2_modern"), preset_layer("gpt2"), flag_layer(flags))
    assert without_effect(layered) == []
    untied = combine(flag_layer({"optimizer": "muon", "muon_lr": "0.1", "tie_weights": False, "head_lr_scale": "2"}))
    assert without_effect(untied) == []
