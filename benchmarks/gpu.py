"""Tokens/s, MFU and peak memory of GPT-2 124M on one device, ours and a nanoGPT clone's in turns in one process.

    python benchmarks/gpu.py PATH-OF-A-NANOGPT-CLONE [--batches 12 16 24 32 48 64] [--minutes 9] [--json out.json]

Both sides take what they would choose there: number format, TF32, fused AdamW, flash attention, torch.compile. A row
is printed as soon as it is measured, and none is begun after --minutes, so that a lent GPU leaves numbers in any case.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compare import nanogpt_model
from torch import nn

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import Config, ModelSettings
from nanogpt_cli.machine.device import (
    Compute,
    choose_compute,
    device_name,
    memory_gib,
    synchronize,
)
from nanogpt_cli.machine.peaks import measure_peak_flops, peak_tflops
from nanogpt_cli.model.sizes import flops_per_token
from nanogpt_cli.training.bench import Bench

MICRO_STEPS = 8  # of an update; the recipe has 40, on one GPU
Update = Callable[[], None]


def our_update(config: Config, architecture: ModelSettings, compute: Compute, batch: int) -> Update:
    """Micro-steps and an update as the loop takes them."""
    bench = Bench(config, architecture, compute, batch)

    def update() -> None:
        bench.micro_steps(MICRO_STEPS)
        bench.update()

    return update


def their_update(clone: Path, architecture: ModelSettings, compute: Compute, batch: int) -> Update:
    """The same as the clone's train.py takes them."""
    module, a, device = nanogpt_model(clone), architecture, compute.device
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(a.block_size, a.vocab_size, a.n_layer, a.n_head, a.n_embd, 0.0, a.bias))
        model.to(device)
        optimizer = model.configure_optimizers(0.1, 1e-9, (0.9, 0.95), device.type)
    scaler = torch.amp.GradScaler(device.type, enabled=compute.dtype == torch.float16)
    called = torch.compile(model) if compute.compile else model
    x = torch.randint(a.vocab_size or 1, (batch, a.block_size), device=device)
    y = torch.randint(a.vocab_size or 1, (batch, a.block_size), device=device)

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
    """Mean over as many updates as fill `at_least` seconds, after one that picks kernels."""
    update()
    synchronize(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < at_least:
        update()
        synchronize(device)  # once in MICRO_STEPS
        count += 1
    return (time.perf_counter() - began) / count


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a side and batch size."""
    config = combine(preset_layer(args.preset)).config
    architecture = replace(config.model, vocab_size=config.model.vocab_size or 50304)
    compute = choose_compute(replace(config.system, device=args.device), architecture)
    compute.prepare()
    known = peak_tflops(device_name(compute.device), compute.dtype_name)
    peak = known * 1e12 if known else measure_peak_flops(compute.device, compute.dtype)
    print(f"{compute.describe()}, torch {torch.__version__}, {compute.dtype_name}, peak {peak / 1e12:.4g} TFLOP/s")
    end = time.monotonic() + 60 * args.minutes
    for batch in args.batches:
        sides = {
            "nanogpt": lambda batch=batch: our_update(config, architecture, compute, batch),
            "nanoGPT": lambda batch=batch: their_update(args.clone, architecture, compute, batch),
        }
        for side, made in sides.items():
            if time.monotonic() > end:
                return
            if compute.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                seconds = seconds_an_update(made(), compute.device, args.seconds)
            except torch.OutOfMemoryError:
                print(f"{side:8} batch {batch:4}  out of memory", flush=True)
                continue
            finally:
                torch.compiler.reset()
                gc.collect()
                torch.cuda.empty_cache()
            rate = MICRO_STEPS * batch * architecture.block_size / seconds
            mfu, memory = rate * flops_per_token(architecture) / peak, memory_gib(compute.device)
            line = f"{1000 * seconds / MICRO_STEPS:9.2f} ms a micro-step  {rate:11,.0f} tokens/s  MFU {mfu:6.1%}"
            print(f"{side:8} batch {batch:4}  {line}  memory {memory or 0:6.2f} GiB", flush=True)
            yield {"side": side, "batch": batch, "tokens_per_s": rate, "mfu": mfu, "memory_gib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[12, 16, 24, 32, 48, 64])
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--seconds", type=float, default=8, help="of measuring a row")
    parser.add_argument("--preset", default="gpt2")
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
