"""Out of memory: said with what was tried, and with what to type for the same numbers in less memory."""

import contextlib
from collections.abc import Iterator

import torch

from nanogpt_cli.config.schema import Config
from nanogpt_cli.errors import NanogptError, typed
from nanogpt_cli.model.sizes import parameter_table
from nanogpt_cli.training.plan import Plan

# how backends that have no exception of their own say it: CPU allocators, MPS, cuBLAS
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


@contextlib.contextmanager
def named(advice: str) -> Iterator[None]:
    """Turn running out of memory into a message that ends with `advice`.

    Raises:
        NanogptError: there was not enough memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).strip().partition("\n")[0]
        raise NanogptError(f"Out of memory{f' ({told})' if told else ''}.\n{advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, numpy or Python says that memory, of a device or the host, was not enough."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)


def for_training(plan: Plan) -> str:
    """What the run took, and the ways to need less, first those that keep the tokens of an update."""
    a, micro_batch, parts = plan.architecture, plan.split.micro_batch, plan.memory
    largest = sorted(parts, key=lambda part: parts[part], reverse=True)
    lines = [
        f"On {plan.compute.describe()}: micro-batches of {micro_batch:,} rows x {a.block_size:,} tokens in "
        f"{plan.compute.dtype_name}, {sum(parameter_table(a).values()):,} parameters; estimated: "
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
