"""Run directories with curves, without training."""

import json
from pathlib import Path
from typing import Any

from nanogpt_cli.runs.directory import RunDirectory, create_run
from nanogpt_cli.runs.metrics import MetricsLog


def make_run(
    path: Path, count: int = 40, start: float = 4.2, bytes_per_token: float = 1.0, **more: Any
) -> RunDirectory:
    """A run of `count` log lines, evaluated every ten updates, with a sample at each evaluation."""
    config = {"train": {"max_iters": count}, "derived": {"bytes_per_token": bytes_per_token, "flops_per_token": 1e6}}
    given: dict[str, Any] = {"config": config, "tokenizer": {"kind": "bytes"}, "environment": {"host": "here"}, **more}
    run = create_run(path, **given)
    grow(run, 1, count, start)
    return run


def grow(run: RunDirectory, first: int, last: int, start: float = 4.2, sample: str = "To be, or not") -> None:
    """Log the updates `first` to `last`."""
    log = MetricsLog(run.metrics)
    for step in range(first, last + 1):
        loss = 1.5 + (start - 1.5) / step
        line = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 2e4, "mfu": 0.3}
        log.append({"step": step, "loss": loss, **line, "tokens": step * 768, "time_s": step * 0.5})
        if step % 10 == 0:
            log.append({"step": step, "val_loss": loss + 0.1, "train_loss": loss})
            with run.samples.open("a") as file:
                file.write(json.dumps({"step": step, "prompt": "", "text": f"{sample} {step}"}) + "\n")
    log.close()
