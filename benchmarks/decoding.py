"""Tokens a second of one model in several programs, on a CPU: ours, Transformers, CTranslate2.

    pip install transformers ctranslate2 safetensors huggingface_hub
    python benchmarks/decoding.py [--layers 12 --width 768] [--rows 1 10] [--rounds 3]

A GPT-2 of random weights is exported once and read by all; each draws --tokens new tokens for every row, in turns, and
medians are printed with their ratio to ours in bfloat16. int8 is CTranslate2's, weights and activations.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import get_tokenizer
from nanogpt_cli.model.generate import Sampling, generate
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.weights.export import export
from nanogpt_cli.weights.load import LoadedModel

END, ROWS = 50256, 50257
Draw = Callable[[int, int], object]  # so many rows, so many new tokens each


def ours(model: GPT, dtype: torch.dtype) -> Draw:
    def draw(rows: int, tokens: int) -> None:
        for _ in generate(model, [END], rows, Sampling(tokens), token_limit=ROWS, dtype=dtype):
            pass

    return draw


def transformers(folder: Path, dtype: torch.dtype) -> Draw:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).to(dtype).eval()

    def draw(rows: int, tokens: int) -> None:
        start = torch.full((rows, 1), END)
        limits = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": END}
        with torch.no_grad():
            model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=200, **limits)

    return draw


def ctranslate2(folder: Path, kind: str) -> Draw:
    from ctranslate2 import Generator
    from ctranslate2.converters import TransformersConverter

    converted = str(folder.with_name(f"ct2-{kind}"))
    TransformersConverter(str(folder)).convert(converted, quantization=kind)
    model = Generator(converted, device="cpu", compute_type=kind, intra_threads=torch.get_num_threads())

    def draw(rows: int, tokens: int) -> None:
        start = [["<|endoftext|>"]] * rows
        limits = {"min_length": tokens, "max_length": tokens, "include_prompt_in_result": False}
        model.generate_batch(start, sampling_topk=200, sampling_temperature=0.8, **limits)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 768), ("tokens", 100), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10])
    args = parser.parse_args()
    shape: dict[str, int] = {"n_layer": args.layers, "n_head": args.width // 64, "n_embd": args.width}
    settings = ModelSettings(**shape, block_size=1024, vocab_size=ROWS)  # type: ignore[arg-type]
    model = GPT(settings, generator=torch.Generator().manual_seed(0)).eval()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        export(LoadedModel(model, get_tokenizer("gpt2"), "random weights"), folder, torch.float32)
        sides = {
            "nanogpt, bfloat16": ours(model, torch.bfloat16),
            "nanogpt, float32": ours(model, torch.float32),
            "Transformers, bfloat16": transformers(folder, torch.bfloat16),
            "Transformers, float32": transformers(folder, torch.float32),
            "CTranslate2, float32": ctranslate2(folder, "float32"),
            "CTranslate2, int8": ctranslate2(folder, "int8_float32"),
        }
        print(f"{'tokens/s':26}" + "".join(f"{rows:>10} rows" + " " * 8 for rows in args.rows))
        rates: dict[str, list[list[float]]] = {name: [[] for _ in args.rows] for name in sides}
        for _ in range(args.rounds):
            for name, draw in sides.items():
                for found, rows in zip(rates[name], args.rows, strict=True):
                    began = time.perf_counter()
                    draw(rows, args.tokens)
                    found.append(rows * args.tokens / (time.perf_counter() - began))
    base = [statistics.median(found) for found in rates["nanogpt, bfloat16"]]
    for name, each in rates.items():
        medians = [statistics.median(found) for found in each]
        cells = (f"{m:>10,.0f} ({m / b:4.2f}x)     " for m, b in zip(medians, base, strict=True))
        print(f"{name:26}" + "".join(cells))


if __name__ == "__main__":
    main()
