"""Curves of one or more runs as a picture: losses, learning rate and speed. It needs matplotlib.

Readable in black and white and for colour-blind people: Okabe and Ito's colours, each with its own dashes and marker.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_cli.errors import UserError, package, typed
from nanogpt_cli.files import atomic_write
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.terminal import escaped
from nanogpt_cli.view.curves import Axis, Curves, comparable_curves, loss_limits, time_unit, xy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dvx+P*"
FONTS = ("Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic")


def draw(runs: Sequence[RunDirectory], out: Path, axis: Axis = "steps") -> None:
    """Write the curves of `runs` to `out`, a PNG or SVG file by its suffix, whole or not at all.

    Raises:
        UserError: matplotlib is missing, the suffix is another, or a run has no metrics yet.
    """
    if out.suffix.lower() not in FORMATS:
        raise UserError(f"{out}: pictures are written as .png or .svg. Type --out {typed(out.stem or 'curves')}.png")
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"{out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}.")
    form = out.suffix.lower()[1:]
    metadata = {"Date": None} if form == "svg" else {}
    drawn = figure(runs, axis)
    with _quiet_matplotlib():
        atomic_write(out, lambda file: drawn.savefig(file, format=form, dpi=150, metadata=metadata))


def figure(runs: Sequence[RunDirectory], axis: Axis = "steps") -> "Figure":
    """A matplotlib Figure of the curves, which notebooks show; UserError as for `draw`."""
    curves, unit = comparable_curves(runs)
    with _quiet_matplotlib():
        from matplotlib.figure import Figure

        class Picture(Figure):
            def _repr_png_(self) -> bytes:  # without pyplot nothing has told IPython how to show a Figure
                with _quiet_matplotlib():
                    self.savefig(file := io.BytesIO(), format="png", dpi=100)
                return file.getvalue()

        made = Picture(figsize=(7, 7.5), layout="constrained")
        _fill(made, [_label(run.name) for run in runs], curves, axis, unit)
    return made


@contextlib.contextmanager
def _quiet_matplotlib() -> Iterator[None]:
    """Our style, and no words of the library about a home it cannot write to or characters that no font here has."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        matplotlib = package("matplotlib", "A picture")
        style = {"svg.hashsalt": "nanogpt", "font.size": 10, "font.family": _fonts()}  # the same curves, the same bytes
        with warnings.catch_warnings(), matplotlib.rc_context(style):
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            yield
    finally:
        logger.setLevel(level)


def _fonts() -> list[str]:
    """Matplotlib's own font, and for what it lacks those of the world's other scripts that are here."""
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in FONTS if name in there)]


def _label(name: str) -> str:
    """A name as text: $ would begin a formula, and a legend leaves out what begins with _."""
    plain = escaped(name).replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain


def _fill(figure: Any, names: Sequence[str], curves: Sequence[Curves], axis: Axis, unit: str) -> None:
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(5, 2, 2))
    for number, (name, one) in enumerate(zip(names, curves, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        dashes, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
        label = f"{name}: " if len(curves) > 1 else ""
        style = {"color": colour, "linestyle": dashes}
        loss.plot(*xy(one, "loss", axis), **style, linewidth=1, alpha=0.55, label=f"{label}train")
        val = xy(one, "val_loss", axis)
        every = max(1, len(val[0]) // 12)
        loss.plot(*val, **style, linewidth=2, marker=marker, markevery=every, markersize=5, label=f"{label}val")
        rate.plot(*xy(one, "lr", axis), **style, linewidth=1.5)
        speed.plot(*xy(one, "tokens_per_s", axis), **style, linewidth=1)
    losses = [[loss for _, loss in one[key]] for one in curves for key in ("loss", "val_loss") if one[key]]
    loss.set(ylabel=f"loss ({unit})", ylim=loss_limits(losses))
    rate.set(ylabel="learning rate")
    speed.set(ylabel="tokens/s", ylim=(0, None), xlabel={"time": "training time", "steps": "updates"}.get(axis, axis))
    loss.legend(frameon=False, fontsize=9)
    for part in (loss, rate, speed):
        part.grid(visible=True, alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    _name_units(rate, speed, axis)


def _name_units(rate: Any, speed: Any, axis: Axis) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    if axis == "tokens":
        speed.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axis == "time":
        longest = speed.get_xlim()[1]
        size, unit = time_unit(longest)
        speed.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / size:g}"))
        speed.set_xlabel(f"training time ({unit})")
