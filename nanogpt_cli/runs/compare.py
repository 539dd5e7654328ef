"""Runs side by side: the settings that differ, and means over those that differ in nothing but their seed."""

import statistics
from collections.abc import Sequence
from typing import Any

from nanogpt_cli.config.schema import settings
from nanogpt_cli.runs.directory import RunDirectory, status
from nanogpt_cli.runs.facts import run_facts, tables, texts
from nanogpt_cli.runs.metrics import last_lines, parse_lines

ABSENT = "-"  # a setting that a run has not


def compare(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """A row for all runs that differ only in seed and [log]: lists where they have their own values, else means.

    Losses have the sample standard deviation beside them, None (unknown) with fewer than two seeds. `settings` are
    those in which the rows differ, without what merely follows from others; `tokens_per_s` is all tokens over
    `time_s`, the seconds inside steps. None is unknown.
    """
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in {run.path.resolve(): run for run in runs}.values():
        facts, state, config = run_facts(run), status(run), texts(tables(run.config))
        named = {
            name: config.get(f"{known.section}.{name}", ABSENT)
            for name, known in settings().items()
            if known.section != "log"
        }
        named["tokenizer"] = facts.tokenizer or ABSENT
        seed = named.pop("seed")
        whole = int(seed) if seed.isdecimal() else None
        timed = [line for line in parse_lines(last_lines(run.metrics)) if line.get("time_s") and "tokens" in line]
        tokens, seconds = (timed[-1]["tokens"], timed[-1]["time_s"]) if timed else (None, None)
        found = {
            "run": run.name,
            "path": str(run.path),
            "seed": whole,
            "state": state.state,
            "step": state.step,
            "best_val_loss": state.best_val_loss,
            "bits_per_byte": facts.bits_per_byte(state.best_val_loss),
            "time_s": seconds,
            "tokens_per_s": tokens / seconds if tokens and seconds else None,
            "settings": named,
            "tokenizer_id": facts.tokenizer_id,
        }
        alike.setdefault((facts.tokenizer_id, *named.values()), []).append(found)
    groups = list(alike.values())
    differ = [name for name in groups[0][0]["settings"] if len({group[0]["settings"][name] for group in groups}) > 1]
    return [_row(group, differ) for group in groups]


def _row(group: list[dict[str, Any]], differ: list[str]) -> dict[str, Any]:
    def mean(key: str) -> float | None:
        values = [one[key] for one in group]
        return None if None in values else statistics.fmean(values)

    def deviation(key: str) -> float | None:
        many = len({one["seed"] for one in group}) > 1 and mean(key) is not None
        return statistics.stdev(one[key] for one in group) if many else None

    losses: dict[str, float | None] = {}
    for key in ("best_val_loss", "bits_per_byte"):
        losses |= {key: mean(key), f"{key}_deviation": deviation(key)}
    return {
        **{f"{key}s": [one[key] for one in group] for key in ("run", "path", "seed", "state", "step")},
        "settings": {name: group[0]["settings"][name] for name in differ},
        "tokenizer_id": group[0]["tokenizer_id"],
        **losses,
        "time_s": mean("time_s"),
        "tokens_per_s": mean("tokens_per_s"),
    }
