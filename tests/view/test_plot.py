"""Pictures of runs: the right numbers, distinguishable without colour, whole or absent."""

import gc
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.directory import RunDirectory, create_run
from nanogpt_cli.runs.metrics import MetricsLog
from nanogpt_cli.view import curves, plot
from nanogpt_cli.view.curves import read_curves
from nanogpt_cli.view.plot import draw
from tests.view.made import make_run


def make(path: Path, count: int = 40, start: float = 4.2) -> RunDirectory:
    run = create_run(path, config={}, tokenizer=None, environment={})
    log = MetricsLog(run.metrics)
    log.append({"step": 0, "val_loss": start, "train_loss": start})
    for step in range(1, count + 1):
        loss = 1.5 + 2.7 / step
        log.append(
            {"step": step, "loss": loss, "lr": 1e-3, "tokens_per_s": 2e4, "tokens": step * 768, "time_s": step * 0.5}
        )
        if step % 10 == 0:
            log.append({"step": step, "val_loss": loss + 0.1, "train_loss": loss})
    log.close()
    return run


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that `draw` fills."""
    pytest.importorskip("matplotlib")
    filled: list[Any] = []
    fill = plot._fill

    def keep(figure: Any, *rest: Any) -> None:
        fill(figure, *rest)
        filled.append(figure)

    monkeypatch.setattr(plot, "_fill", keep)
    return filled


def test_a_png_and_an_svg_are_written_and_nothing_beside_them(tmp_path: Path, figures: list[Any]) -> None:
    run = make(tmp_path / "x")
    folder = tmp_path / "out"
    folder.mkdir()
    draw([run], folder / "a.PNG")
    draw([run], folder / "a.svg")
    assert (folder / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(folder / "a.svg").getroot().tag.endswith("svg")
    assert len(list(folder.iterdir())) == 2


def test_the_same_curves_are_the_same_bytes(tmp_path: Path, figures: list[Any]) -> None:
    run = make(tmp_path / "x")
    for suffix in ("svg", "png"):
        for name in ("a", "b"):
            draw([run], tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


@pytest.mark.parametrize(("axis", "place"), [("steps", 20.0), ("tokens", 20 * 768.0), ("time", 10.0)])
def test_evaluations_stand_where_their_step_was(tmp_path: Path, figures: list[Any], axis: Any, place: float) -> None:
    draw([make(tmp_path / "x")], tmp_path / "a.svg", axis)
    train, val = figures[0].axes[0].lines
    assert list(val.get_xdata())[::2] == [0.0, place, 2 * place]
    assert list(val.get_ydata())[2] == pytest.approx(1.5 + 2.7 / 20 + 0.1)
    assert list(train.get_xdata())[19] == place
    assert list(train.get_ydata())[19] == pytest.approx(1.5 + 2.7 / 20), "the steps' loss, not the evaluation's"


def test_runs_differ_in_colour_dashes_and_marker(tmp_path: Path, figures: list[Any]) -> None:
    runs = [make(tmp_path / f"run{number}") for number in range(5)]
    draw(runs, tmp_path / "a.svg")
    vals = figures[0].axes[0].lines[1::2]
    assert [line.get_label() for line in vals] == [f"run{number}: val" for number in range(5)]
    for of in ("get_color", "get_marker", "get_linestyle"):
        found = [str(getattr(line, of)()) for line in vals]
        assert len(set(found)) >= 4, of
    looks = {(str(line._dash_pattern), line.get_marker()) for line in vals}
    assert len(looks) == 5, "told apart in black and white too"


def test_a_spike_does_not_flatten_the_picture(tmp_path: Path, figures: list[Any]) -> None:
    run = make(tmp_path / "x")
    log = MetricsLog(run.metrics)
    log.append({"step": 41, "loss": 5000.0})
    log.close()
    draw([run], tmp_path / "a.svg")
    low, high = figures[0].axes[0].get_ylim()
    assert low < 1.6
    assert high < 5


def test_a_long_run_stays_a_small_file(tmp_path: Path, figures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_POINTS", 10)
    draw([make(tmp_path / "x", count=95)], tmp_path / "a.svg")
    train = figures[0].axes[0].lines[0]
    assert len(train.get_xdata()) == 10
    assert float(train.get_xdata()[0]) == 5.5, "neighbours are averaged"


def test_runs_without_evaluations_or_with_nothing_else(tmp_path: Path, figures: list[Any]) -> None:
    run = create_run(tmp_path / "x", config={}, tokenizer=None, environment={})
    with pytest.raises(UserError, match="nothing to draw yet"):
        draw([run], tmp_path / "a.svg")
    log = MetricsLog(run.metrics)
    log.append({"step": 1, "val_loss": 2.0, "train_loss": 2.0})
    log.close()
    for axis in ("steps", "tokens", "time"):
        draw([run], tmp_path / "a.svg", axis)  # type: ignore[arg-type]
    assert not read_curves(run)["loss"]


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.jpeg"])
def test_other_formats_are_answered_with_what_to_type(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.png or \.svg\. Type --out a\.png"):
        draw([make(tmp_path / "x")], tmp_path / name)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    run = make(tmp_path / "x")
    with pytest.raises(UserError, match="there is no folder"):
        draw([run], tmp_path / "gone" / "a.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        draw([run], tmp_path / "b.png")


def test_without_matplotlib_the_message_has_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        draw([make(tmp_path / "x")], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["実験", "_hidden", "$\\frac{$", "a\x1b[2J"])
def test_every_name_is_drawn_quietly(
    tmp_path: Path, figures: list[Any], name: str, recwarn: pytest.WarningsRecorder
) -> None:
    gc.collect()  # what other tests left open warns now, and not while this one listens
    recwarn.clear()
    gc.disable()
    try:
        draw([make(tmp_path / name), make(tmp_path / "other")], tmp_path / "a.png")
    finally:
        gc.enable()
    assert len(recwarn) == 0
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert len(labels) == 4


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path: Path, figures: list[Any]) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", bytes_per_token=4.0, tokenizer={"kind": "gpt2"})]
    draw(runs, tmp_path / "a.svg")
    loss = figures[0].axes[0]
    assert loss.get_ylabel() == "loss (bits per byte)"
    a, b = (line.get_ydata()[-1] for line in loss.lines[1::2])
    assert a == pytest.approx(4 * b)


def test_a_home_that_cannot_be_written_to_is_no_news(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "x")
    words = "from nanogpt_cli.view.plot import draw, RunDirectory, Path"
    code = f"{words}\ndraw([RunDirectory(Path({str(run.path)!r}))], Path('a.svg'))"
    nowhere = tmp_path / "file"
    nowhere.touch()
    environment = {**os.environ, "HOME": str(nowhere), "MPLCONFIGDIR": str(nowhere / "x")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert (tmp_path / "a.svg").exists()
