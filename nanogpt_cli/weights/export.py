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
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.files import disk_full_named, remove_leftovers, sync_file, sync_folder, temporary_folder, write_bytes
from nanogpt_cli.model.build import parameter_shapes
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.weights.gguf_file import GgufType, export_gguf
from nanogpt_cli.weights.hugging_face import HEAD, LAYOUTS, OURS, config_of, leaves_as, plain, read_folder
from nanogpt_cli.weights.load import LoadedModel
from nanogpt_cli.weights.pretrained import CONFIG, WEIGHTS, needs_extra
from nanogpt_cli.weights.tokenizer_json import tokenizer_files

FAMILIES = {"gpt2": "GPT-2", "llama": "Llama", "qwen3": "Qwen3"}


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
    """Write a model with its tokenizer and a model card to the new folder `folder`; errors as for `export_model`."""
    tokenizer, settings, remark = loaded.tokenizer, loaded.model.config, ""
    kind, _ = leaves_as(settings)
    files = {"README.md": _card(loaded, kind).encode()}
    if tokenizer is None:
        remark = "There is no tokenizer to go with the model: readers have to work with ids."
    else:
        files |= tokenizer_files(tokenizer, settings.block_size, progress)
        if "tokenizer.json" not in files:
            remark = f"Only `nanogpt` reads the tokenizer {tokenizer.kind} from tokenizer.toml; others know its name."
    done = export_model(
        loaded.model,
        folder,
        tokenizer_size=None if tokenizer is None else loaded.token_limit,
        files=files,
        eot=None if tokenizer is None else tokenizer.eot,
        dtype=dtype,
    )
    return replace(done, notes=[*done.notes, *([remark] if remark else [])])


def export_file(loaded: LoadedModel, path: Path, kind: GgufType, progress: Progress = QUIET) -> Exported:
    """Write a model with its tokenizer to the new GGUF file `path`; errors as for `export_gguf`."""
    settings, tensors, notes = _prepared(loaded.model, loaded.token_limit, torch.float32)
    count = export_gguf(settings, tensors, loaded.tokenizer, path, kind, progress)
    parameters = sum(t.numel() for t in tensors.values())
    notes = ["A GGUF file, written for llama.cpp and what builds on it, such as Ollama.", *notes, *_remarks(settings)]
    return Exported(path, "gguf", count, parameters, path.stat().st_size, notes)


def _card(loaded: LoadedModel, kind: str) -> str:
    """The folder's README: what the model is, what it was trained on, and how to use it."""
    settings, lines = loaded.model.config, [f"# {loaded.source}", ""]
    if kind:
        lines[:0] = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    count = sum(p.numel() for p in loaded.model.parameters())
    lines += [f"- {FAMILIES.get(kind, 'its own architecture')}, {count:,} parameters, context {settings.block_size:,}"]
    lines += [f"- tokenizer: {loaded.tokenizer.kind if loaded.tokenizer else 'none'}"]
    if loaded.config is not None and loaded.step:
        train = loaded.config.train
        seen = loaded.step * train.batch_size * train.gradient_accumulation_steps * settings.block_size
        start = f", from {train.init_from}" if train.init_from else ""
        lines += [f"- trained with nanogpt on {loaded.config.data.dataset}: {seen:,} tokens{start}"]
    return "\n".join([*lines, "", "To write text: `nanogpt sample FOLDER`."]) + "\n"


def export_model(
    model: GPT,
    folder: Path,
    *,
    tokenizer_size: int | None,
    files: dict[str, bytes],
    eot: int | None,
    dtype: torch.dtype = torch.float32,
) -> Exported:
    """Write `model` to the new folder `folder`.

    Args:
        tokenizer_size: ids that have a meaning; rows of the table beyond them are cut. None keeps all.
        files: name and content of what else belongs into the folder.
        eot: id of end-of-text, if there is one.
        dtype: number format of the stored weights.

    Raises:
        UserError: the folder exists and is not empty, or the package safetensors is not installed.
        NanogptError: what was read back differs from what was to be written; nothing is left behind.
        DiskFullError: no room; nothing is left behind.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already, and nothing is overwritten. Name a new folder.")
    settings, tensors, notes = _prepared(model, tokenizer_size, dtype)
    kind, obstacles = leaves_as(settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    with disk_full_named(folder), temporary_folder(folder) as temporary:
        _write_model(temporary, settings, tensors, kind, eot, dtype)
        for name, content in files.items():
            write_bytes(temporary / name, content)
        _compare(temporary, settings, tensors)
        temporary.replace(folder)
        sync_folder(folder.parent)
    size = sum(path.stat().st_size for path in folder.iterdir())
    notes = [_readers(kind, obstacles), *notes, *_remarks(settings)]
    return Exported(folder, kind or OURS, len(tensors), sum(t.numel() for t in tensors.values()), size, notes)


def _prepared(
    model: GPT, tokenizer_size: int | None, dtype: torch.dtype
) -> tuple[ModelSettings, dict[str, Tensor], list[str]]:
    """Settings and weights to write, by our names: padding rows cut, converted to `dtype`."""
    settings, notes = model.config, []
    tensors = {name: p.detach().cpu() for name, p in model.named_parameters()}
    if tokenizer_size is not None and tokenizer_size < tensors["wte.weight"].shape[0]:
        padded = tensors["wte.weight"].shape[0]
        for name in ("wte.weight", HEAD):
            if name in tensors:
                tensors[name] = tensors[name][:tokenizer_size]
        settings = replace(settings, vocab_size=tokenizer_size)
        notes.append(f"The token table was cut from {padded:,} to {tokenizer_size:,} rows: the others are padding.")
    if dtype != torch.float32:
        notes.append(f"Weights were rounded from float32 to {_name(dtype)}.")
    return settings, {name: t.to(dtype).contiguous() for name, t in tensors.items()}, notes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_model(
    folder: Path, settings: ModelSettings, tensors: dict[str, Tensor], kind: str, eot: int | None, dtype: torch.dtype
) -> None:
    numbers = {"bos_token_id": eot, "eos_token_id": eot}
    # Transformers 4 reads torch_dtype, 5 dtype
    config: dict[str, Any] = {"model_type": OURS, OURS: asdict(settings)} if not kind else config_of(settings, kind)
    config |= numbers | dict.fromkeys(("dtype", "torch_dtype"), _name(dtype))
    write_bytes(folder / CONFIG, json.dumps(config, indent=2).encode())
    if kind == "gpt2":  # its readers expect biases
        with_biases = parameter_shapes(replace(settings, bias=True))
        tensors = tensors | {n: torch.zeros(s, dtype=dtype) for n, s in with_biases.items() if n not in tensors}
    if kind:
        tensors = LAYOUTS[kind].to_theirs(settings, tensors)
        write_bytes(folder / "generation_config.json", json.dumps(numbers).encode())
    _save(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise needs_extra("safetensors", "export") from None
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    sync_file(folder / WEIGHTS)


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
        name = FAMILIES[kind]
        return f"A Hugging Face {name} folder: transformers and `nanogpt` read it; written for vLLM and llama.cpp too."
    return (
        f"This architecture is none that others know ({', '.join(obstacles)}), so transformers, vLLM and llama.cpp "
        "cannot run it: the folder holds safetensors by our own names and our own config.json, and `nanogpt` reads it."
    )


def _remarks(settings: ModelSettings) -> list[str]:
    if leaves_as(settings)[0] != "gpt2":
        return []
    zeros = "The model has no biases; zeros were written, as GPT-2's readers expect. Outputs are the same."
    gelu = "The model has the exact GELU; llama.cpp always computes the tanh form, so it would be slightly off there."
    return [*([] if settings.bias else [zeros]), *([gelu] if settings.activation == "gelu" else [])]
