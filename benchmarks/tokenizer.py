"""Which tokenizer a small text wants: bits per byte of each at equal training time, with the quick start's model.

    python benchmarks/tokenizer.py english.txt chinese.txt ... [--megabytes 0.3 1 10] [--json out.json]

Every tokenizer gets as many updates as fit into the same processor time, which two short runs tell: CPU seconds, so
that a busy machine changes nothing. Bits per byte are of the best checkpoint, over the whole val split: the last tenth
of the bytes, the same for every tokenizer. Prints a table.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZERS = ["char", "bytes", "bpe:512", "bpe:2048", "bpe:8192", "gpt2"]
PRESET = "--preset=shakespeare_char_cpu"
SHORT, LONGER = 4, 20  # updates of the runs that are timed


def nanogpt(folder: Path, *arguments: str) -> tuple[str, float]:
    """What a command prints, and the CPU seconds it takes."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    line = [sys.executable, "-m", "nanogpt_cli", *arguments]
    printed = subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True).stdout
    return printed, used() - before


def trained(folder: Path, run: str, iters: int, evaluations: int) -> float:
    """CPU seconds of a run of `iters` updates."""
    every = f"--eval-interval={max(1, iters // evaluations)}"
    return nanogpt(
        folder,
        *("train", PRESET, "--dataset=text", f"--run={run}", f"--max-iters={iters}", every),
        *("--log-interval=100", "--no-sample", "--no-final-eval"),
    )[1]


def measured(text: bytes, tokenizer: str, budget: float) -> dict[str, float]:
    """Updates that fit into `budget` CPU seconds, bits per byte after them, and tokens of the train split."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_bytes(text)
        nanogpt(folder, "prepare", "text.txt", "--name=text", f"--tokenizer={tokenizer}")
        few, more = (trained(folder, f"timed{n}", n, 1) for n in (SHORT, LONGER))
        iters = max(12, round(budget * (LONGER - SHORT) / (more - few)))
        trained(folder, "run", iters, 6)
        found = json.loads(nanogpt(folder, "eval", "run", "--json")[0])
        return {"updates": iters, "bits_per_byte": found["bits_per_byte"], "best_step": found["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.3, 1, 10])
    parser.add_argument("--tokenizers", nargs="+", default=TOKENIZERS)
    parser.add_argument("--cpu-seconds", type=float, default=80, help="of updates, for every run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"| text | MB | {' | '.join(args.tokenizers)} |\n|---|--:|{'--:|' * len(args.tokenizers)}")
    for path in args.texts:
        whole = path.read_bytes()
        for megabytes in args.megabytes:
            text = whole[: int(megabytes * 1e6)].decode(errors="ignore").encode()
            cells = []
            for tokenizer in args.tokenizers:
                row = measured(text, tokenizer, args.cpu_seconds)
                rows.append({"text": path.stem, "megabytes": megabytes, "tokenizer": tokenizer, **row})
                cells.append(f"{row['bits_per_byte']:.3f} ({row['updates']:,})")
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            print(f"| {path.stem} | {len(text) / 1e6:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
