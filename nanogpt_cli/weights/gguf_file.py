"""GGUF, the one-file format of llama.cpp and Ollama: GPT-2, Llama and Qwen3, with a byte pair encoding.

llama.cpp turns neighbouring numbers of a head where we and Hugging Face turn halves, so the rows of q and k are
interleaved for the architecture llama; for qwen3 it turns halves.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import Tokenizer
from nanogpt_cli.errors import NanogptError, UserError, package
from nanogpt_cli.files import disk_full_named, sync_file, sync_folder, temporary_folder
from nanogpt_cli.model.build import meta_parameters
from nanogpt_cli.model.gpt import matrix_heights
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.weights.hugging_face import leaves_as
from nanogpt_cli.weights.tokenizer_json import END, describe

GgufType = Literal["f32", "f16", "q8_0"]
OUTER = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
INNER = {
    "ln_1": "attn_norm",
    "attn.c_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ln_2": "ffn_norm",
    "mlp.c_proj": "ffn_down",
}
# one matrix of ours: as GPT-2 has it, and as the others do
SPLIT = {"attn.c_attn": ("attn_qkv", ("attn_q", "attn_k", "attn_v")), "mlp.c_fc": ("ffn_up", ("ffn_gate", "ffn_up"))}


def export_gguf(
    settings: ModelSettings,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer | None,
    path: Path,
    kind: GgufType,
    progress: Progress = QUIET,
) -> int:
    """Write a model to the new file `path`, read it back and compare; how many tensors.

    Args:
        tensors: float32, by our names, without padding rows.
        kind: number format of the matrices; vectors stay float32, and so do rows that q8_0 cannot cut into 32s.

    Raises:
        UserError: `path` exists, the package gguf is missing, or an architecture or tokenizer that the format lacks.
        NanogptError: what was read back differs; nothing is left behind.
    """
    architecture, obstacles = leaves_as(settings)
    if not architecture:
        raise UserError(
            f"{path}: no GGUF of this architecture, since llama.cpp lacks it. In the way, with what a new run would "
            f"need instead: {', '.join(obstacles)}."
        )
    if architecture == "gpt2" and settings.inner_width != 4 * settings.n_embd:
        raise UserError(f"{path}: no GGUF of this architecture: llama.cpp's GPT-2 has n_inner = 4 n_embd alone.")
    if path.exists():
        raise UserError(f"{path} exists already, and nothing is overwritten. Name a new file.")
    gguf = package("gguf", "Writing GGUF")
    vocabulary = _vocabulary(tokenizer, path, progress)
    stored = {name: _stored(name, array, kind) for name, array in _arrays(settings, tensors, architecture).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full_named(path), temporary_folder(path) as folder:
        file = folder / path.name
        writer = gguf.GGUFWriter(file, architecture)
        _describe(writer, settings, architecture)
        writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])
        for key, values in vocabulary.items():
            getattr(writer, key)(values)
        for name, array in stored.items():
            writer.add_tensor(
                name, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync_file(file)
        read = {t.name: t.data for t in gguf.GGUFReader(file).tensors}
        wrong = [n for n, array in stored.items() if n not in read or not np.array_equal(read[n], array)]
        if wrong or len(read) != len(stored):
            raise NanogptError(f"Export failed: {', '.join(wrong) or 'the set of tensors'} reads back differently.")
        file.replace(path)
        sync_folder(path.parent)
    return len(stored)


def _describe(writer: Any, s: ModelSettings, architecture: str) -> None:
    writer.add_vocab_size(s.vocab_size)
    writer.add_block_count(s.n_layer)
    writer.add_context_length(s.block_size)
    writer.add_embedding_length(s.n_embd)
    writer.add_feed_forward_length(s.inner_width)
    writer.add_head_count(s.n_head)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(s.eps)
        return
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_width)
    writer.add_value_length(s.head_width)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_rope_dimension_count(s.head_width)
    writer.add_rope_freq_base(s.rope_theta)


def _arrays(settings: ModelSettings, tensors: dict[str, Tensor], architecture: str) -> dict[str, npt.NDArray[Any]]:
    """The tensors under GGUF's names; zeros where GPT-2's readers expect biases."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, p in meta_parameters(replace(settings, bias=architecture == "gpt2")).items():
        array = tensors[name].numpy() if name in tensors else np.zeros(p.shape, np.float32)
        module, _, end = name.rpartition(".")
        if not module.startswith("h."):
            found[f"{OUTER[module]}.{end}"] = array
            continue
        _, number, module = module.split(".", 2)
        if module in INNER or architecture == "gpt2":
            found[f"blk.{number}.{INNER.get(module) or SPLIT[module][0]}.{end}"] = array
            continue
        parts = np.split(array, np.cumsum(matrix_heights(settings, name, len(array)))[:-1])
        for part, rows in zip(SPLIT[module][1], parts, strict=True):
            turned = architecture == "llama" and part in ("attn_q", "attn_k")
            found[f"blk.{number}.{part}.{end}"] = _interleaved(rows, settings.head_width) if turned else rows
    return found


def _interleaved(rows: npt.NDArray[Any], head_width: int) -> npt.NDArray[Any]:
    """Rows i and i + hs/2 of each head as neighbours: (heads hs, C)."""
    return rows.reshape(-1, 2, head_width // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _stored(name: str, array: npt.NDArray[Any], kind: GgufType) -> npt.NDArray[Any]:
    import gguf

    if array.ndim == 1 or kind == "f32" or name.startswith("position_embd"):  # as llama.cpp's converter
        return np.ascontiguousarray(array)
    if kind == "f16" or array.shape[1] % 32:
        return array.astype(np.float16)
    quantized: npt.NDArray[Any] = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
    return quantized


def _vocabulary(tokenizer: Tokenizer | None, path: Path, progress: Progress) -> dict[str, Any]:
    """Values by the writer's methods."""
    found = None if tokenizer is None else describe(tokenizer, progress)
    model = found["model"] if found else {}
    if tokenizer is None or tokenizer.kind not in ("gpt2", "bpe") or not model.get("merges"):
        kind = "no tokenizer" if tokenizer is None else f"the tokenizer {tokenizer.kind}"
        raise UserError(
            f"{path}: GGUF is written with GPT-2's byte pair encoding or one's own, and this model has {kind}. Export "
            "a folder instead, or train on text that was prepared with --tokenizer gpt2 or bpe:4096."
        )
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), END]
    return {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": "gpt-2",
        "add_token_list": tokens,
        "add_token_types": [1] * (len(tokens) - 1) + [3],  # normal, control
        "add_token_merges": [" ".join(pair) for pair in model["merges"]],
        "add_bos_token_id": tokenizer.eot,
        "add_eos_token_id": tokenizer.eot,
        "add_add_bos_token": False,
    }
