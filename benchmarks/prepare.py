"""Tokenising speed and memory: `nanogpt prepare`, raw tiktoken, and nanoGPT's own way, on the same text.

    python benchmarks/prepare.py [--megabytes 200] [--workers 2] [--repeat 3] [--nanogpt CLONE]

Makes its own corpus (jsonl, documents of a few thousand characters). nanoGPT's way is data/openwebtext/prepare.py of
the clone with the corpus and the number of processes put in; it needs the package datasets. Memory is read from /proc.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from nanogpt_cli.data.catalogue import pinned
from nanogpt_cli.data.download import cached
from nanogpt_cli.data.tokenizers import get_tokenizer

LOAD = 'load_dataset("openwebtext", num_proc=num_proc_load_dataset)'


def make_corpus(path: Path, megabytes: int) -> None:
    """Documents of shuffled lines of tiny Shakespeare, with numbers and rare words between them."""
    lines = cached(pinned("input.txt")).read_text(encoding="utf-8").splitlines()
    draw, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            chosen = draw.choices(lines, k=draw.randrange(20, 200))
            for place in range(0, len(chosen), 10):
                chosen[place] += f" {draw.randrange(10**6)} {''.join(draw.choices('etaoinshrdlu', k=8))}"
            text = "\n".join(chosen)
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)


def encode_share(path: str, share: int, shares: int) -> tuple[float, int]:
    """Seconds and tokens of tiktoken alone for one process's share of the documents, which are in memory already."""
    encoding = get_tokenizer("gpt2").encoding  # type: ignore[attr-defined]
    with Path(path).open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if number % shares == share]
    began = time.perf_counter()
    tokens = sum(len(encoding.encode_ordinary(text)) + 1 for text in texts)
    return time.perf_counter() - began, tokens


def raw_tiktoken(path: Path, workers: int) -> tuple[float, int]:
    """Seconds of the slowest of `workers` processes that do nothing but encode, and all tokens."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(encode_share, str(path), share, workers) for share in range(workers)]
        results = [future.result() for future in futures]
    return max(seconds for seconds, _ in results), sum(tokens for _, tokens in results)


def watched(command: list[str], folder: Path) -> tuple[float, list[int]]:
    """Seconds of a command, and the peak resident memory of each of its processes in MB, the largest first."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_megabytes(pid))
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, sorted(peaks.values(), reverse=True)


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = children.read_text().split() if children.exists() else []
    return [pid, *(below for child in found for below in tree(int(child)))]


def peak_megabytes(pid: int) -> int:
    """VmHWM, 0 if the process has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def ours(corpus: Path, workers: int, folder: Path) -> tuple[float, list[int]]:
    """The command as a user types it, from start to exit."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    return watched([sys.executable, "-m", "nanogpt_cli", "prepare", str(corpus), "--tokenizer", "gpt2",
                    "--split", "documents", "--val-fraction", "0.0005", "--workers", str(workers)], folder)  # fmt: skip


def nanogpt(corpus: Path, workers: int, folder: Path, clone: Path) -> tuple[float, list[int]]:
    """nanoGPT's prepare.py, with nothing left in its caches from the time before."""
    script = (clone / "data" / "openwebtext" / "prepare.py").read_text(encoding="utf-8")
    if LOAD not in script or "num_proc = 8" not in script:
        raise SystemExit(f"{clone} holds another prepare.py than the one this benchmark knows")
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    script = script.replace(LOAD, f'load_dataset("json", data_files={str(corpus)!r}, cache_dir={str(cache)!r})')
    target = folder / "prepare.py"
    script = script.replace("num_proc = 8", f"num_proc = {workers}")
    # it parts every split into 1024 portions and fails where there are fewer documents
    script = script.replace("total_batches = 1024", "total_batches = min(1024, len(dset))")
    target.write_text(script, encoding="utf-8")
    return watched([sys.executable, str(target)], folder)


def main() -> None:
    """Run everything `repeat` times, in turns, and show the best of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--nanogpt", type=Path)
    options = parser.parse_args()
    get_tokenizer("gpt2").byte_lengths()  # fetched if need be, and where it lies is in the environment from now on
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        make_corpus(corpus, options.megabytes)
        tokens, rows = 0, dict[str, list[tuple[float, list[int]]]]()
        for _ in range(options.repeat):
            seconds, tokens = raw_tiktoken(corpus, options.workers)
            rows.setdefault("tiktoken alone", []).append((seconds, []))
            rows.setdefault("nanogpt prepare", []).append(ours(corpus, options.workers, folder))
            if options.nanogpt:
                rows.setdefault("nanoGPT's prepare.py", []).append(
                    nanogpt(corpus, options.workers, folder, options.nanogpt)
                )
        print(
            f"{options.megabytes} MB of text, {tokens:,} tokens, {options.workers} processes, best of {options.repeat}"
        )
        for what, results in rows.items():
            seconds, peaks = min(results)
            memory = f"largest process {max(peaks)} MB, sum {sum(peaks)} MB" if peaks else ""
            print(f"{what:22} {seconds:7.1f} s  {tokens / seconds / 1e6:6.2f} M tokens/s  {memory}")


if __name__ == "__main__":
    main()
