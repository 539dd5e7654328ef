"""What a run is going to do, worked out before anything is made: for the user to read and for `start` to carry out."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.derived import Derived, Schedule, Split, data_folder, derive, schedule_of, split_rows
from nanogpt_cli.config.layers import Layered, without_effect
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.data.tokens.data_set import DataSet, check_fits, open_data_set
from nanogpt_cli.data.tokens.rows import RowOrder
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.device import Compute, choose_compute, device_name
from nanogpt_cli.machine.distributed import check_gpus, choose_backend
from nanogpt_cli.machine.memory import free_memory, memory_of
from nanogpt_cli.machine.peaks import measure_peak_flops, peak_tflops
from nanogpt_cli.machine.rank import Place
from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token, memory_estimate, parameter_table
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.runs.checkpoint import Checkpoint
from nanogpt_cli.training.init_from import initial_weights
from nanogpt_cli.view.plain import duration

ALONE = Place()
Row = tuple[str, str, str]  # label, value, where it comes from

# below this many FLOPs a compiled model does not earn back the time it takes to compile (about a minute on a GPU)
LONG_RUN_FLOPS = 1e16
HOPELESS = 10  # times the memory that is there: no estimate is that far off, and trying would hang the machine


@dataclass
class Plan:
    """A run, worked out: `start_new` or `start_resume` carries it out."""

    run_path: Path
    config: Config
    origins: dict[str, str]
    derived: Derived
    architecture: ModelSettings  # with vocab_size set
    schedule: Schedule
    split: Split
    eval_windows: int
    data_set: DataSet
    compute: Compute
    backend: str = "gloo"  # of several processes
    makes_run: bool = True  # whether run_path is new
    checkpoint: Checkpoint | None = None  # where a resumed run goes on; None starts at step 0
    checkpoint_path: Path | None = None
    initial_weights: dict[str, torch.Tensor] | None = None  # of init_from
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    peak: tuple[float, str] | None = None  # FLOP/s of one device, and how it is known

    @property
    def first_step(self) -> int:
        """Updates done already."""
        return int(self.checkpoint["step"]) if self.checkpoint else 0

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do; a signal may have kept the last update from being evaluated."""
        if self.checkpoint is None or self.first_step < self.config.train.max_iters:
            return False
        return bool(self.checkpoint["progress"]["evaluated_step"] == self.first_step)

    @property
    def sharded(self) -> bool:
        """Whether the ranks share the model out among them (FSDP)."""
        return self.config.system.parallel == "fsdp" and self.split.world_size > 1

    @property
    def order(self) -> RowOrder:
        """Which row of the data each row of the run is."""
        c = self.config
        return RowOrder(self.data_set.train.count, self.architecture.block_size, c.train.seed, c.data.sampling)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.split.rows * self.architecture.block_size

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that one process is expected to need, by part; an estimate."""
        c, compute = self.config, self.compute
        found = memory_estimate(
            self.architecture,
            self.split.micro_batch,
            c.optim.optimizer,
            compute.dtype_name,
            device=compute.device.type,
            activation_checkpointing=c.system.activation_checkpointing,
        )
        if self.sharded:
            found |= {part: found[part] // self.split.world_size for part in ("weights", "gradients", "moments")}
        return found

    def groups(self) -> list[tuple[str, list[Row]]]:
        """The plan for people: titled groups of (label, value, reason)."""
        return [
            ("model", self._model_rows()),
            ("data", self._data_rows()),
            ("training", self._training_rows()),
            ("machine", self._machine_rows()),
        ]

    def _model_rows(self) -> list[Row]:
        m = self.architecture
        count = sum(parameter_table(m).values())
        vocabulary = f"vocabulary {m.vocab_size:,}: {self.derived.reasons.get('vocab_size', 'as set')}"
        shape = f"{m.n_layer} layers, {m.n_head} heads, width {m.n_embd}, context {m.block_size}"
        rows = [("model", shape, ""), ("parameters", f"{count:,}", vocabulary)]
        if self.checkpoint is None and self.initial_weights is None:
            guessing = math.log(m.vocab_size or 1)
            rows.append(("first loss", f"about {guessing:.2f}", "ln(vocabulary): what guessing costs"))
        return rows

    def _data_rows(self) -> list[Row]:
        d = self.data_set
        return [("data set", f"{d.name}, {d.train.count:,} train and {d.val.count:,} val tokens", str(d.folder))]

    def _training_rows(self) -> list[Row]:
        c = self.config
        left = c.train.max_iters - self.first_step
        epochs = self.order.epoch(left * self.split.rows)
        steps_an_epoch = self.order.windows / self.split.rows
        s = self.schedule
        rates = f"{s.learning_rate:g} {s.shape}"
        if s.shape != "constant":
            rates += f" to {s.min_lr:g} at step {s.lr_decay_iters:,}"
        return [
            ("updates", f"{left:,}", f"step {self.first_step:,} to {c.train.max_iters:,}"),
            ("tokens a step", f"{self.tokens_per_step:,}", f"{self.split.sum} x {self.architecture.block_size} tokens"),
            ("epochs", f"{epochs:.2f}", f"{steps_an_epoch:,.1f} steps an epoch"),
            ("optimizer", c.optim.optimizer, f"weight decay {c.optim.weight_decay:g}, clip {c.optim.grad_clip:g}"),
            ("learning rate", rates, f"{s.warmup_iters:,} steps of warm-up"),
        ]

    def _machine_rows(self) -> list[Row]:
        c, compute = self.config, self.compute
        per_token = flops_per_token(self.architecture)
        total = per_token * self.tokens_per_step * (c.train.max_iters - self.first_step)
        rows = [
            ("device", compute.describe(), compute.reasons["device"]),
            ("dtype", compute.dtype_name, compute.reasons["dtype"]),
            ("compile", "on" if compute.compile else "off", compute.reasons["compile"]),
            *self._process_rows(),
            ("work", f"{total:.3g} FLOP", f"{per_token / 1e6:,.1f} MFLOP a token, 6N + 12LHQT"),
            ("memory", f"about {sum(self.memory.values()) / 2**30:.2f} GiB", "estimate: weights, moments, activations"),
        ]
        if self.peak is not None:
            flops, source = self.peak
            seconds = total / (flops * self.split.world_size)
            rows.append(("time", f"at least {duration(seconds)}", f"at {flops / 1e12:.3g} TFLOP/s, {source}"))
        rows.append(("writes to", str(self.run_path), ""))
        return rows

    def _process_rows(self) -> list[Row]:
        ranks, here = self.split.world_size, self.config.system.gpus
        if ranks == 1:
            return []
        where = "on this machine" if ranks == here else f"({here} on each of {ranks // here} machines)"
        how = "FSDP: each keeps a share of the model" if self.sharded else "DDP: each keeps the whole model"
        return [("processes", f"{ranks} {where}", f"{how}; {self.backend}")]


def check_settings(config: Config, *, place: Place = ALONE, machines: int = 1) -> None:
    """Refuse what can be refused before the data is there: nobody wants to prepare a data set for a run that cannot be.

    Raises:
        UserError: this machine lacks something, the ranks do not divide the rows, or init_from names nothing.
    """
    from nanogpt_cli.weights.resolve import find_model

    _shared_out(config, place, machines)
    choose_compute(config.system, config.model, local_rank=place.device_index)
    if config.train.init_from is not None:
        find_model(config.train.init_from)


def _shared_out(config: Config, place: Place, machines: int) -> tuple[Config, Split]:
    """The settings with the number of processes here, and what each process takes of a step."""
    if place.several:  # whoever started the processes has decided how many there are
        config = config.replace("system", gpus=place.local_size)
    gpus = config.system.gpus
    check_gpus(config.system, gpus, place.device_index if place.several else gpus - 1)
    return config, split_rows(config, place.world_size if place.several else gpus * machines)


def compute_for(config: Config, architecture: ModelSettings, device_index: int = 0) -> Compute:
    """Device, dtype and compile for a training of this size."""
    rows = config.train.batch_size * config.train.gradient_accumulation_steps * config.train.max_iters
    total = flops_per_token(architecture) * rows * architecture.block_size
    return choose_compute(config.system, architecture, local_rank=device_index, long_run=total > LONG_RUN_FLOPS)


def plan_run(
    layered: Layered,
    run_path: Path,
    *,
    place: Place = ALONE,
    machines: int = 1,
    schedule: Schedule | None = None,
    architecture: ModelSettings | None = None,
    progress: Progress = QUIET,
) -> Plan:
    """Work out a run from its settings: open the data, choose the machine's part, derive the rest; makes nothing.

    Args:
        place: of this process, if it is one of several already.
        machines: on which the run's processes are to be launched.
        schedule: the frozen one of a resumed run; a new run's follows from the settings.
        architecture: that of the checkpoint a run goes on from; a new run's follows from the settings.
        progress: hears how far large token files are checked.

    Raises:
        UserError: the settings do not go with the data, the machine, or each other.
    """
    config, split = _shared_out(layered.config, place, machines)
    data = config.data
    data_set = open_data_set(
        data_folder(config), token_dtype=data.token_dtype, tokenizer=data.tokenizer, progress=progress
    )
    derived = derive(config)
    config = config.replace("data", data_dir=str(data_set.folder))  # absolute: resume works from any folder
    weights = None
    if architecture is None and config.train.init_from is not None:
        architecture, weights = initial_weights(layered, data_set)
    architecture = architecture or config.model
    if architecture.vocab_size is None:
        derived.note("vocab_size", data_set.vocab_size, data_set.vocab_source)
        architecture = dataclasses.replace(architecture, vocab_size=data_set.vocab_size)
    check_fits(data_set, architecture.block_size, architecture.vocab_size)
    compute = compute_for(config, architecture, place.device_index)
    for key, reason in compute.reasons.items():
        derived.note(key, compute.dtype_name if key == "dtype" else str(getattr(compute, key)), reason)
    plan = Plan(
        run_path=run_path,
        config=config,
        origins=layered.origins,
        derived=derived,
        architecture=architecture,
        schedule=schedule or schedule_of(config),
        split=split,
        eval_windows=config.train.eval_iters * config.train.batch_size,
        data_set=data_set,
        compute=compute,
        backend=choose_backend(config.system.backend, compute.device),
        initial_weights=weights,
        notes=list(data_set.notes),
        peak=find_peak(config, compute),
    )
    plan.warnings += _warnings(plan)
    if config.system.parallel == "fsdp":
        _check_sharding(plan)
    return plan


def _check_sharding(plan: Plan) -> None:
    """Refuse what cannot be sharded, and say whether rank 0 can hold a checkpoint."""
    if not plan.sharded:
        plan.warnings.append("parallel = fsdp has nothing to share out in one process; see --gpus")
        return
    if plan.config.optim.optimizer == "muon":
        raise UserError(
            "--parallel fsdp with optimizer muon: Muon needs whole matrices, FSDP cuts them. "
            "Use --parallel ddp, or --optimizer adamw in a new run."
        )
    if plan.compute.dtype == torch.float16:
        raise UserError("--parallel fsdp with float16: use --dtype bfloat16 or float32.")
    needed, free = sum(checkpoint_bytes(plan.architecture, "adamw").values()), free_memory()
    size = f"rank 0 puts each checkpoint together in {needed / 2**30:,.2f} GiB of memory"
    if free is None:
        plan.notes.append(size)
    elif needed < free:
        plan.notes.append(f"{size}; {free / 2**30:,.1f} GiB are free here")
    else:
        plan.warnings.append(f"{size}, but only {free / 2**30:,.1f} GiB are free here: saving will fail")


def find_peak(config: Config, compute: Compute) -> tuple[float, str] | None:
    """FLOP/s of one device for MFU and how it is known: given, from the table, or measured here and now."""
    given = config.system.peak_tflops
    if given != "auto":
        return float(given) * 1e12, "given"
    listed = peak_tflops(device_name(compute.device), compute.dtype_name) if compute.device.type == "cuda" else None
    if listed is not None:
        return listed * 1e12, "table"
    return measure_peak_flops(compute.device, compute.dtype), "measured"


def _warnings(plan: Plan) -> list[str]:
    c, s = plan.config, plan.schedule
    found = without_effect(c, plan.origins)
    if s.warmup_iters >= c.train.max_iters:
        found.append(
            f"the warm-up of {s.warmup_iters:,} steps is not over when the run ends at {c.train.max_iters:,}: "
            "the learning rate never reaches its peak"
        )
    needed, there = sum(plan.memory.values()), memory_of(plan.compute.device)
    if there is not None and needed > there:
        problem = (
            f"about {needed / 2**30:,.1f} GiB of memory are expected to be needed, {there / 2**30:,.1f} GiB are there. "
            "A smaller --batch-size with more --gradient-accumulation-steps takes the same tokens a step"
        )
        if needed > HOPELESS * there:
            raise UserError(f"{problem}.")
        found.append(problem)
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that changed between two nested tables, each as `key: old -> new`."""
    found = []
    for section in now:
        old, new = before.get(section, {}), now[section]
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                found.append(f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}")
    return found
