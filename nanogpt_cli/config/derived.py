"""Settings that follow from others when they are not given, each with its formula in words."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_cli.config.schema import Config, settings
from nanogpt_cli.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The frozen learning-rate schedule of a run; stands in the checkpoint and survives `--max-iters`."""

    shape: str
    learning_rate: float
    min_lr: float
    warmup_iters: int
    lr_decay_iters: int

    def factor(self, step: int) -> float:
        """Rate of update number `step` (0-based) as a share of the peak; multiplies every group's own peak.

        Linear warm-up that starts above zero, then cosine or straight decay to min_lr / learning_rate, which holds
        from lr_decay_iters on.
        """
        if step < self.warmup_iters:
            return (step + 1) / (self.warmup_iters + 1)
        if self.shape == "constant":
            return 1.0
        floor = self.min_lr / self.learning_rate
        if step >= self.lr_decay_iters:
            return floor
        progress = (step - self.warmup_iters) / (self.lr_decay_iters - self.warmup_iters)
        kept = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.shape == "cosine" else 1.0 - progress
        return floor + (1.0 - floor) * kept


def schedule_of(config: Config) -> Schedule:
    """The schedule a new run starts with."""
    o, max_iters = config.optim, config.train.max_iters
    constant = o.schedule == "constant"
    default_warmup = 0 if constant else min(2000, max_iters // 20)
    return Schedule(
        shape=o.schedule,
        learning_rate=o.learning_rate,
        min_lr=o.learning_rate if constant else o.learning_rate / 10 if o.min_lr is None else o.min_lr,
        warmup_iters=default_warmup if o.warmup_iters is None else o.warmup_iters,
        lr_decay_iters=o.lr_decay_iters or max_iters,
    )


def with_schedule(config: Config, frozen: Schedule) -> Config:
    """The settings with the warm-up and decay length of `frozen` written out where they would become others."""
    o, derived = config.optim, schedule_of(config)
    kept = {}
    if o.warmup_iters is None and derived.warmup_iters != frozen.warmup_iters:
        kept["warmup_iters"] = frozen.warmup_iters
    decays = o.lr_decay_iters is None and o.schedule != "constant" and derived.lr_decay_iters != frozen.lr_decay_iters
    if decays and frozen.lr_decay_iters > frozen.warmup_iters:  # the other way round is refused as a setting
        kept["lr_decay_iters"] = frozen.lr_decay_iters
    return config.replace("optim", **kept)


@dataclass(frozen=True)
class Split:
    """How one update's rows are divided: rows = micro_batch * micro_steps * world_size."""

    micro_batch: int
    micro_steps: int  # on every rank
    world_size: int

    @property
    def rows(self) -> int:
        """Rows of one update over all ranks."""
        return self.micro_batch * self.micro_steps * self.world_size

    @property
    def sum(self) -> str:
        """The multiplication in words."""
        return f"{self.micro_batch} rows x {self.micro_steps} micro-steps x {self.world_size} ranks"


def split_rows(config: Config, world_size: int) -> Split:
    """Divide the global batch over the ranks, unchanged; UserError names the numbers of ranks that would divide it."""
    batch, accumulation = config.train.batch_size, config.train.gradient_accumulation_steps
    rows = batch * accumulation
    if rows % world_size:
        fitting = [n for n in range(1, min(rows, 4 * world_size) + 1) if rows % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - world_size))[:5])
        raise UserError(
            f"{rows} rows an update (batch_size {batch} x gradient_accumulation_steps {accumulation}) do not divide "
            f"over {world_size} ranks. Use {', '.join(map(str, near))} ranks, or another --batch-size."
        )
    per_rank = rows // world_size
    micro_batch = next(n for n in range(min(batch, per_rank), 0, -1) if per_rank % n == 0)
    return Split(micro_batch, per_rank // micro_batch, world_size)


@dataclass
class Derived:
    """What was worked out or chosen, for `[derived]` in config.toml, with the reason of each value."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, key: str, value: Any, reason: str) -> None:
        self.values[key], self.reasons[key] = value, reason

    def to_toml(self) -> dict[str, Any]:
        return {**self.values, "reasons": dict(self.reasons)}


def data_folder(config: Config) -> Path:
    """The folder of the token files, absolute."""
    return Path(config.data.data_dir or Path("data") / config.data.dataset).absolute()


def moved_folder(folder: Path, beside: Path) -> Path:
    """The folder of token files; where it is gone, one of the name in data/ beside `beside`, or above it.

    Runs and data that were moved together find each other so; whether it is the same data is the fingerprint's to say.
    """
    if folder.exists():
        return folder
    places = (parent / "data" / folder.name for parent in beside.absolute().parents)
    return next((place for place in places if place.is_dir()), folder)


def save_interval(config: Config) -> int:
    """Updates between two saves."""
    return config.train.save_interval or config.train.eval_interval


def derive(config: Config) -> Derived:
    """Everything that follows from the settings alone; data set and machine add theirs later."""
    values, derived = asdict(schedule_of(config)) | {"save_interval": save_interval(config)}, Derived()
    for key in ("min_lr", "warmup_iters", "lr_decay_iters", "save_interval"):
        known = settings()[key]
        if getattr(getattr(config, known.section), key) is None:
            constant = config.optim.schedule == "constant" and key in ("min_lr", "warmup_iters")
            derived.note(key, values[key], "the schedule is constant" if constant else known.derived)
    return derived
