"""The training loader beside nanoGPT's get_batch: the same file, the same shapes, in turns.

    python benchmarks/loader.py PATH-OF-A-NANOGPT-CLONE [--megabytes 200] [--rounds 15] [--json results.json]

nanoGPT's function is taken out of the clone's train.py as it stands there. Both are asked for batches without pause;
"waited" is what a step of --step-ms waits for its batch, which ours has read ahead. Medians over the rounds.
"""

import argparse
import ast
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanogpt_cli.config.derived import Split
from nanogpt_cli.data.tokens.batches import Batches
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.data.tokens.rows import RowOrder

SHAPES = [(12, 64), (64, 256), (12, 1024)]  # batch, block: nanoGPT's CPU, shakespeare_char and GPT-2 recipes


def get_batch_of(clone: Path, folder: Path, batch_size: int, block_size: int) -> Callable[[str], Any]:
    """nanoGPT's own function, with the settings it reads as globals."""
    tree = ast.parse((clone / "train.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_batch")
    settings: dict[str, Any] = {
        "np": np, "torch": torch, "os": os, "data_dir": str(folder), "device": "cpu", "device_type": "cpu",
        "batch_size": batch_size, "block_size": block_size,
    }  # fmt: skip
    exec(compile(ast.Module([function], []), str(clone / "train.py"), "exec"), settings)
    get_batch: Callable[[str], Any] = settings["get_batch"]
    return get_batch


def time_a_batch(call: Callable[[], Any], count: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def measure(clone: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of results a shape."""
    tokens, results = open_data_set(folder, trusted=True).train, []
    for batch_size, block_size in SHAPES:
        theirs = get_batch_of(clone, folder, batch_size, block_size)
        order = RowOrder(tokens.count, block_size, 1337, "shuffled")
        split = Split(batch_size, 1, 1)
        with Batches(tokens, order, split, 0, first_row=0, vocab_size=50_304, device="cpu") as ours:
            rounds: dict[str, list[float]] = {"nanogpt": [], "ours": [], "waited": []}
            for _ in range(args.rounds):
                rounds["nanogpt"].append(time_a_batch(functools.partial(theirs, "train"), args.batches))
                rounds["ours"].append(time_a_batch(ours.__next__, args.batches))
                before = ours.waited_s
                for _ in range(20):
                    next(ours)
                    time.sleep(args.step_ms / 1e3)
                rounds["waited"].append((ours.waited_s - before) / 20 * 1e6)
        medians = {key: statistics.median(values) for key, values in rounds.items()}
        spread = {key: [min(values), max(values)] for key, values in rounds.items()}
        results.append({"batch": batch_size, "block": block_size, "median_us": medians, "min_max_us": spread})
    return results


def show(results: list[dict[str, Any]], step_ms: float) -> None:
    """The table for people."""
    print(f"{'batch x block':>14} {'nanoGPT':>12} {'ours':>12} {'ratio':>7}   waited in a {step_ms:g} ms step")
    for row in results:
        us = row["median_us"]
        shape = f"{row['batch']} x {row['block']}"
        share = us["waited"] / (step_ms * 10)
        print(
            f"{shape:>14} {us['nanogpt']:>9.0f} us {us['ours']:>9.0f} us {us['nanogpt'] / us['ours']:>6.2f}x"
            f"   {us['waited']:.0f} us = {share:.2f}%"
        )


def main() -> None:
    """Measure, show, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        ids = np.random.default_rng(0).integers(0, 50_257, args.megabytes * 500_000, dtype=np.uint16)
        for split in ("train", "val"):
            ids.tofile(Path(name) / f"{split}.bin")
        results = measure(args.clone, Path(name), args)
    show(results, args.step_ms)
    if args.json:
        machine = {
            "cpu": platform.processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        args.json.write_text(json.dumps({"machine": machine, "settings": vars(args), "results": results}, default=str))


if __name__ == "__main__":
    main()
