"""Losses in the terminal: the right places, runs told apart without colour, narrow and ASCII terminals."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.directory import create_run
from nanogpt_cli.view.chart import ROWS, Chart
from tests.view.made import make_run


def drawn(chart: Chart, width: int = 80, encoding: str = "utf-8") -> list[str]:
    """The lines that a terminal of this width and encoding gets."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, color_system=None, highlight=False, markup=False).print(chart)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


def test_a_falling_loss_falls_from_the_first_row_to_the_last(tmp_path: Path) -> None:
    title, *lines = drawn(Chart([make_run(tmp_path / "x", count=200)], "steps"))
    assert title == "loss (nats a token)"
    filled = [row for row in range(ROWS) if any(0x2800 < ord(mark) < 0x2900 for mark in lines[row])]
    assert filled[0] == 0
    assert filled[-1] == ROWS - 1
    assert lines[ROWS - 1].endswith(" 1")
    assert lines[ROWS].split() == ["10", "200", "updates"]
    assert lines[ROWS + 1].strip() == "1 x: val 1.6135, lowest 1.6135"


def test_runs_are_numbered_and_different_tokenizers_meet_in_bits_per_byte(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", bytes_per_token=4.0, tokenizer={"kind": "gpt2"})]
    title, *lines = drawn(Chart(runs, "tokens"))
    assert title == "loss (bits per byte)"
    assert lines[ROWS].split()[-2:] == ["30.7k", "tokens"]
    a, b = (float(line.split()[-1]) for line in lines[ROWS + 1 :])
    assert a == pytest.approx(4 * b, rel=1e-3)
    ends = [line.rstrip()[-1] for line in lines[:ROWS] if line.rstrip().endswith((" 1", " 2"))]
    assert ends == ["1", "2"]


def test_where_bytes_a_token_are_unknown_the_unit_says_that_losses_do_not_compare(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config={}, tokenizer={"kind": "gpt2"})]
    assert "do not compare" in drawn(Chart(runs, "steps"))[0]


@pytest.mark.parametrize("width", [20, 60, 400])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_every_terminal(tmp_path: Path, width: int, encoding: str) -> None:
    lines = drawn(Chart([make_run(tmp_path / "x")], "time"), width, encoding)
    assert max(map(len, lines[: ROWS + 1])) <= max(width, 21)
    assert any("*" in line for line in lines) == (encoding == "ascii")


def test_one_point_and_none(tmp_path: Path) -> None:
    assert drawn(Chart([make_run(tmp_path / "x", count=1)], "time"))
    with pytest.raises(UserError, match="nothing to draw yet"):
        Chart([create_run(tmp_path / "y", config={}, tokenizer=None, environment={})], "steps")


def test_a_name_cannot_command_the_terminal(tmp_path: Path) -> None:
    text = "\n".join(drawn(Chart([make_run(tmp_path / "a\x1b[2J")], "steps")))
    assert "\x1b" not in text
    assert "a\\x1b[2J" in text
