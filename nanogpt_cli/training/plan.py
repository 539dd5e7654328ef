"""What a run is going to do, worked out before anything is made: for the user to read and for `start` to begin."""

import bisect
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.derived import Derived, Schedule, Split, data_folder, derive, schedule_of, split_rows
from nanogpt_cli.config.dial import Told
from nanogpt_cli.config.layers import Layered, Rank, without_effect
from nanogpt_cli.config.schema import Config
from nanogpt_cli.config.setting import ON_OFF
from nanogpt_cli.data.tokens.data_set import DataSet, check_fits, difference, open_data_set
from nanogpt_cli.data.tokens.rows import RowOrder
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.machine.device import Compute, choose_compute, device_name
from nanogpt_cli.machine.distributed import check_gpus, choose_backend
from nanogpt_cli.machine.memory import free_memory, memory_of
from nanogpt_cli.machine.peaks import best_peak, expected_mfu, measure_peak_flops, peak_tflops
from nanogpt_cli.machine.rank_env import RankEnv
from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token, memory_estimate, parameter_table
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.runs.checkpoint import RunProgress
from nanogpt_cli.training.init_from import initial_architecture
from nanogpt_cli.training.state import is_sharded, out_of_patience

ALONE = RankEnv()
Peak = tuple[float, str]  # FLOP/s of one device, and how it is known

MANY_EPOCHS = 1000
MOST_ROWS = 1 << 20  # of a micro-batch; no machine holds as many
# below this many FLOPs a compiled model does not earn back the time it takes to compile (about a minute on a GPU)
LONG_RUN_FLOPS = 1e16
ROOM = 0.8  # of a GPU's memory that a batch may be expected to take where we choose its size
HOPELESS = 10  # times the memory that is there: no estimate is that far off, and trying would hang the machine


@dataclass(frozen=True)
class ResumePoint:
    """The training state a run goes on from: what is small of it. The tensors are read when the run is begun."""

    path: Path  # ours, or nanoGPT's
    progress: RunProgress
    layout: dict[str, Any]
    vocab_size: int
    eval_windows: int  # as configured at the start of the run


@dataclass(frozen=True)
class Plan:
    """A run, worked out; the same on every rank but for its device. It holds no tensors and can be pickled."""

    run_path: Path
    config: Config  # [model] is the architecture, with vocab_size
    derived: Derived
    split: Split
    eval_windows: int
    data_set: DataSet
    compute: Compute
    backend: str  # of several processes
    makes_run: bool  # whether run_path is new
    resume_point: ResumePoint | None  # None starts at step 0
    weights_from: str | None  # init_from at step 0, in words
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    peak: Peak | None
    expected_mfu: float | None  # as runs on this machine reached

    @property
    def first_step(self) -> int:
        """Updates done already."""
        return self.resume_point.progress.step if self.resume_point else 0

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do; a signal may have kept the last update from being evaluated."""
        if self.resume_point is None or self.resume_point.progress.evaluated_step != self.first_step:
            return False
        at_end = self.first_step >= self.config.train.max_iters
        return at_end or out_of_patience(self.config, self.resume_point.progress)

    @property
    def schedule(self) -> Schedule:
        """The learning rate of every update."""
        return schedule_of(self.config)

    @property
    def sharded(self) -> bool:
        """Whether the ranks share the model out among them (FSDP)."""
        return is_sharded(self.config, self.split.world_size)

    @property
    def order(self) -> RowOrder:
        """Which row of the data each row of the run is."""
        c = self.config
        return RowOrder(self.data_set.train.count, c.model.block_size, c.train.seed, c.data.sampling)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.split.rows * self.config.model.block_size

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that one process is expected to need, by part; an estimate."""
        return memory_needed(self.config, self.compute, self.split)

    def config_toml(self) -> dict[str, Any]:
        """The tables of config.toml. What the data set decides stays out, so that they go with another one too."""
        tables = self.config.to_toml()
        if "vocab_size" in self.derived.values:
            del tables["model"]["vocab_size"]
        return {**tables, "derived": self.derived.to_toml()}


def over_ranks(config: Config, env: RankEnv) -> tuple[Config, Split]:
    """The settings with the number of processes here, and what each takes of a step; UserError if that cannot be."""
    if env.distributed:  # whoever started the processes has decided how many there are
        config = config.replace("system", gpus=env.local_size)
    gpus = config.system.gpus
    check_gpus(config.system, gpus, env.device_index if env.distributed else gpus - 1)
    return config, split_rows(config, env.world_size if env.distributed else gpus * env.machines)


def compute_for(config: Config, device_index: int = 0) -> Compute:
    """Device, dtype and compile for a training of this size; vocab_size must be set."""
    rows = config.train.batch_size * config.train.gradient_accumulation_steps * config.train.max_iters
    total = flops_per_token(config.model) * rows * config.model.block_size
    return choose_compute(config.system, config.model, local_rank=device_index, long_run=total > LONG_RUN_FLOPS)


def memory_needed(config: Config, compute: Compute, split: Split) -> dict[str, int]:
    """Bytes that a process needs to train, by part; an estimate."""
    recompute = config.system.activation_checkpointing
    optimizer, dtype, device = config.optim.optimizer, compute.dtype_name, compute.device.type
    found = memory_estimate(
        config.model, split.micro_batch, optimizer, dtype, device=device, activation_checkpointing=recompute
    )
    if is_sharded(config, split.world_size):
        # between micro-steps a rank has the gradients of all weights
        shared = ("weights", "moments") + ("gradients",) * (split.micro_steps == 1)
        found |= {part: found[part] // split.world_size for part in shared}
    return found


def rows_that_fit(config: Config, compute: Compute, room: float, ranks: int = 1) -> int:
    """The largest micro-batch that is expected to need at most `room` bytes; 0 if none is."""

    def needed(rows: int) -> int:
        return sum(memory_needed(config, compute, Split(rows, 2, ranks)).values())

    # searched, since not every part grows with the rows; of two micro-steps, between which FSDP has whole gradients
    return bisect.bisect_right(range(1, MOST_ROWS), room, key=needed)


def fill_gpu(config: Config, compute: Compute, split: Split) -> Config:
    """The same rows a step, and the same evaluation windows, in the largest micro-batches that a GPU is to hold.

    Each micro-batch moves all weights and gradients once more. The GPU's total memory decides, not what is free: the
    same command takes the same split again.
    """
    t, rows = config.train, split.micro_batch * split.micro_steps
    most = rows_that_fit(config, compute, ROOM * (memory_of(compute.device) or 0), split.world_size)
    windows = t.eval_iters * t.batch_size
    best = next((n for n in range(min(rows, most), 0, -1) if rows % n == windows % n == 0), None)
    if best is None:
        return config
    given = {"batch_size": best, "gradient_accumulation_steps": rows // best * split.world_size}
    return config.replace("train", **given, eval_iters=windows // best)


def plan_run(
    layered: Layered,
    run_path: Path,
    *,
    env: RankEnv = ALONE,
    makes_run: bool = True,
    resume_point: ResumePoint | None = None,
    told: Told | None = None,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    progress: Progress = QUIET,
) -> Plan:
    """Work out a run from its settings: open the data, choose the machine's part, derive the rest; makes nothing.

    Schedule and architecture are those of the settings, also where a run goes on; `told` is what these were chosen by.
    UserError if settings do not go with the data, the machine, or each other.
    """
    config, split = over_ranks(layered.config, env)
    data_set = open_data_set(
        data_folder(config),
        token_dtype=config.data.token_dtype,
        tokenizer=config.data.tokenizer,
        trusted=env.launcher is not None,  # which has read it through
        progress=progress,
    )
    config = config.replace("data", data_dir=str(data_set.folder))  # absolute: resume works from any folder
    derived, weights_from = derive(config), None
    for key, (value, why) in (told or {}).items():
        derived.note(key, value, why)
    if config.train.init_from is not None and resume_point is None:
        model, loaded = initial_architecture(layered, data_set)
        config, weights_from = dataclasses.replace(config, model=model), loaded.source
        notes = (*loaded.notes, *notes)
    elif config.model.vocab_size is None:
        rows = resume_point.vocab_size if resume_point else data_set.vocab_size
        derived.note("vocab_size", rows, data_set.vocab_source if rows == data_set.vocab_size else "as at the start")
        config = config.replace("model", vocab_size=rows)
    check_fits(data_set, config.model.block_size, config.model.vocab_size)
    compute = compute_for(config, env.device_index)
    if compute.device.type == "cuda" and layered.rank("batch_size") < Rank.FILE:
        before, config = config.train.batch_size, fill_gpu(config, compute, split)
        split = split_rows(config, split.world_size)
        if config.train.batch_size != before:
            derived.note("batch_size", config.train.batch_size, "the largest split of the rows that the GPU holds")
            was = f"in place of {before:,}, as many as {ROOM:.0%} of this GPU's memory are expected to hold"
            notes = (
                *notes,
                f"micro-batches of {split.micro_batch:,} rows {was}; a step's rows stay; --batch-size sets it",
            )
    chosen = {"device": str(compute.device), "dtype": compute.dtype_name, "compile": ON_OFF[compute.compile]}
    for key, value in chosen.items():
        derived.note(key, value, compute.reasons[key])
    derived.note("flops_per_token", flops_per_token(config.model), "6N + 12LHQT")
    if data_set.bytes_per_token is not None:
        derived.note("bytes_per_token", data_set.bytes_per_token, "UTF-8 bytes of the data set's text / its tokens")
    plan = Plan(
        run_path=run_path,
        config=config,
        derived=derived,
        split=split,
        eval_windows=resume_point.eval_windows if resume_point else config.train.eval_iters * config.train.batch_size,
        data_set=data_set,
        compute=compute,
        backend=choose_backend(config.system.backend, compute.device),
        makes_run=makes_run,
        resume_point=resume_point,
        weights_from=weights_from,
        notes=(*data_set.notes, *notes),
        warnings=tuple(without_effect(layered)),
        peak=env.launcher.peak if env.launcher else find_peak(config, compute),
        expected_mfu=expected_mfu(compute.device, compute.dtype_name, config.model.n_embd),
    )
    remarks, cautions = _look_over(plan)
    return dataclasses.replace(plan, notes=(*plan.notes, *remarks), warnings=(*plan.warnings, *cautions, *warnings))


def plan_of_rank(plan: Plan, env: RankEnv) -> Plan:
    """Rank 0's plan for another rank: its own device and copy of the data; UserError if its machine lacks either."""
    config, told = plan.config, plan.data_set
    data_set = open_data_set(
        told.folder, token_dtype=config.data.token_dtype, tokenizer=config.data.tokenizer, trusted=True
    )
    if differs := difference(told.fingerprint(), data_set.fingerprint()):
        raise UserError(f"{data_set.folder} holds other data than on machine 0: {differs}.")
    check_gpus(config.system, env.local_size, env.device_index)
    device = compute_for(config, env.device_index).device
    return dataclasses.replace(plan, data_set=data_set, compute=dataclasses.replace(plan.compute, device=device))


def find_peak(config: Config, compute: Compute) -> Peak | None:
    """FLOP/s of one device for MFU and how it is known: given, from the table, or measured here and now."""
    given = config.system.peak_tflops
    if given != "auto":
        return float(given) * 1e12, "given"
    listed = peak_tflops(device_name(compute.device), compute.dtype_name) if compute.device.type == "cuda" else None
    if listed is not None:
        return listed * 1e12, "table"
    threads = torch.get_num_threads()
    if compute.device.type == "cpu":  # ranks of one machine share its cores
        torch.set_num_threads(max(1, threads // config.system.gpus))
    measured = measure_peak_flops(compute.device, compute.dtype)
    best = best_peak(compute.device, compute.dtype_name, measured)
    torch.set_num_threads(threads)
    return best, "measured" if best == measured else "measured earlier"


def _look_over(plan: Plan) -> tuple[list[str], list[str]]:
    """What is worth a note and what a warning; UserError for what is hopeless."""
    s, last, notes, warnings = plan.schedule, plan.config.train.max_iters, [], []
    if s.warmup_iters >= last:
        warnings.append(
            f"the warm-up of {s.warmup_iters:,} steps is not over when the run ends at {last:,}: "
            "the learning rate never reaches its peak"
        )
    epochs = plan.order.epoch(last * plan.split.rows)
    if epochs > MANY_EPOCHS:
        warnings.append(
            f"the run reads its text {epochs:,.0f} times and will know it by heart: take more text, a smaller model or "
            "fewer --max-iters"
        )
    if plan.resume_point is not None and s.shape != "constant" and last > s.lr_decay_iters:
        warnings.append(
            f"the decay ends at step {s.lr_decay_iters:,}, the run at {last:,}: "
            f"in between the rate stays at {s.min_lr:g}. To decay over the longer run add --lr-decay-iters."
        )
    needed, there = sum(plan.memory.values()), memory_of(plan.compute.device)
    if there is not None and needed > there:
        least = sum(memory_needed(plan.config, plan.compute, Split(1, 1, plan.split.world_size)).values())
        advice = "A smaller --batch-size with more --gradient-accumulation-steps takes the same tokens a step"
        if least > there:
            advice = (
                f"One row at a time needs {least / 2**30:,.1f}: choose a smaller --n-layer, --n-embd or --block-size"
            )
        problem = (
            f"about {needed / 2**30:,.1f} GiB of memory are expected to be needed, {there / 2**30:,.1f} GiB are there. "
            + advice
        )
        if needed > HOPELESS * there:
            raise UserError(f"{problem}.")
        warnings.append(problem)
    if plan.sharded:
        if plan.compute.dtype == torch.float16:
            raise UserError("--parallel fsdp with float16: use --dtype bfloat16 or float32.")
        needed, free = sum(checkpoint_bytes(plan.config.model, plan.config.optim.optimizer).values()), free_memory()
        size = f"rank 0 puts each checkpoint together in {needed / 2**30:,.2f} GiB of memory"
        if free is None or needed < free:
            notes.append(size if free is None else f"{size}; {free / 2**30:,.1f} GiB are free here")
        else:
            warnings.append(f"{size}, but only {free / 2**30:,.1f} GiB are free here: saving will fail")
    elif plan.config.system.parallel == "fsdp":
        warnings.append("parallel = fsdp has nothing to share out in one process; see --gpus")
    return notes, warnings


def memory_advice(plan: Plan) -> str:
    """For a run that ran out of memory: what it took, and ways to need less, first those that keep a step's tokens."""
    m, micro_batch, parts = plan.config.model, plan.split.micro_batch, plan.memory
    largest = sorted(parts, key=lambda part: parts[part], reverse=True)
    lines = [
        f"On {plan.compute.describe()}: micro-batches of {micro_batch:,} rows x {m.block_size:,} tokens in "
        f"{plan.compute.dtype_name}, {sum(parameter_table(m).values()):,} parameters; estimated: "
        + ", ".join(f"{part} {parts[part] / 2**30:,.2f} GiB" for part in largest)
        + "."
    ]
    go_on = f"nanogpt resume {typed(plan.run_path)}"
    smaller = smaller_batch(plan.config, micro_batch)
    if smaller is not None:
        lines.append(
            f"The same {plan.tokens_per_step:,} tokens a step: {go_on} --batch-size {smaller[0]} "
            f"--gradient-accumulation-steps {smaller[1]}"
        )
    if not plan.config.system.activation_checkpointing:
        lines.append(f"Less memory for activations: {go_on} --activation-checkpointing")
    if plan.split.world_size > 1 and not plan.sharded:
        lines.append(f"Weights and moments shared out over the ranks: {go_on} --parallel fsdp")
    lines.append("A new run needs less with a smaller --block-size, --n-layer or --n-embd; nanogpt mfu shows how much.")
    return "\n".join(lines)


def smaller_batch(config: Config, micro_batch: int) -> tuple[int, int] | None:
    """(batch_size, accumulation) of the same rows an update in at most half the micro-batch; None for single rows."""
    rows = config.train.batch_size * config.train.gradient_accumulation_steps
    smaller = next((n for n in range(micro_batch // 2, 0, -1) if rows % n == 0), None)
    return None if smaller is None else (smaller, rows // smaller)
