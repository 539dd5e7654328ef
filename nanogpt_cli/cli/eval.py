"""`nanogpt eval`: how good a model is, on a whole split or on a task. Changes nothing."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import (
    Checkpoint,
    Device,
    Dtype,
    Json,
    Model,
    complete_data_sets,
    flag,
    load,
    move_to_device,
)
from nanogpt_cli.cli.progress import ProgressBar
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    from nanogpt_cli.data.tokens.data_set import DataSet
    from nanogpt_cli.weights.load import LoadedModel


def eval(
    model: Model,
    data: Annotated[
        str | None,
        flag("NAME", "Data set under data/ [the one MODEL was trained on].", autocompletion=complete_data_sets),
    ] = None,
    data_dir: Annotated[Path | None, flag("DIR", "Folder of the token files, instead of --data.")] = None,
    split: Annotated[Literal["val", "train"], flag("val|train", "Which part of the data.")] = "val",
    batch_size: Annotated[
        int | None, flag("N", "Windows a forward pass; the result is the same [what fits].", min=1)
    ] = None,
    checkpoint: Checkpoint = "best",
    task: Annotated[str | None, flag("hellaswag|lambada", "Answer its questions instead of reading a split.")] = None,
    task_file: Annotated[Path | None, flag("FILE", "Its questions, jsonl or parquet [from the hub].")] = None,
    limit: Annotated[int | None, flag("N", "First so many questions of the task.", min=1)] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    token_dtype: Annotated[str | None, flag("uint16|uint32", "Of a data folder without metadata.")] = None,
    tokenizer: Annotated[str | None, flag("NAME", "Of a data folder without metadata: gpt2, bytes.")] = None,
    json: Json = False,
) -> None:
    """Evaluate a model: loss, perplexity and bits per byte of a whole split.

    Every token but the first is predicted once. Read-only: a run may be training meanwhile.
    """
    if task is None and (task_file is not None or limit is not None):
        raise UserError("--task-file and --limit belong to --task hellaswag or --task lambada.")
    if task is not None and (data is not None or data_dir is not None):
        raise UserError(f"--task {task} brings its own texts: leave --data and --data-dir out.")
    from nanogpt_cli.inference.evaluate import default_batch_size, evaluate
    from nanogpt_cli.inference.tasks import answer
    from nanogpt_cli.machine.memory import explain_out_of_memory

    loaded = load(model, checkpoint)
    compute = move_to_device(loaded, device, dtype)
    batch_size = batch_size or default_batch_size(loaded.model)
    data_set = None
    if task is None:
        folder = _data_folder(model, loaded, data, data_dir)
        if loaded.config is not None and data is None and data_dir is None:  # as the run itself reads it
            token_dtype = token_dtype or loaded.config.data.token_dtype
            tokenizer = tokenizer or loaded.config.data.tokenizer
        data_set = _open(folder, loaded, model, token_dtype, tokenizer)
    advice = f"The result is the same with fewer windows a pass: --batch-size {max(1, batch_size // 4)}"
    with explain_out_of_memory(advice), ProgressBar() as bar:
        if data_set is not None:
            report = evaluate(loaded, data_set, split, batch_size=batch_size, compute=compute, progress=bar)
        else:
            report = answer(
                loaded, task or "", path=task_file, limit=limit, batch_size=batch_size, compute=compute, progress=bar
            )
    if json:
        show.document(report)
    else:
        _print(report)


def _data_folder(word: str, loaded: "LoadedModel", data: str | None, data_dir: Path | None) -> Path:
    """The folder that is meant, prepared first if it is small and missing."""
    if data is not None and data_dir is not None:
        raise UserError("--data NAME and --data-dir DIR both name the data: give one of them.")
    if data_dir is not None:
        return data_dir
    if data is None:
        from nanogpt_cli.config.derived import moved_folder
        from nanogpt_cli.weights.resolve import look_up

        known = loaded.data or {}
        if "folder" in known:
            folder, found = Path(known["folder"]), look_up(word)
            return moved_folder(folder, found.path) if found else folder
        if "name" not in known:
            raise UserError(f"{loaded.source} does not say what it was trained on: add --data NAME or --data-dir DIR.")
        data = str(known["name"])
    from nanogpt_cli.data.text.prepare import ensure_prepared

    return Path("data") / ensure_prepared(data)


def _open(folder: Path, loaded: "LoadedModel", word: str, token_dtype: str | None, tokenizer: str | None) -> "DataSet":
    """The data, if its ids mean what the model's do."""
    from nanogpt_cli.data.tokens.data_set import difference, open_data_set
    from nanogpt_cli.weights.load import check_reads

    with ProgressBar() as progress:
        found = open_data_set(folder, token_dtype=token_dtype, tokenizer=tokenizer, progress=progress)
    show.notes(found.notes)
    check_reads(loaded, found, word)
    trained = loaded.data or {}
    if "train" in trained and trained.get("folder") == str(found.folder):
        changed = difference(trained, found.fingerprint())
        if changed:
            show.warn(f"{folder} is not what the model was trained on any more: {changed}")
    return found


LABELS = {
    "loss": ("loss, nats a token", ".4f"),
    "standard_error": ("standard error", ".4f"),
    "perplexity": ("perplexity", ",.4f"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "tokens": ("tokens predicted", ",d"),
    "accuracy": ("accuracy", ".4f"),
    "accuracy_norm": ("accuracy, by mean", ".4f"),
    "examples": ("examples", ",d"),
}


def _print(report: dict[str, Any]) -> None:
    published = report["published"] or {}
    what = report.get("task") or f"{report['data']} {report['split']}"
    rows = []
    for key, (label, form) in LABELS.items():
        # a task has these or not; bits per byte of a split may be unknown
        if key not in report or (report[key] is None and key in ("accuracy_norm", "perplexity")):
            continue
        theirs = [show.number(published[key], ".2f") if key in published else ""] if published else []
        rows.append([label, show.number(report[key], form), *theirs])
    show.table([what, "measured", *([published["source"]] if published else [])], rows)
    sys.stdout.flush()
