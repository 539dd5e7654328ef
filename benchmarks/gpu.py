"""GPT-2 124M on one GPU beside a nanoGPT clone's: tokens/s with its spread, MFU, memory, and the MFU to expect.

    python benchmarks/gpu.py [--clone PATH-OF-A-NANOGPT-CLONE] [--batches 12 60] [--minutes 4] [--json out.json]

Both sides take what they would choose there: number format, TF32, fused AdamW, flash attention, torch.compile. They
take turns in one process and change who begins, so that a GPU whose clock drifts is fair to both. Then come
gpt2_modern, what --deterministic costs, and sampling. A row is printed as soon as it is measured, and none is begun
after --minutes, so that a lent GPU leaves numbers in any case. benchmarks/slot.sh runs this among other parts.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare import nanogpt_model
from torch import nn

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import Config
from nanogpt_cli.machine.device import Compute, choose_compute, device_name, memory_gib, synchronize
from nanogpt_cli.machine.peaks import measure_peak_flops, peak_tflops
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.model.sizes import flops_per_token
from nanogpt_cli.training.bench import Bench

MICRO_STEPS = 5  # of an update
ROUNDS = 5
NEW_TOKENS = 100
EXPECTED_MFU = {"H200": 0.50, "H100": 0.45, "A100": 0.60}  # of gpt2, from rooflines: no number measured by us
Update = Callable[[], None]
Row = dict[str, Any]


def our_update(config: Config, compute: Compute, batch: int) -> Update:
    """Micro-steps and an update as the loop takes them."""
    bench = Bench(config, compute, batch)

    def update() -> None:
        bench.micro_steps(MICRO_STEPS)
        bench.update()

    return update


def their_update(clone: Path, config: Config, compute: Compute, batch: int) -> Update:
    """The same as the clone's train.py takes them."""
    module, a, device = nanogpt_model(clone), config.model, compute.device
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(a.block_size, a.vocab_size, a.n_layer, a.n_head, a.n_embd, 0.0, a.bias))
        model.to(device)
        optimizer = model.configure_optimizers(0.1, 1e-9, (0.9, 0.95), device.type)
    scaler = torch.amp.GradScaler(device.type, enabled=compute.dtype == torch.float16)
    called = torch.compile(model) if compute.compile else model
    x, y = (torch.randint(a.vocab_size or 1, (batch, a.block_size), device=device) for _ in range(2))

    def update() -> None:
        for _ in range(MICRO_STEPS):
            with compute.autocast():
                _, loss = called(x, y)
                loss = loss / MICRO_STEPS
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return update


def seconds_an_update(update: Update, device: torch.device, at_least: float) -> float:
    """Mean over as many updates as fill `at_least` seconds."""
    synchronize(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < at_least:
        update()
        synchronize(device)  # once in MICRO_STEPS
        count += 1
    return (time.perf_counter() - began) / count


def measured(
    name: str, sides: dict[str, Callable[[], Update]], config: Config, compute: Compute, batch: int, seconds: float
) -> Iterator[Row]:
    """A row a side; a side that needs more memory than there is has none."""
    updates: dict[str, Update] = {}
    memory: dict[str, float] = {}
    device, cuda = compute.device, compute.device.type == "cuda"
    for side, make in sides.items():
        before = torch.cuda.memory_allocated() / 2**30 if cuda else 0.0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            update = make()
            update()  # picks kernels
            updates[side] = update
        except torch.OutOfMemoryError:
            print(f"{name}, batch {batch}: {side} is out of memory", flush=True)
        memory[side] = (memory_gib(device) or 0.0) - before
    took: dict[str, list[float]] = {side: [] for side in updates}
    for turn in range(ROUNDS):
        for side in list(updates)[:: 1 if turn % 2 == 0 else -1]:
            took[side].append(seconds_an_update(updates[side], device, seconds / ROUNDS))
    known = peak_tflops(device_name(device), compute.dtype_name)
    peak = known * 1e12 if known else measure_peak_flops(device, compute.dtype)
    expected = next((f", expected {mfu:.0%}" for gpu, mfu in EXPECTED_MFU.items() if gpu in device_name(device)), "")
    for side, each in took.items():
        update_s = statistics.median(each)
        rate, spread = MICRO_STEPS * batch * config.model.block_size / update_s, (max(each) - min(each)) / update_s
        mfu = rate * flops_per_token(config.model) / peak
        line = f"{1000 * update_s / MICRO_STEPS:9.2f} ms a micro-step (spread {spread:.1%})  {rate:11,.0f} tokens/s"
        line += f"  MFU {mfu:6.1%} of {peak / 1e12:.4g} TFLOP/s{expected}  {memory[side]:6.2f} GiB"
        print(f"{name:14} {side:8} batch {batch:4}  {line}", flush=True)
        found = {"tokens_per_s": rate, "spread": spread, "mfu": mfu, "memory_gib": memory[side]}
        yield {"what": name, "side": side, "batch": batch, **found}
    updates.clear()
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def sampling(config: Config, compute: Compute) -> Row:
    """Ten samples of a model with random weights, as `nanogpt sample` draws them."""
    model = GPT(config.model).to(compute.device).eval()
    rates = []
    for _ in range(3):  # the first picks kernels
        synchronize(compute.device)
        began = time.perf_counter()
        for _ids in generate(model, [0], 10, Sampling(NEW_TOKENS), token_limit=100, dtype=compute.dtype):
            pass
        rates.append(10 * NEW_TOKENS / (time.perf_counter() - began))
    print(f"sampling, ten at a time   {max(rates[1:]):11,.0f} tokens/s", flush=True)
    return {"what": "sampling", "tokens_per_s": max(rates[1:])}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Everything, in the order in which it is worth most."""
    end = time.monotonic() + 60 * args.minutes

    def settings(preset: str, **system: Any) -> tuple[Config, Compute]:
        config = combine(preset_layer(preset)).config
        config = config.replace("model", vocab_size=config.model.vocab_size or 50304)
        config = config.replace("system", device=args.device, **system)
        return config, choose_compute(config.system, config.model)

    config, compute = settings(args.preset)
    compute.prepare()
    print(f"{compute.describe()}, torch {torch.__version__}, {compute.dtype_name}")
    for batch in args.batches:
        sides: dict[str, Callable[[], Update]] = {"nanogpt": partial(our_update, config, compute, batch)}
        if args.clone:
            sides["nanoGPT"] = partial(their_update, args.clone, config, compute, batch)
        if time.monotonic() < end:
            yield from measured(args.preset, sides, config, compute, batch, args.seconds)
    if time.monotonic() < end:
        yield sampling(config, compute)
    others: list[tuple[str, str, dict[str, Any]]] = [("modern", args.modern, {})]
    others.append(("deterministic", args.preset, {"deterministic": True}))
    for name, preset, changes in others:
        if time.monotonic() < end:
            other, its = settings(preset, **changes)
            its.prepare()  # deterministic stays on: it comes last
            yield from measured(
                name,
                {"nanogpt": partial(our_update, other, its, args.batches[0])},
                other,
                its,
                args.batches[0],
                args.seconds,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[12, 60])
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=6, help="of measuring a side")
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--modern", default="gpt2_modern")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for row in rows(args):
        found.append(row)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
