"""TensorBoard and Weights & Biases beside metrics.jsonl; whatever goes wrong with them, training goes on."""

import tomllib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nanogpt_cli.config.schema import Config
from nanogpt_cli.runs.directory import RunDirectory


class Tracker(NamedTuple):
    """Somewhere else that numbers go to. Both may raise anything: `Trackers` guards the training against it."""

    log: Callable[[int, dict[str, float]], object]  # keeps the numbers of one metrics line under their step
    close: Callable[[], object]  # writes what is left


def _tensorboard(config: Config, run: RunDirectory, first_step: int) -> Tracker:
    """Event files in logs/tensorboard; on a resume what lies after `first_step` is purged from the curves."""
    from torch.utils.tensorboard import SummaryWriter  # torch is loaded already where training runs

    purge = first_step + 1 if first_step else 0  # a new start evaluates step 0 again
    writer = SummaryWriter(str(run.logs / "tensorboard"), purge_step=purge)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(config: Config, run: RunDirectory, first_step: int) -> Tracker:
    """One W&B run for the whole life of a run, resumes included: its id stands in environment.toml."""
    import wandb

    theirs = wandb.init(
        project=config.log.wandb_project,
        name=config.log.wandb_run_name or run.name,
        id=tomllib.loads(run.environment.read_text("utf-8"))["run_id"],
        resume="allow",
        dir=str(run.logs),
        config=config.to_toml(),
        # train.log has the text, without a panel's escape codes; a network that is not there is no reason to wait
        settings=wandb.Settings(console="off", init_timeout=30),
    )
    # an axis of its own: W&B's own step cannot go back to a checkpoint
    theirs.define_metric("*", step_metric="step")
    return Tracker(lambda step, values: theirs.log({"step": step, **values}), theirs.finish)


KINDS = {"tensorboard": _tensorboard, "wandb": _wandb}


class Trackers:
    """All trackers of a run. One that fails is named once and left out from then on."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]] = (), warn: Callable[[str], None] = print) -> None:
        self._trackers = dict(trackers)
        self._warn = warn

    def log(self, line: dict[str, Any]) -> None:
        """Pass on the numbers of a metrics line."""
        values = {key: value for key, value in line.items() if key != "step" and value is not None}
        self._each(lambda tracker: tracker.log(line["step"], values))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # foreign code: no list of what it may raise, and no reason to lose a run
                del self._trackers[name]
                self._warn(_failed(name, error))


def open_trackers(config: Config, run: RunDirectory, first_step: int, warn: Callable[[str], None]) -> Trackers:
    """Start the trackers that the settings ask for; `warn` gets one sentence for each that cannot be started."""
    opened = []
    for name, kind in KINDS.items():
        if getattr(config.log, name):
            try:
                opened.append((name, kind(config, run, first_step)))
            except Exception as error:  # as in `_each`
                warn(_failed(name, error))
    return Trackers(opened, warn)


def _failed(name: str, error: Exception) -> str:
    missing = isinstance(error, ModuleNotFoundError)
    advice = f" Install it with: pip install {name}." if missing else ""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{name} is left out: {reason}.{advice} Training goes on; metrics.jsonl has it all."
