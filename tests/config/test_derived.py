"""What follows from settings: the schedule and how rows are divided over ranks."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nanogpt_cli.config.derived import Schedule, derive, save_interval, schedule_of, split_rows
from nanogpt_cli.config.layers import combine, flag_layer
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import Config
from nanogpt_cli.errors import UserError


def config_with(**flags: object) -> Config:
    return combine(flag_layer({name: str(value) for name, value in flags.items()})).config


def nanogpt_rate(step: int, peak: float, floor: float, warmup: int, decay: int) -> float:
    """get_lr of nanoGPT's train.py, in its own words."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > decay:
        return floor
    coefficient = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (decay - warmup)))
    return floor + coefficient * (peak - floor)


@given(step=st.integers(0, 3000), warmup=st.integers(0, 500), decay=st.integers(501, 2500))
def test_cosine_is_nanogpts(step: int, warmup: int, decay: int) -> None:
    rate = Schedule("cosine", 6e-4, 6e-5, warmup, decay).factor(step) * 6e-4
    assert rate == pytest.approx(nanogpt_rate(step, 6e-4, 6e-5, warmup, decay), rel=1e-9)


schedules = st.builds(
    Schedule,
    shape=st.sampled_from(["cosine", "linear", "constant"]),
    learning_rate=st.floats(1e-3, 1e-2),
    min_lr=st.floats(0, 1e-3),
    warmup_iters=st.integers(0, 100),
    lr_decay_iters=st.integers(101, 1000),
)


@given(schedules)
def test_a_schedule_rises_from_above_zero_to_its_peak_and_then_never_rises(schedule: Schedule) -> None:
    factors = [schedule.factor(step) for step in range(schedule.lr_decay_iters + 2)]
    peak = schedule.warmup_iters
    assert factors[0] > 0  # the first update moves the weights
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak] == pytest.approx(1.0)
    assert all(a >= b - 1e-12 for a, b in zip(factors[peak:], factors[peak + 1 :], strict=False))
    end = 1.0 if schedule.shape == "constant" else schedule.min_lr / schedule.learning_rate
    assert factors[-1] == pytest.approx(end)


def test_defaults_follow_the_length_of_the_run() -> None:
    schedule = schedule_of(config_with(max_iters=500))
    assert (schedule.warmup_iters, schedule.lr_decay_iters) == (25, 500)
    assert schedule.min_lr == pytest.approx(1e-4)
    assert schedule_of(config_with(max_iters=10**6)).warmup_iters == 2000
    constant = schedule_of(config_with(schedule="constant"))
    assert (constant.warmup_iters, constant.factor(0), constant.factor(10**9)) == (0, 1.0, 1.0)
    assert schedule_of(config_with(schedule="constant", warmup_iters=5)).factor(0) < 1


def test_what_was_derived_stands_with_its_reason() -> None:
    table = derive(config_with(max_iters=500)).to_toml()
    assert table["warmup_iters"] == 25
    assert table["reasons"]["min_lr"] == "learning_rate / 10"
    assert derive(combine(preset_layer("gpt2")).config).values.keys() == {"save_interval"}
    assert save_interval(config_with(save_interval=7)) == 7


@given(batch=st.integers(1, 64), accumulation=st.integers(1, 48), ranks=st.integers(1, 64))
def test_rows_an_update_do_not_depend_on_the_ranks(batch: int, accumulation: int, ranks: int) -> None:
    rows = batch * accumulation
    assume(rows % ranks == 0)
    split = split_rows(config_with(batch_size=batch, gradient_accumulation_steps=accumulation), ranks)
    assert split.rows == rows
    assert split.micro_batch <= batch
    assert split.micro_batch * split.micro_steps == rows // ranks
    larger = range(split.micro_batch + 1, batch + 1)
    assert not any(rows // ranks % n == 0 for n in larger)  # the largest that fits


def test_gpt2_on_16_gpus_takes_ten_rows_three_times() -> None:
    split = split_rows(combine(preset_layer("gpt2")).config, 16)
    assert (split.micro_batch, split.micro_steps, split.rows) == (10, 3, 480)
    assert split.sum == "10 rows x 3 micro-steps x 16 ranks"


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, "12 rows x 1 micro-steps x 1 ranks"), (2, "6 rows x 1 micro-steps x 2 ranks")]
)
def test_the_default_run_takes_one_micro_step(ranks: int, words: str) -> None:
    assert split_rows(Config(), ranks).sum == words


def test_ranks_that_do_not_divide_the_rows_are_told_what_would() -> None:
    with pytest.raises(UserError, match=r"12 rows an update .* over 5 ranks. Use 1, 2, 3, 4, 6 ranks"):
        split_rows(Config(), 5)
