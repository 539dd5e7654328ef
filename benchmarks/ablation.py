"""What each idea of the modern recipe brings, alone and all together: loss over the whole val split, equal tokens.

    python benchmarks/ablation.py [--iters 1000] [--seeds 2] [--json out.json]

GPT-2's architecture at 4 layers and width 128, on shakespeare_char; AdamW at its best rate there. Prints a table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE = [
    *("--preset=nanogpt_cpu", "--sampling=shuffled", "--activation=gelu_tanh", "--eval-iters=5", "--log-interval=100"),
    *("--learning-rate=3e-3", "--min-lr=3e-4", "--muon-lr=0.02"),
]
SWITCHES = {
    "activation relu2": ["--activation=relu2"],
    "position rotary": ["--position=rotary"],
    "norm rmsnorm": ["--norm=rmsnorm"],
    "qk_norm": ["--qk-norm"],
    "embed_norm": ["--embed-norm"],
    "tie_weights off": ["--no-tie-weights"],
    "zero_init": ["--zero-init"],
    "logit_softcap 15": ["--logit-softcap=15"],
    "schedule linear": ["--schedule=linear", "--min-lr=0"],
    "optimizer muon": ["--optimizer=muon"],
}


def trained(folder: Path, flags: list[str]) -> tuple[float, float]:
    """Nats over the val split, and seconds of the whole command."""
    nanogpt = [sys.executable, "-m", "nanogpt_cli"]
    run = tempfile.mkdtemp(dir=folder) + "/run"
    began = time.perf_counter()
    subprocess.run([*nanogpt, "train", "--run", run, *flags], cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    evaluate = [*nanogpt, "eval", run, "--checkpoint", "last", "--json"]
    out = subprocess.run(evaluate, cwd=folder, check=True, capture_output=True, text=True).stdout
    return json.loads(out)["loss"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iters", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    variants = {"gpt2": [], **SWITCHES, "all together": [flag for flags in SWITCHES.values() for flag in flags]}
    rows = []
    print("| variant | val loss | against gpt2 | seconds |\n|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in variants.items():
            flags = [*BASE, f"--max-iters={args.iters}", f"--lr-decay-iters={args.iters}", *changes]
            runs = [trained(Path(folder), [*flags, f"--seed={seed}"]) for seed in range(args.seeds)]
            loss, seconds = (statistics.mean(values) for values in zip(*runs, strict=True))
            rows.append({"variant": name, "val_loss": loss, "seconds": seconds, "losses": [loss for loss, _ in runs]})
            print(f"| {name} | {loss:.3f} | {loss - rows[0]['val_loss']:+.3f} | {seconds:.0f} |", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
