"""What a run directory says about a run without its weights: settings, data set, tokenizer, where it ran."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.runs.directory import RunDirectory


@dataclass(frozen=True)
class RunFacts:
    """Facts of one run; None is unknown. Losses a token compare only where `tokenizer_id` is the same."""

    settings: dict[str, str]  # by name, with what was derived, and the tokenizer in words
    environment: dict[str, str]
    data_set: str | None
    tokenizer: str | None  # in words
    tokenizer_id: str
    bytes_per_token: float | None  # UTF-8 bytes of the data set's text over its tokens
    flops_per_token: float | None

    def bits_per_byte(self, loss: float | None) -> float | None:
        """A loss in nats a token as nats / ln 2 / bytes a token."""
        return None if loss is None or self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token


def run_facts(run: RunDirectory) -> RunFacts:
    config, tokenizer, environment = (tables(path) for path in (run.config, run.tokenizer, run.environment))
    settings = {
        name: value
        for table in config.values()
        if isinstance(table, dict)
        for name, value in table.items()
        if name != "reasons"
    }
    alphabet, kind = tokenizer.get("alphabet"), tokenizer.get("kind")
    size = len(alphabet) if isinstance(alphabet, str) else tokenizer.get("size")
    words = " ".join(str(word) for word in (kind, size) if word is not None)
    return RunFacts(
        settings=texts(settings) | ({"tokenizer": words} if words else {}),
        environment=texts(environment),
        data_set=texts(settings).get("dataset"),
        tokenizer=words or None,
        tokenizer_id=hashlib.sha256(json.dumps(tokenizer, sort_keys=True, default=str).encode()).hexdigest(),
        bytes_per_token=_positive(settings.get("bytes_per_token")),
        flops_per_token=_positive(settings.get("flops_per_token")),
    )


def common_unit(facts: Sequence[RunFacts]) -> tuple[str, list[float]]:
    """The unit in which losses of these runs compare, and what to multiply each run's nats a token with.

    Where tokenizers differ, tokens are no common measure: bits per byte = nats / ln 2 / bytes a token.
    """
    if len({one.tokenizer_id for one in facts}) < 2:
        return "nats a token", [1.0] * len(facts)
    factors = [factor for one in facts if (factor := one.bits_per_byte(1.0))]
    if len(factors) < len(facts):
        return "nats a token, which do not compare: tokenizers differ", [1.0] * len(facts)
    return "bits per byte", factors


def tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file of a run; of a missing or damaged one, none."""
    try:
        return read_toml(path)
    except UserError:
        return {}


def texts(tables: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as TOML writes them; tables in tables become one, with dotted keys."""
    found: dict[str, str] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            found |= texts(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and value > 0 else None
