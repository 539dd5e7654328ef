"""Every spelling people bring along ends as the one that Typer understands, and values stay as they are."""

from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_cli.cli.parsing import Flags, normalise
from nanogpt_cli.errors import UserError

app = typer.Typer(add_completion=False)


@app.command()
def train(
    bias: bool = True,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    compile: Annotated[str, typer.Option(metavar="auto|on|off")] = "auto",
    learning_rate: str = "",
    prompt: str = "",
    run: str = "",
) -> None: ...


FLAGS = Flags.of(typer.Context(typer.main.get_command(app), info_name="nanogpt train"))

SPELLINGS = [
    (["--learning_rate=1e-3"], ["--learning-rate=1e-3"]),
    (["--learning_rate", "1e-3"], ["--learning-rate=1e-3"]),
    (["--learning-rate", "-1"], ["--learning-rate=-1"]),
    (["--bias"], ["--bias"]),
    (["--no_bias"], ["--no-bias"]),
    (["--bias=true"], ["--bias"]),
    (["--bias=True"], ["--bias"]),
    (["--bias=yes"], ["--bias"]),
    (["--bias=1"], ["--bias"]),
    (["--bias=false"], ["--no-bias"]),
    (["--bias=no"], ["--no-bias"]),
    (["--bias=0"], ["--no-bias"]),
    (["--no-bias=false"], ["--bias"]),
    (["--dry_run=True"], ["--dry-run"]),
    (["--dry-run=false"], []),
    (["--compile"], ["--compile=on"]),
    (["--compile", "--bias"], ["--compile=on", "--bias"]),
    (["--compile", "extra"], ["--compile=on", "extra"]),
    (["--compile", "auto"], ["--compile=auto"]),
    (["--compile", "off"], ["--compile=off"]),
    (["--compile=false"], ["--compile=false"]),
    (["--no-compile"], ["--compile=off"]),
    (["--no_compile", "x"], ["--compile=off", "x"]),
    # values are never touched
    (["--prompt", "a_b --learning_rate=3"], ["--prompt=a_b --learning_rate=3"]),
    (["--prompt", "--not_a_flag"], ["--prompt=--not_a_flag"]),
    (["--prompt=--bias=false"], ["--prompt=--bias=false"]),
    (["--prompt", ""], ["--prompt="]),
    (["--prompt", "-"], ["--prompt=-"]),
    (["--prompt", "--"], ["--prompt=--"]),
    (["my_run", "-x"], ["my_run", "-x"]),
    (["--", "--learning_rate", "x_y"], ["--", "--learning_rate", "x_y"]),
    (["-h"], ["--help"]),
    (["--prompt", "-h"], ["--prompt=-h"]),
]


@pytest.mark.parametrize(("typed", "expected"), SPELLINGS, ids=lambda words: " ".join(words))
def test_spellings(typed: list[str], expected: list[str]) -> None:
    assert normalise(typed, FLAGS) == expected


REFUSED = [
    (["--learning-rat=1"], "there is no --learning-rat. Did you mean --learning-rate? nanogpt train --help"),
    (["--out_dir=x"], "there is no --out-dir. A run's folder is --run DIR for train"),
    (["--eval_only"], "Type nanogpt eval RUN."),
    (["--bias=maybe"], "--bias is 'maybe': true or false is needed."),
    (["--no-compile=3"], "--no-compile takes no value."),
    (["--run"], "--run needs a value; nothing follows. Type --run=VALUE."),
    (["--run", ""], "--run needs a value; '' is none. Is a variable of your shell unset?"),
    (["--run="], "--run needs a value; '' is none."),
    ([""], "'' is an empty word. Is a variable of your shell unset?"),
    (["--run", "--dry_run"], "--run needs a value; --dry_run follows."),
    (["--run", "--learning_rate=3"], "--run needs a value; --learning_rate=3 follows."),
]


@pytest.mark.parametrize(("typed", "message"), REFUSED, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_refused_lines_say_what_to_type(typed: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        normalise(typed, FLAGS)
    assert str(caught.value).startswith("nanogpt train: ")
    assert message in str(caught.value)


word = st.text(alphabet="abc_-=1 ", max_size=6)


@given(st.lists(st.sampled_from(["--bias", "--compile", "--prompt", "--run", "--dry_run", "--", "--x"]) | word))
def test_a_normalised_line_stays_as_it_is(typed: list[str]) -> None:
    try:
        once = normalise(typed, FLAGS)
    except UserError:
        return
    assert normalise(once, FLAGS) == once


@given(value=st.text())
def test_any_value_arrives_unchanged(value: str) -> None:
    assert normalise([f"--prompt={value}"], FLAGS) == [f"--prompt={value}"]
    if value.partition("=")[0].replace("_", "-") not in FLAGS.options:
        assert normalise(["--prompt", value], FLAGS) == [f"--prompt={value}"]
