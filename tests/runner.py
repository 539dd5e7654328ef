"""Running the library on tiny runs, in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.layers import Layer, combine, flag_layer
from nanogpt_cli.training.plan import Plan, plan_run
from nanogpt_cli.training.resume import ResumeRequest
from nanogpt_cli.training.start import Outcome, start
from nanogpt_cli.view.plain import View


class Remembering(View):
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.reports: list[Any] = []
        self.evaluations: list[Any] = []

    def step(self, report: Any) -> None:
        self.reports.append(report)

    def evaluated(self, report: Any) -> None:
        self.evaluations.append(report)

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)


class Runner:
    """Starts and continues tiny runs in this process."""

    def __init__(self, root: Path, settings: Callable[..., dict[str, Any]]) -> None:
        self.root, self.settings = root, settings
        self.view = Remembering()

    def plan(self, name: str, **changes: Any) -> Plan:
        flags = {key: str(value) for key, value in self.settings(**changes).items() if value is not None}
        return plan_run(combine(flag_layer(flags)), self.root / name)

    def train(self, name: str, **changes: Any) -> Outcome:
        return start(self.plan(name, **changes), view=self.view)

    def resume(self, name: str, *, checkpoint: Path | None = None, new: str | None = None, **changes: Any) -> Outcome:
        layer: Layer = flag_layer({key: str(value) for key, value in changes.items()})
        new_run = self.root / new if new else None
        return start(ResumeRequest(str(self.root / name), layer, checkpoint, new_run).plan(), view=self.view)

    def plan_warnings(self, name: str, **changes: Any) -> tuple[str, ...]:
        layer = flag_layer({key: str(value) for key, value in changes.items()})
        return ResumeRequest(str(self.root / name), layer).plan().warnings

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.root / name / "logs" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines(name) if "loss" in line}


def same_weights(a: Path, b: Path) -> bool:
    """Whether two checkpoints hold bit-identical weights and moments."""
    x, y = (torch.load(path, weights_only=True) for path in (a, b))

    def equal(p: Any, q: Any) -> bool:
        if isinstance(p, torch.Tensor):
            return torch.equal(p, q)
        if isinstance(p, dict):
            return p.keys() == q.keys() and all(equal(p[key], q[key]) for key in p)
        return bool(p == q)

    return equal(x["model"], y["model"]) and equal(x["optimizer"], y["optimizer"])
