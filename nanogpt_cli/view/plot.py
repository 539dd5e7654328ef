"""Curves of one or more runs as a picture: losses, learning rate and speed (extra: plot).

Readable in black and white and for colour-blind people: Okabe and Ito's colours, each with its own dashes and marker.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import atomic_write
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.metrics import read_metrics

Axis = Literal["steps", "tokens", "time"]
Curves = defaultdict[str, list[tuple[int, float]]]  # of one run, by name: (step, value) pairs in order
FORMATS = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dvx+P*"
MOST_POINTS = 2000
_KEYS = {"steps": "step", "tokens": "tokens", "time": "time_s"}


def read_curves(run: RunDirectory) -> Curves:
    """All numbers of metrics.jsonl, each key its own curve. An evaluation's train_loss is not the steps' loss."""
    curves: Curves = defaultdict(list)
    for line in read_metrics(run.metrics):
        for key, value in line.items():
            if isinstance(value, int | float):
                curves[key].append((line["step"], float(value)))
    return curves


def draw(runs: Sequence[RunDirectory], out: Path, axis: Axis = "steps") -> None:
    """Write the curves of `runs` to `out`, a PNG or SVG file by its suffix, whole or not at all.

    Raises:
        UserError: matplotlib is missing, the suffix is another, or a run has no metrics yet.
    """
    if out.suffix.lower() not in FORMATS:
        raise UserError(f"{out}: pictures are written as .png or .svg. Type --out {typed(out.stem or 'curves')}.png")
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"{out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("plot needs matplotlib. Install it with: pip install 'nanogpt-cli[plot]'") from None
    curves = [read_curves(run) for run in runs]
    for run, one in zip(runs, curves, strict=True):
        if not one["loss"] and not one["val_loss"]:
            raise UserError(f"{run.path}: nothing to draw yet: {run.metrics} holds no losses.")
    form = out.suffix.lower()[1:]
    metadata = {"Date": None} if form == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "nanogpt", "font.size": 10}):  # the same curves, the same bytes
        figure = Figure(figsize=(7, 7.5), layout="constrained")
        _fill(figure, [run.name for run in runs], curves, axis)
        atomic_write(out, lambda file: figure.savefig(file, format=form, dpi=150, metadata=metadata))


def _fill(figure: Any, names: Sequence[str], curves: Sequence[Curves], axis: Axis) -> None:
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(5, 2, 2))
    for number, (name, one) in enumerate(zip(names, curves, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        dashes, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
        label = f"{name}: " if len(curves) > 1 else ""
        style = {"color": colour, "linestyle": dashes}
        loss.plot(*_xy(one, "loss", axis), **style, linewidth=1, alpha=0.55, label=f"{label}train")
        val = _xy(one, "val_loss", axis)
        every = max(1, len(val[0]) // 12)
        loss.plot(*val, **style, linewidth=2, marker=marker, markevery=every, markersize=5, label=f"{label}val")
        rate.plot(*_xy(one, "lr", axis), **style, linewidth=1.5)
        speed.plot(*_xy(one, "tokens_per_s", axis), **style, linewidth=1)
    loss.set(ylabel="loss (nats a token)", ylim=_limits(curves))
    rate.set(ylabel="learning rate")
    speed.set(ylabel="tokens/s", ylim=(0, None), xlabel={"time": "training time", "steps": "updates"}.get(axis, axis))
    loss.legend(frameon=False, fontsize=9)
    for part in (loss, rate, speed):
        part.grid(visible=True, alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    _name_units(rate, speed, axis)


def _xy(curves: Curves, key: str, axis: Axis) -> tuple[list[float], list[float]]:
    """The curve over the axis. Evaluations carry only their step: their place is looked up between log steps."""
    import numpy as np

    group = -(-len(curves[key]) // MOST_POINTS) or 1  # a picture shows no more: neighbours are averaged
    points = [np.mean(curves[key][at : at + group], axis=0) for at in range(0, len(curves[key]), group)]
    steps, values = [float(step) for step, _ in points], [float(value) for _, value in points]
    if axis == "steps":
        return steps, values
    known = [(0.0, 0.0), *curves[_KEYS[axis]]]
    return list(np.interp(steps, [step for step, _ in known], [place for _, place in known])), values


def _limits(curves: Sequence[Curves]) -> tuple[float, float]:
    """From just below the lowest loss up to ln(vocab)'s surroundings: spikes beyond the first loss are cut off."""
    starts = [one[key][0][1] for one in curves for key in ("loss", "val_loss") if one[key]]
    values = [value for one in curves for key in ("loss", "val_loss") for _, value in one[key]]
    low, high = min(values), max(starts)
    room = 0.05 * max(high - low, 0.1)
    return low - room, high + room


def _name_units(rate: Any, speed: Any, axis: Axis) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    if axis == "tokens":
        speed.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axis == "time":
        longest = speed.get_xlim()[1]
        size, unit = next((s, u) for s, u in ((3600, "h"), (60, "min"), (1, "s")) if longest > 3 * s or s == 1)
        speed.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / size:g}"))
        speed.set_xlabel(f"training time ({unit})")
