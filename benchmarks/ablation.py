"""What each idea of an architecture brings: loss over the whole val split after equal tokens, on shakespeare_char.

    python benchmarks/ablation.py [gpt2 | quick] [--iters 1000] [--seeds 2] [--json out.json]

"gpt2" adds the ideas of the modern recipe to GPT-2's architecture, alone and all together, at 4 layers and width 128,
with AdamW at its best rate there. "quick" takes the quick start and changes one thing at a time. Prints a table.
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
ADDED = {
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
BEFORE = ["--activation=relu2", "--rope-theta=none", "--embed-norm", "--no-qk-gain"]  # the quick start's first recipe
CHANGED = {
    "relu2, half rotary, embed_norm, no gains": BEFORE,
    "activation relu2": ["--activation=relu2"],
    "rope_theta 10000": ["--rope-theta=10000"],
    "half rotary": ["--rope-theta=none"],
    "qk_gain off": ["--no-qk-gain"],
    "qk_norm off (Llama)": ["--no-qk-gain", "--no-qk-norm"],
    "embed_norm": ["--embed-norm"],
    "zero_init off": ["--no-zero-init"],
    "logit_softcap 15": ["--logit-softcap=15"],
    "tie_weights": ["--tie-weights"],
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
    parser.add_argument("base", nargs="?", choices=["gpt2", "quick"], default="gpt2")
    parser.add_argument("--iters", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base, variants = ["--preset=shakespeare_char_cpu"], {"the quick start": [], **CHANGED}
    if args.base == "gpt2":
        together = [flag for flags in ADDED.values() for flag in flags]
        base, variants = BASE, {"gpt2": [], **ADDED, "all together": together}
    rows = []
    print(f"| variant | val loss | against {args.base} | seconds |\n|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in variants.items():
            flags = [*base, f"--max-iters={args.iters}", f"--lr-decay-iters={args.iters}", *changes]
            runs = [trained(Path(folder), [*flags, f"--seed={seed}"]) for seed in range(args.seeds)]
            loss, seconds = (statistics.mean(values) for values in zip(*runs, strict=True))
            rows.append({"variant": name, "val_loss": loss, "seconds": seconds, "losses": [loss for loss, _ in runs]})
            print(f"| {name} | {loss:.3f} | {loss - rows[0]['val_loss']:+.3f} | {seconds:.0f} |", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
