"""What docs/programs.md promises to programs is what they get."""

import re
from pathlib import Path

from nanogpt_cli.errors import NanogptError, NonFiniteError, StoppedError, UserError
from tests.runner import Runner

PAGE = (Path(__file__).parents[1] / "docs" / "programs.md").read_text(encoding="utf-8")


def keys(heading: str) -> set[str]:
    """The first column of the table under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([a-z_]+)` \|", section, flags=re.MULTILINE))


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
