"""What docs/programs.md promises to programs is what they get."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.cli.main import run as nanogpt
from nanogpt_cli.errors import NanogptError, NonFiniteError, StoppedError, UserError
from tests.runner import Runner

PAGE = (Path(__file__).parents[1] / "docs" / "programs.md").read_text(encoding="utf-8")


def keys(heading: str) -> set[str]:
    """The first column of the table under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", section.split("\n# ", 1)[0], flags=re.MULTILINE))


def given(document: Any) -> set[str]:
    """The keys of a document, and those of the objects in its lists."""
    rows = document if isinstance(document, list) else [document]
    inner = {f"{key}[].{name}" for row in rows for key in row for one in _objects(row[key]) for name in one}
    return set().union(*rows) | inner


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def test_exit_codes_stand_there() -> None:
    codes = {0, NanogptError.exit_code, UserError.exit_code, NonFiniteError.exit_code}
    codes |= {StoppedError("", signum).exit_code for signum in (2, 15)}
    listed = PAGE.split("## Exit codes", 1)[1].split("\n## ", 1)[0]
    found = {int(n) for row in re.findall(r"^\| ([\d, ]+) \|", listed, flags=re.MULTILINE) for n in row.split(",")}
    assert found == codes


def test_the_keys_of_metrics_are_those_listed(runs: Runner) -> None:
    runs.train("a", max_iters=8, eval_interval=4)
    steps = [line for line in runs.lines("a") if "loss" in line]
    evaluations = [line for line in runs.lines("a") if "val_loss" in line]
    assert set().union(*steps) == keys("logs/metrics.jsonl")
    assert evaluations
    for line in evaluations:
        assert all(f"`{key}`" in PAGE.split("At every evaluation", 1)[1] for key in line)


def test_the_keys_of_samples_are_those_listed(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanogpt_cli.training.validation.SHARE", 1e6)  # time for every sample
    runs.train("a", max_iters=8, eval_interval=4)
    lines = (runs.root / "a" / "logs" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines
    assert {frozenset(json.loads(line)) for line in lines} == {frozenset(keys("logs/samples.jsonl"))}


DOCUMENTS = {
    "nanogpt train --json": "train --dataset v.txt --run runs/c SHORT",
    "nanogpt train --dry-run --json": "train --dataset v.txt --dry-run SHORT",
    "nanogpt eval --json": "eval a",
    "nanogpt sample --json": "sample a --max-new-tokens 3 --num-samples 2",
    "nanogpt runs --json": "runs",
    "nanogpt runs A B --json": "runs a b",
    "nanogpt plot --json": "plot a b",
    "nanogpt watch --save x.html --json": "watch a --save x.html",
    "nanogpt export --json": "export a hf",
    "nanogpt presets --json": "presets",
    "nanogpt prepare --json": "prepare v.txt --name w",
    "nanogpt mfu --json": "mfu a --peak-tflops 1",
}
SHORT = "--max-iters=2 --eval-interval=2 --eval-iters=1 --n-embd=16 --n-layer=1 --block-size=16 --peak-tflops=1"


def test_the_keys_of_every_document_are_those_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "plotly", "safetensors"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("v.txt").write_text("so much depends upon a red wheel barrow\n" * 60, encoding="utf-8")
    for name in ("a", "b"):
        assert nanogpt(f"train --dataset v.txt --run runs/{name} {SHORT} -q".split()) == 0
    assert set(re.findall(r"^## (nanogpt .*)$", PAGE, flags=re.MULTILINE)) == set(DOCUMENTS)
    capsys.readouterr()
    for heading, line in DOCUMENTS.items():
        assert nanogpt([*line.replace("SHORT", SHORT).split(), "--json", "-q"]) == 0, heading
        shown = capsys.readouterr()
        assert given(json.loads(shown.out)) == keys(heading), heading
        assert shown.err == "", heading
