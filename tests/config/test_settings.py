"""Every setting takes every spelling of its values, through flags and TOML alike, and refuses the rest with words."""

import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_cli.config.layers import FLAG, Layer, combine, flag_layer
from nanogpt_cli.config.schema import SECTIONS, Config, DataSettings, ModelSettings, OptimSettings, settings
from nanogpt_cli.config.setting import Setting
from nanogpt_cli.errors import UserError

TEXTS = ["0", "1", "4", "1e-3", "0.5", "-1", "nan", "inf", "true", "false", "True", "yes", "no", "none", "abc", ""]


def combined(layer: Layer) -> Config | UserError:
    """The settings, or the error that refuses them."""
    try:
        return combine(layer).config
    except UserError as error:
        return error


def value(outcome: Config | UserError, name: str) -> Any:
    """One setting, or the message."""
    return str(outcome) if isinstance(outcome, UserError) else getattr(getattr(outcome, settings()[name].section), name)


def by_flag(name: str, text: Any) -> Any:
    """What a flag's text becomes, or the message that refuses it."""
    return value(combined(flag_layer({name: text})), name)


def by_toml(name: str, literal: str) -> Any:
    """The same for a TOML literal."""
    return value(combined(Layer("my.toml", tomllib.loads(f"[{settings()[name].section}]\n{name} = {literal}"))), name)


FLAGS = [
    # integers
    ("batch_size", "4", 4),
    ("batch_size", "1_0", 10),
    ("batch_size", "0", "--batch-size is 0: a whole number of at least 1 is needed."),
    ("batch_size", "1e-3", "--batch-size is '1e-3': a whole number of at least 1 is needed."),
    ("batch_size", "none", "--batch-size is 'none': a whole number of at least 1 is needed."),
    ("batch_size", "true", "--batch-size is 'true': a whole number of at least 1 is needed."),
    ("keep_every", "0", 0),
    ("seed", str(2**63 - 1), 2**63 - 1),
    ("seed", str(2**63), f"--seed is {2**63}: whole numbers up to {2**63 - 1:,} are possible."),
    # floats
    ("dropout", "0", 0.0),
    ("dropout", "1", "--dropout is 1.0: a number of at least 0 and below 1 is needed."),
    ("learning_rate", "1", 1.0),
    ("learning_rate", "1e-3", 1e-3),
    ("learning_rate", "nan", "--learning-rate is nan: a number above 0 is needed."),
    ("learning_rate", "-inf", "--learning-rate is -inf: a number above 0 is needed."),
    ("grad_clip", "0", 0.0),
    # optional numbers
    ("min_lr", "none", None),
    ("min_lr", "0", 0.0),
    ("vocab_size", "None", None),
    ("vocab_size", "65", 65),
    # words and numbers together
    ("peak_tflops", "auto", "auto"),
    ("peak_tflops", "989.5", 989.5),
    ("peak_tflops", "x", "--peak-tflops is 'x': auto or a number above 0 is needed."),
    # booleans arrive as such from Typer, and as words from elsewhere
    ("bias", True, True),
    ("bias", "no", False),
    ("bias", "0", False),
    ("bias", "maybe", "--bias is 'maybe': true or false is needed."),
    # words
    ("activation", "relu2", "relu2"),
    ("activation", "relu", "--activation is 'relu': allowed are gelu_tanh, gelu, relu2, swiglu."),
    ("compile", "on", "on"),
    ("compile", "true", "on"),
    ("compile", "0", "off"),
    ("compile", "1e-3", "--compile is '1e-3': allowed are auto, on, off."),
    # texts that look like something else
    ("dataset", "2024", "2024"),
    ("wandb_run_name", "True", "True"),
    ("wandb_run_name", "none", None),
    ("wandb_project", "1e-3", "1e-3"),
    ("dataset", "", "--dataset is '': a text (not empty, no control characters) is needed."),
    ("dataset", "a\0b", "--dataset is 'a\\x00b': a text (not empty, no control characters) is needed."),
    ("dataset", "\udce9", "--dataset is '\\udce9': a text (not empty, no control characters) is needed."),
    ("device", "cuda:1", "cuda:1"),
    ("device", "gpu", "--device is 'gpu': auto, cpu, cuda, cuda:N or mps is needed."),
]


@pytest.mark.parametrize(("name", "text", "expected"), FLAGS)
def test_flag_texts_are_read_by_the_declared_type(name: str, text: Any, expected: Any) -> None:
    found = by_flag(name, text)
    assert found == expected
    assert type(found) is type(expected)


TOML = [
    ("batch_size", "4", 4),
    ("batch_size", '"4"', "my.toml: [train] batch_size is '4': a whole number of at least 1 is needed."),
    ("batch_size", "4.0", "my.toml: [train] batch_size is 4.0: a whole number of at least 1 is needed."),
    ("batch_size", "true", "my.toml: [train] batch_size is True: a whole number of at least 1 is needed."),
    ("learning_rate", "1", 1.0),
    ("learning_rate", "1e-3", 1e-3),
    ("learning_rate", '"1e-3"', "my.toml: [optim] learning_rate is '1e-3': a number above 0 is needed."),
    ("learning_rate", "true", "my.toml: [optim] learning_rate is True: a number above 0 is needed."),
    ("learning_rate", "inf", "my.toml: [optim] learning_rate is inf: a number above 0 is needed."),
    ("dropout", "0", 0.0),
    ("bias", "false", False),
    ("bias", "0", "my.toml: [model] bias is 0: true or false is needed."),
    ("bias", '"yes"', "my.toml: [model] bias is 'yes': true or false is needed."),
    ("compile", "true", "on"),
    ("compile", '"off"', "off"),
    ("compile", "1", "my.toml: [system] compile is 1: allowed are auto, on, off."),
    ("peak_tflops", "312", 312.0),
    ("dataset", "2024", "my.toml: [data] dataset is 2024: a text (not empty, no control characters) is needed."),
    ("dataset", "1979-05-27", None),
    ("n_layer", "[1, 2]", "my.toml: [model] n_layer is [1, 2]: a whole number of at least 1 is needed."),
    ("n_layer", "{a = 1}", "my.toml: [model] n_layer is {'a': 1}: a whole number of at least 1 is needed."),
    (
        "seed",
        "0x" + "f" * 5000,
        "my.toml: [train] seed is a number of 20000 bits: whole numbers up to 9,223,372,036,854,775,807 are possible.",
    ),
    ("seed", "[0x" + "f" * 5000 + "]", None),
    ("learning_rate", "0x" + "f" * 5000, None),
]


@pytest.mark.parametrize(("name", "literal", "expected"), TOML)
def test_toml_values_must_have_the_declared_type(name: str, literal: str, expected: Any) -> None:
    found = by_toml(name, literal)
    if expected is None:  # refused, in whatever words
        assert isinstance(found, str)
        assert f"my.toml: [{settings()[name].section}] {name} is " in found
        return
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("known", settings().values(), ids=lambda known: known.name)
def test_every_setting_reads_or_refuses_every_text(known: Setting) -> None:
    for text in TEXTS:
        found, words = None, ""
        try:
            found = known.check(known.read(text))
        except ValueError as error:
            words = str(error)
        assert words or found is not None or known.optional
        assert not words or words.endswith("is needed") or words.startswith("allowed are")
        assert found is None or type(found) is known.kind or found in known.choices


@pytest.mark.parametrize(
    "known", [s for s in settings().values() if s.kind is not str or s.choices], ids=lambda known: known.name
)
def test_a_problem_is_listed_once(known: Setting) -> None:
    message = by_flag(known.name, "%%")
    assert message.count(known.flag) == 1
    assert "\n" not in message


def test_all_problems_are_listed_at_once_with_file_and_key() -> None:
    tables = {"train": {"learning_rat": 5.0, "batch_size": "4"}, "modle": {"n_layer": 3}, "learning_rate": 1e-3}
    with pytest.raises(UserError) as caught:
        combine(Layer("run.toml", tables), flag_layer({"dropout": "2"}))
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 problems in the settings:"
    assert "  run.toml: [train] learning_rat: unknown setting. Did you mean learning_rate?" in lines
    assert "  run.toml: [train] batch_size is '4': a whole number of at least 1 is needed." in lines
    assert any("[modle] is no section. Did you mean model?" in line for line in lines)
    assert any("learning_rate stands outside of any section: it belongs in [optim]." in line for line in lines)
    assert "  --dropout is 2.0: a number of at least 0 and below 1 is needed." in lines


def test_a_setting_in_the_wrong_section_is_told_its_place() -> None:
    with pytest.raises(
        UserError, match=r"a\.toml: \[train\] learning_rate: unknown setting\. It belongs in \[optim\]\."
    ):
        combine(Layer("a.toml", {"train": {"learning_rate": 1e-3}}))
    with pytest.raises(UserError, match=r"model must be a table"):
        combine(Layer("a.toml", {"model": 3}))


def test_contradictions_name_both_sides() -> None:
    cases = [
        ({"n_embd": "10", "n_head": "4"}, "n_embd = 10 is not divisible by n_head = 4"),
        ({"learning_rate": "3e-5", "min_lr": "6e-5"}, r"min_lr = 6e-05 is above learning_rate = 3e-05"),
        ({"lr_decay_iters": "500", "warmup_iters": "2000"}, "warmup_iters = 2000 leaves no update for the decay"),
        ({"init_from": "scratch"}, "leave it out"),
        ({"init_from": "resume"}, "type nanogpt resume RUN"),
        ({"position": "rotary", "n_embd": "12", "n_head": "4"}, "even head width"),
    ]
    for flags, message in cases:
        with pytest.raises(UserError, match=message):
            combine(flag_layer(flags))


def test_direct_construction_is_checked_too() -> None:
    assert OptimSettings(learning_rate=1).learning_rate == 1.0
    with pytest.raises(UserError, match="n_layer is 0: a whole number of at least 1 is needed"):
        ModelSettings(n_layer=0)
    with pytest.raises(UserError, match="n_head"):
        Config().replace("model", n_head=-1)


def test_names_are_unique_over_all_sections() -> None:
    assert sum(len(cls.__dataclass_fields__) for cls in SECTIONS.values()) == len(settings())


def test_defaults_fit_and_every_setting_explains_itself() -> None:
    for known in settings().values():
        assert known.check(known.default) == known.default
        assert known.text
        assert known.default is not None or known.derived or known.name == "init_from"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.times() | st.datetimes()
odd = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(
    section=st.sampled_from([*SECTIONS, "derived", "learning_rate", ""]),
    key=st.sampled_from([*settings(), "x"]),
    value=odd,
)
def test_odd_values_never_end_in_anything_but_a_message(section: str, key: str, value: Any) -> None:
    tables: dict[str, Any] = {section: {key: value}} if section in SECTIONS else {section: value}
    outcome = combined(Layer("odd.toml", tables))
    if isinstance(outcome, Config):  # whatever was taken can be written, read back, and is the same then
        written = tomllib.loads(tomli_w.dumps(outcome.to_toml()))
        assert combined(Layer("again.toml", written)) == outcome


@given(tables=st.dictionaries(st.text(max_size=8), odd, max_size=3))
def test_odd_tables_never_end_in_anything_but_a_message(tables: dict[str, Any]) -> None:
    outcome = combined(Layer("odd.toml", tables))
    assert isinstance(outcome, Config) or str(outcome)


def test_config_survives_toml_and_leaves_out_what_is_unset() -> None:
    config = combine(flag_layer({"min_lr": "none", "vocab_size": "65", "compile": "on"})).config
    table = config.to_toml()
    assert "min_lr" not in table["optim"]
    assert table["system"]["device"] == "auto"
    assert combine(Layer("config.toml", {**table, "derived": {"nonsense": 1}})).config == config


def test_defaults_are_small(  # 40 micro-batches by default once made toy runs twenty times slower
) -> None:
    config = Config()
    assert config.train.gradient_accumulation_steps == 1
    assert config.data == DataSettings(dataset="shakespeare_char")


def test_flag_origin_is_kept() -> None:
    layered = combine(Layer("a.toml", {"train": {"seed": 1}}), flag_layer({"n_layer": "2"}))
    assert {name: layer.origin for name, layer in layered.origins.items()} == {"seed": "a.toml", "n_layer": FLAG}
