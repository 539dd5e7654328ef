"""A model as a folder for other programs: Hugging Face's GPT-2, Llama or Qwen3, our own description where it is none.

The folder is written beside its final name, read back with our own reader, compared, and only then renamed.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.errors import NanogptError, UserError, package
from nanogpt_cli.files import disk_full_named, remove_leftovers, sync_file, sync_folder, temporary_folder, write_bytes
from nanogpt_cli.model.build import meta_parameters
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.weights.gguf_file import GgufType, export_gguf
from nanogpt_cli.weights.hugging_face import HEAD, LAYOUTS, OURS, config_of, leaves_as, plain, read_folder
from nanogpt_cli.weights.load import LoadedModel
from nanogpt_cli.weights.pretrained import CONFIG, WEIGHTS
from nanogpt_cli.weights.tokenizer_json import tokenizer_files


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: str  # "gpt2", "llama", "qwen3", "nanogpt" or "gguf"
    tensors: int
    parameters: int
    bytes: int
    notes: list[str]  # who can read it, and what was changed on the way


def export(loaded: LoadedModel, folder: Path, dtype: torch.dtype, progress: Progress = QUIET) -> Exported:
    """Write a model with its tokenizer and a model card to the new folder `folder`.

    Raises:
        UserError: the folder exists and is not empty, or the package safetensors is not installed.
        NanogptError: what was read back differs from what was to be written; nothing is left behind.
        DiskFullError: no room; nothing is left behind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already, and nothing is overwritten. Name a new folder.")
    safetensors = package("safetensors.torch", "export")
    settings, tensors, notes = _prepared(loaded, dtype)
    kind, obstacles = leaves_as(settings)
    notes = [_readers(kind, obstacles), *notes, *_remarks(settings)]
    files = _descriptions(loaded, settings, kind, dtype)
    if loaded.tokenizer is None:
        notes.append("There is no tokenizer to go with the model: readers have to work with ids.")
    else:
        files |= tokenizer_files(loaded.tokenizer, settings.block_size, progress)
        if "tokenizer.json" not in files:
            named = f"the tokenizer {loaded.tokenizer.kind} from tokenizer.toml; others know its name"
            notes.append(f"Only `nanogpt` reads {named}.")
    stored = tensors
    if kind == "gpt2":  # its readers expect biases
        with_biases = meta_parameters(replace(settings, bias=True))
        stored = tensors | {n: torch.zeros(p.shape, dtype=dtype) for n, p in with_biases.items() if n not in tensors}
    if kind:
        stored = LAYOUTS[kind].to_theirs(settings, stored)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    with disk_full_named(folder), temporary_folder(folder) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in stored.items()}
        safetensors.save_file(contiguous, temporary / WEIGHTS, metadata={"format": "pt"})
        sync_file(temporary / WEIGHTS)
        for name, content in files.items():
            write_bytes(temporary / name, content)
        _compare(temporary, settings, tensors)
        temporary.replace(folder)
        sync_folder(folder.parent)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, kind or OURS, len(tensors), sum(t.numel() for t in tensors.values()), size, notes)


def export_file(loaded: LoadedModel, path: Path, kind: GgufType, progress: Progress = QUIET) -> Exported:
    """Write a model with its tokenizer to the new GGUF file `path`; errors as for `export_gguf`."""
    settings, tensors, notes = _prepared(loaded, torch.float32)
    count = export_gguf(settings, tensors, loaded.tokenizer, path, kind, progress)
    parameters = sum(t.numel() for t in tensors.values())
    notes = ["A GGUF file for llama.cpp and what builds on it, such as Ollama.", *notes, *_remarks(settings)]
    return Exported(path, "gguf", count, parameters, path.stat().st_size, notes)


def _descriptions(loaded: LoadedModel, settings: ModelSettings, kind: str, dtype: torch.dtype) -> dict[str, bytes]:
    """config.json and its like, and the model card."""
    numbers = dict.fromkeys(("bos_token_id", "eos_token_id"), loaded.tokenizer.eot if loaded.tokenizer else None)
    config: dict[str, Any] = config_of(settings, kind) if kind else {"model_type": OURS, OURS: asdict(settings)}
    # Transformers 4 reads torch_dtype, 5 dtype
    config |= numbers | dict.fromkeys(("dtype", "torch_dtype"), _name(dtype))
    found = {"README.md": _card(loaded, kind).encode(), CONFIG: json.dumps(config, indent=2).encode()}
    return found | ({"generation_config.json": json.dumps(numbers).encode()} if kind else {})


def _card(loaded: LoadedModel, kind: str) -> str:
    """The folder's README: what the model is, what it was trained on, and how to use it."""
    settings, lines = loaded.model.config, [f"# {loaded.source}", ""]
    if kind:
        lines[:0] = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    count, family = sum(p.numel() for p in loaded.model.parameters()), LAYOUTS[kind].family if kind else "its own kind"
    lines += [f"- {family}, {count:,} parameters, context {settings.block_size:,}"]
    lines += [f"- tokenizer: {loaded.tokenizer.kind if loaded.tokenizer else 'none'}"]
    if loaded.config is not None and loaded.step:
        train = loaded.config.train
        seen = loaded.step * train.batch_size * train.gradient_accumulation_steps * settings.block_size
        start = f", from {train.init_from}" if train.init_from else ""
        lines += [f"- trained with nanogpt on {loaded.config.data.dataset}: {seen:,} tokens{start}"]
    return "\n".join([*lines, "", "To write text: `nanogpt sample FOLDER`."]) + "\n"


def _prepared(loaded: LoadedModel, dtype: torch.dtype) -> tuple[ModelSettings, dict[str, Tensor], list[str]]:
    """Settings and weights to write, by our names: padding rows cut, converted to `dtype`."""
    settings, notes = loaded.model.config, []
    tensors = {name: p.detach().cpu() for name, p in loaded.model.named_parameters()}
    rows, padded = loaded.token_limit, len(tensors["wte.weight"])
    if rows < padded:
        tensors |= {name: tensors[name][:rows] for name in ("wte.weight", HEAD) if name in tensors}
        settings = replace(settings, vocab_size=rows)
        notes.append(f"The token table was cut from {padded:,} to {rows:,} rows: the others are padding.")
    if dtype != torch.float32:
        notes.append(f"Weights were rounded from float32 to {_name(dtype)}.")
    return settings, {name: t.to(dtype).contiguous() for name, t in tensors.items()}, notes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(folder: Path, settings: ModelSettings, tensors: dict[str, Tensor]) -> None:
    """Read the folder as anyone would, and hold it against what was meant, bit for bit."""
    read_settings, read_tensors, _ = read_folder(folder)
    if replace(read_settings, dropout=settings.dropout, zero_init=settings.zero_init) != plain(settings):
        raise NanogptError(f"Export failed: the settings read back as {read_settings}.")
    wrong = [n for n, t in tensors.items() if n not in read_tensors or not torch.equal(read_tensors[n], t)]
    if wrong or len(read_tensors) != len(tensors):
        raise NanogptError(f"Export failed: {', '.join(wrong) or 'the set of tensors'} reads back differently.")


def _readers(kind: str, obstacles: list[str]) -> str:
    if kind:
        readers = "transformers and `nanogpt` read it; written for vLLM and llama.cpp too"
        return f"A Hugging Face {LAYOUTS[kind].family} folder: {readers}."
    return (
        "This architecture is none that others know, so transformers, vLLM and llama.cpp cannot run it: the folder "
        "holds safetensors by our own names and our own config.json, and `nanogpt` reads it. In the way, with what a "
        f"new run would need instead: {', '.join(obstacles)}."
    )


def _remarks(settings: ModelSettings) -> list[str]:
    if leaves_as(settings)[0] != "gpt2":
        return []
    zeros = "The model has no biases; zeros were written, as GPT-2's readers expect. Outputs are the same."
    gelu = "The model has the exact GELU; llama.cpp always computes the tanh form, so it would be slightly off there."
    return [*([] if settings.bias else [zeros]), *([gelu] if settings.activation == "gelu" else [])]
