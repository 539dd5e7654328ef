"""The law behind `--minutes` and `--depth`: a grid of short runs, and constants fitted to their losses.

    python benchmarks/law.py run RUNS.jsonl --words english.txt    hours on two cores; goes on where it was cut
    python benchmarks/law.py fit RUNS.jsonl                        the constants for config/family.py

Every cell is the family's own recipe for a depth and a number of tokens, on one of three texts: Tiny Shakespeare by
characters, its first 200 kB, and --words, a text of ten megabytes read by a BPE of 2,048 ids. Some cells change a
rate or the dropout. Losses are of the best checkpoint over the whole val split, in nats a token.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from nanogpt_cli.config.family import Law, Text, block_weights, family_layer, most_tokens
from nanogpt_cli.data.tokens.data_set import open_data_set

SMALL = 222_000  # characters
GRID = {  # by text, depths with the millions of tokens that they read
    "shakespeare_char": {1: (0.5, 1, 2, 4), 2: (0.5, 1, 2, 4), 3: (0.5, 1, 2), 4: (0.5, 1, 2)},
    "small": {1: (0.5, 1, 2), 2: (0.5, 1, 2), 3: (0.5, 1)},
    "words": {1: (0.5, 1, 2), 2: (0.5, 1, 2), 3: (1, 2)},
}
CHANGED: list[tuple[str, int, float, dict[str, Any]]] = [
    *(("shakespeare_char", 2, 1, {"muon_lr": rate}) for rate in (0.02, 0.08)),
    *(("shakespeare_char", 2, 1, {"learning_rate": rate}) for rate in (3e-3, 1.2e-2)),
    *(("shakespeare_char", 3, 0.5, {"muon_lr": rate}) for rate in (0.02, 0.04)),
    *(("small", 2, 2, {"dropout": share}) for share in (0.1, 0.2)),
    ("small", 3, 1, {"dropout": 0.1}),
    ("shakespeare_char", 2, 4, {"dropout": 0.1}),
]
POWERS, WORTHS = np.arange(0.1, 1.01, 0.05), (2, 4, 8, 15, 30)  # that are tried


def nanogpt(folder: Path, *arguments: str) -> str:
    line = [sys.executable, "-m", "nanogpt_cli", *arguments]
    return subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True).stdout


def cells() -> list[dict[str, Any]]:
    grid: list[tuple[str, int, float, dict[str, Any]]] = [
        (name, depth, m, {}) for name, depths in GRID.items() for depth, many in depths.items() for m in many
    ]
    rows = [{"text": t, "depth": d, "tokens": round(m * 1e6), "changed": c} for t, d, m, c in [*grid, *CHANGED]]
    return sorted(rows, key=lambda cell: cell["depth"] ** 3 * cell["tokens"])


def trained(folder: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """The cell with what came of it."""
    data_set = open_data_set(folder / "data" / cell["text"])
    text = Text(data_set.train.count, data_set.val.count, data_set.vocab_size)
    layer = family_layer(cell["depth"], cell["tokens"], text, ranks=1, given=cell["changed"])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "cell.toml").write_text(tomli_w.dumps(layer.tables), encoding="utf-8")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in cell["changed"].items()]
        lines = "--no-sample", "--json", "--log-interval=100", f"--dataset={cell['text']}", f"--run={place}/run"
        told = json.loads(nanogpt(folder, "train", f"--config={place}/cell.toml", *lines, *flags))
    weights = block_weights(cell["depth"], cell["changed"])
    return {**cell, "weights": weights, "text_tokens": text.tokens, "loss": told["evaluation"]["loss"]}


def run(out: Path, words: Path) -> None:
    done = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    known = [{key: row[key] for key in ("text", "depth", "tokens", "changed")} for row in done]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nanogpt(folder, "prepare", "shakespeare_char")
        whole = open_data_set(folder / "data/shakespeare_char")
        assert whole.tokenizer is not None
        (folder / "small.txt").write_text(
            whole.tokenizer.decode(whole.train.read(np.array([0]), SMALL)[0].tolist()), encoding="utf-8"
        )
        nanogpt(folder, "prepare", "small.txt", "--tokenizer=char")
        nanogpt(folder, "prepare", str(words.absolute()), "--name=words", "--tokenizer=bpe:2048")
        for cell in cells():
            if cell not in known:
                row = trained(folder, cell)
                print(row, flush=True)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def fitted(rows: list[dict[str, Any]]) -> Law:
    """Least squares: linear in factors and in a floor for each text, over a grid of the powers and of `worth`.

    The law's floor is that of the longest text.
    """
    texts = sorted({(row["text_tokens"], row["text"]) for row in rows}, reverse=True)
    loss, best = np.array([row["loss"] for row in rows]), None
    floors = [[float(row["text"] == text) for row in rows] for _, text in texts]
    for a, b, worth in itertools.product(POWERS, POWERS, WORTHS):
        law = Law(0.0, 0.0, a, 1.0, b, worth, "", 0.0)
        lengths = [law.expected(1.0, row["tokens"], row["text_tokens"]) for row in rows]
        terms = np.stack([*floors, [row["weights"] ** -a for row in rows], lengths], axis=1)
        factors, *_ = np.linalg.lstsq(terms, loss, rcond=None)
        error = float(np.sqrt(np.mean((terms @ factors - loss) ** 2)))
        if min(factors[-2:]) > 0 and (best is None or error < best.spread):
            best = Law(factors[0], factors[-2], float(a), factors[-1], float(b), worth, texts[0][1], error)
    assert best is not None
    return best


def fit(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for name, texts in (("CHARACTERS", ("shakespeare_char", "small")), ("WORDS", ("words",))):
        of_them = [row for row in rows if row["text"] in texts and not row["changed"]]
        print(f"{name} = {fitted([row for row in of_them if row['tokens'] <= bears(row)])}")
    for row in sorted(rows, key=lambda row: (row["text"], row["depth"], row["tokens"])):
        print(row)


def bears(row: dict[str, Any]) -> float:
    """Tokens up to which the law is meant to hold."""
    return most_tokens(row["weights"], Text(row["text_tokens"], 0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["run", "fit"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--words", type=Path)
    args = parser.parse_args()
    if args.job == "run":
        run(args.runs, args.words)
    else:
        fit(args.runs)


if __name__ == "__main__":
    main()
