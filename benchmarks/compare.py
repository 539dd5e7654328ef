"""nanogpt beside a nanoGPT clone on this machine: training step, sampling, time to a loss, start-up.

    python benchmarks/compare.py PATH-OF-A-NANOGPT-CLONE [step] [sample] [loss] [start] [--rounds 5] [--json out.json]

Both sides take turns, so that a machine whose speed drifts is fair to both; medians and ratios are printed. The clone's
own model.py, train.py and sample.py are run as they stand there. "loss" trains whole commands and takes minutes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.text.prepare import ensure_prepared
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.machine.device import choose_compute
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.bench import Bench
from nanogpt_cli.weights.load import load_model

Row = dict[str, Any]
# preset, changes, vocabulary: nanoGPT's README recipe for a CPU, its character recipe, and GPT-2 with one row
STEPS = [("nanogpt_cpu", {}, 65), ("shakespeare_char", {}, 65), ("gpt2", {"batch_size": 1}, 50304)]
NEW_TOKENS, SAMPLES = 200, 10


def nanogpt_model(clone: Path) -> Any:
    """The clone's model.py as a module."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", clone / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass looks itself up
    with contextlib.redirect_stdout(None):
        spec.loader.exec_module(module)
    return module


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def repeated(work: Callable[[], object], count: int) -> Callable[[], object]:
    return lambda: [work() for _ in range(count)]


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both, after a warm-up each, and the median of the pairwise ratios theirs / ours."""
    ours()
    theirs()
    pairs = [(seconds_of(ours), seconds_of(theirs)) for _ in range(rounds)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def their_step(clone: Path, architecture: ModelSettings, batch: int) -> Callable[[], None]:
    """One update as nanoGPT's train.py takes it on a CPU: float32, AdamW, clipping."""
    module = nanogpt_model(clone)
    a = architecture
    with contextlib.redirect_stdout(None):
        model = module.GPT(
            module.GPTConfig(
                block_size=a.block_size, vocab_size=a.vocab_size, n_layer=a.n_layer, n_head=a.n_head,
                n_embd=a.n_embd, dropout=a.dropout, bias=a.bias,
            )
        )  # fmt: skip
        optimizer = model.configure_optimizers(0.1, 1e-9, (0.9, 0.99), "cpu")
    x = torch.randint(a.vocab_size or 1, (batch, a.block_size))
    y = torch.randint(a.vocab_size or 1, (batch, a.block_size))

    def update() -> None:
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def steps(clone: Path, rounds: int) -> list[Row]:
    """A training step at three sizes, with the settings that `auto` picks."""
    rows = []
    for preset, changes, vocabulary in STEPS:
        config = combine(preset_layer(preset), Layer("benchmark", {"train": changes})).config
        config = config.replace("model", vocab_size=vocabulary)
        architecture = config.model
        compute = choose_compute(config.system, architecture)
        torch.use_deterministic_algorithms(True)  # as our CPU runs always are
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        bench = Bench(config, compute, config.train.batch_size)

        def ours(bench: Bench = bench) -> None:
            bench.micro_steps()
            bench.update()

        theirs = their_step(clone, architecture, config.train.batch_size)
        repeat = 20 if preset == "nanogpt_cpu" else 1
        mine, other, ratio = in_turns(repeated(ours, repeat), repeated(theirs, repeat), rounds)
        name = f"step {preset}, {compute.dtype_name}"
        rows.append(row(name, "ms", 1000 * mine / repeat, 1000 * other / repeat, ratio))
    return rows


def samples(clone: Path, rounds: int) -> list[Row]:
    """Ten samples of 200 tokens from the shape of GPT-2 124M; nanoGPT draws them one after the other."""
    settings = ModelSettings(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257)
    model = GPT(settings, generator=torch.Generator().manual_seed(0)).eval()
    module = nanogpt_model(clone)
    with contextlib.redirect_stdout(None):
        theirs = module.GPT(module.GPTConfig()).eval()
    start = torch.tensor([[50256]])

    def other() -> None:
        with torch.no_grad():
            theirs.generate(start, NEW_TOKENS, temperature=0.8, top_k=200)  # the other nine take as long

    rows = []
    for dtype in (torch.bfloat16, torch.float32):

        def ours(dtype: torch.dtype = dtype) -> None:
            for _ in generate(model, [50256], SAMPLES, Sampling(NEW_TOKENS), token_limit=50257, dtype=dtype):
                pass

        mine, their_s, _ = in_turns(ours, other, min(rounds, 2))
        rates = SAMPLES * NEW_TOKENS / mine, NEW_TOKENS / their_s
        name = f"sample GPT-2 124M, {str(dtype).removeprefix('torch.')}"
        rows.append(row(name, "tokens/s", *rates, rates[0] / rates[1]))
    return rows


def losses(clone: Path, rounds: int) -> list[Row]:
    """Wall clock of whole commands, and the loss over the whole val split of what they leave."""
    folder = Path(tempfile.mkdtemp())
    with contextlib.chdir(folder):
        ensure_prepared("shakespeare_char")
    data = folder / "data" / "shakespeare_char"
    clone_data = folder / "nanogpt" / "data" / "shakespeare_char"
    clone_data.mkdir(parents=True)
    for split in ("train.bin", "val.bin"):
        (clone_data / split).symlink_to(data / split)
    (folder / "nanogpt" / "configurator.py").symlink_to(clone.absolute() / "configurator.py")  # read by a relative name
    tokenizer = open_data_set(data).tokenizer
    assert tokenizer is not None
    letters = [tokenizer.decode([i]) for i in range(tokenizer.size)]
    with (clone_data / "meta.pkl").open("wb") as file:
        pickle.dump(
            {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}, file
        )
    recipe = {
        "device": "cpu", "compile": False, "eval_iters": 20, "log_interval": 1, "block_size": 64, "batch_size": 12,
        "n_layer": 4, "n_head": 4, "n_embd": 128, "max_iters": 2000, "lr_decay_iters": 2000, "dropout": 0.0,
        "out_dir": "out",
    }  # fmt: skip
    flags = [f"--{key}={value}" for key, value in recipe.items()]
    theirs = [
        sys.executable,
        str(clone.absolute() / "train.py"),
        str(clone.absolute() / "config/train_shakespeare_char.py"),
        *flags,
    ]
    nanogpt = [sys.executable, "-m", "nanogpt_cli", "train", "--run"]
    commands = {
        "nanoGPT, README recipe for a CPU": (theirs, folder / "nanogpt", "nanogpt/out"),
        "--preset nanogpt_cpu": ([*nanogpt, "a", "--preset", "nanogpt_cpu"], folder, "a"),
        "--preset shakespeare_char_cpu": ([*nanogpt, "b", "--preset", "shakespeare_char_cpu"], folder, "b"),
        "the same, cut short": ([*nanogpt, "c", "--preset", "shakespeare_char_cpu", *QUICK], folder, "c"),
    }
    rows = []
    for name, (command, cwd, model) in commands.items():
        began = time.perf_counter()
        subprocess.run(
            command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(clone.absolute())}, check=True, capture_output=True
        )
        seconds = time.perf_counter() - began
        evaluation = [sys.executable, "-m", "nanogpt_cli", "eval", model, "--data-dir", str(data), "--json"]
        out = subprocess.run(evaluation, cwd=folder, check=True, capture_output=True, text=True).stdout
        rows.append({"what": name, "unit": "s", "seconds": seconds, "val_loss": json.loads(out)["loss"]})
        print(f"{name:<40} {seconds:7.1f} s   val {rows[-1]['val_loss']:.4f}", flush=True)
    return rows


QUICK = ["--max-iters", "200", "--batch-size", "12"]


def starts(clone: Path, rounds: int) -> list[Row]:
    """`--help` beside `import typer`, and the first character of a sample beside `import torch`."""
    python = sys.executable
    help_ = [python, "-m", "nanogpt_cli", "train", "--help"]
    rows = []
    mine, other, ratio = in_turns(lambda: quiet(help_), lambda: quiet([python, "-c", "import typer"]), max(rounds, 7))
    rows.append(row("train --help, beside import typer", "s", mine, other, ratio))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with contextlib.chdir(folder):
            ensure_prepared("shakespeare_char")
        train = ["train", "--preset", "nanogpt_cpu", "--max-iters", "2", "--eval-iters", "1"]
        quiet([python, "-m", "nanogpt_cli", *train, "--run", str(run)], folder)

        def first_character() -> None:
            sample = [python, "-m", "nanogpt_cli", "sample", str(run)]
            with subprocess.Popen(sample, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                process.stdout.read(1)
                process.kill()

        mine, other, ratio = in_turns(first_character, lambda: quiet([python, "-c", "import torch"]), max(rounds, 7))
        rows.append(row("first character of sample, beside import torch", "s", mine, other, ratio))
        load_model(str(run))  # what was timed is a real run
    return rows


def quiet(command: list[str], cwd: str | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd=cwd)


def row(what: str, unit: str, ours: float, theirs: float, ratio: float) -> Row:
    print(f"{what:<48} ours {ours:10.4g} {unit:<9} theirs {theirs:10.4g} {unit:<9} ratio {ratio:.2f}", flush=True)
    return {"what": what, "unit": unit, "ours": ours, "theirs": theirs, "ratio": ratio}


PARTS = {"step": steps, "sample": samples, "start": starts, "loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}")
    rows = [r for part in args.parts or ["step", "sample", "start"] for r in PARTS[part](args.clone, args.rounds)]
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
