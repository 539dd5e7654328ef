"""The curves of runs as numbers, for whatever draws them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.facts import common_unit, run_facts
from nanogpt_cli.runs.metrics import read_metrics

Axis = Literal["steps", "tokens", "time"]
Curves = defaultdict[str, list[tuple[int, float]]]  # of one run, by name: (step, value) pairs in order
MOST_POINTS = 2000  # of a curve: a picture shows no more
_KEYS = {"steps": "step", "tokens": "tokens", "time": "time_s"}


def read_curves(run: RunDirectory) -> Curves:
    """All numbers of metrics.jsonl, each key its own curve. An evaluation's train_loss is not the steps' loss."""
    curves: Curves = defaultdict(list)
    for line in read_metrics(run.metrics):
        for key, value in line.items():
            if isinstance(value, int | float):
                curves[key].append((line["step"], float(value)))
    return curves


def comparable_curves(runs: Sequence[RunDirectory]) -> tuple[list[Curves], str]:
    """The curves of each run, losses in a unit in which they compare, and the unit; UserError if a run has none."""
    unit, factors = common_unit([run_facts(run) for run in runs])
    found = [read_curves(run) for run in runs]
    for run, curves, factor in zip(runs, found, factors, strict=True):
        if not curves["loss"] and not curves["val_loss"]:
            raise UserError(f"{run.path}: nothing to draw yet: {run.metrics} holds no losses.")
        for key in ("loss", "val_loss"):
            curves[key] = [(step, loss * factor) for step, loss in curves[key]]
    return found, unit


def xy(curves: Curves, key: str, axis: Axis) -> tuple[list[float], list[float]]:
    """One curve over the axis. Evaluations carry only their step: their place is looked up between log steps."""
    import numpy as np

    group = -(-len(curves[key]) // MOST_POINTS) or 1
    points = [np.mean(curves[key][at : at + group], axis=0) for at in range(0, len(curves[key]), group)]
    steps, values = [float(step) for step, _ in points], [float(value) for _, value in points]
    if axis == "steps":
        return steps, values
    known = [(0.0, 0.0), *curves[_KEYS[axis]]]
    return list(np.interp(steps, [step for step, _ in known], [place for _, place in known])), values


def loss_limits(curves: Sequence[Sequence[float]]) -> tuple[float, float]:
    """From just below the lowest loss up to ln(vocab)'s surroundings: spikes beyond the first loss are cut off."""
    low, high = min(map(min, curves)), max(losses[0] for losses in curves)
    room = 0.05 * max(high - low, 0.1)
    return low - room, high + room


def time_unit(seconds: float) -> tuple[int, str]:
    """The unit in which a time of this length reads well, in seconds and by name."""
    return next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (1, "s")) if seconds > 3 * size or size == 1)
