"""HellaSwag and LAMBADA: which ending of a text does the model find most likely.

HellaSwag (Zellers et al., 2019) is scored as llm.c does: each of the four endings is read after the context, and the
one with the highest log-likelihood is the answer; by the sum over its tokens (accuracy), by their mean (accuracy_norm).
LAMBADA (Paperno et al., 2016), in OpenAI's version: the last word of a passage is right if each of its tokens is the
most likely one; perplexity is that of the word.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from nanogpt_cli.data.tokenizers import Tokenizer
from nanogpt_cli.errors import UserError, did_you_mean, package
from nanogpt_cli.inference.evaluate import PUBLISHED, Ids
from nanogpt_cli.machine.device import Compute, inference
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.weights.load import LoadedModel
from nanogpt_cli.weights.pretrained import HubRepo, hub_file

SORTED_TOGETHER = 64  # batches whose rows are sorted by length, so that little is padded


@dataclass(frozen=True)
class Question:
    """A context and its possible endings, as ids."""

    context: Ids
    endings: tuple[Ids, ...]
    label: int  # the right ending


@dataclass(frozen=True)
class Task:
    """Where the questions are, and what context, endings and right ending a record tells."""

    name: str
    repo: HubRepo
    file: str
    columns: Sequence[str]
    read: Callable[[dict[str, Any]], tuple[str, list[str], int]]
    single: bool  # one ending: is it the most likely continuation


def _hellaswag(record: dict[str, Any]) -> tuple[str, list[str], int]:
    endings, label = [" " + ending for ending in record["endings"]], int(record["label"])
    if not 0 <= label < len(endings):
        raise ValueError(f"label {label} of {len(endings)} endings")
    return record["ctx"], endings, label


def _lambada(record: dict[str, Any]) -> tuple[str, list[str], int]:
    context, space, word = record["text"].rpartition(" ")
    if not space:
        raise ValueError("a text of one word")
    return context, [space + word], 0


TASKS = {
    name: Task(name, HubRepo(at["repo"], at["revision"], "dataset"), at["file"], at["columns"], read, single)
    for name, read, single in (("hellaswag", _hellaswag, False), ("lambada", _lambada, True))
    if (at := PUBLISHED["tasks"][name])
}


def answer(
    loaded: LoadedModel,
    name: str,
    *,
    path: Path | None,
    limit: int | None,
    batch_size: int,
    compute: Compute,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """What a model achieves at a task, see `run_task`, beside published numbers; UserError as for `read_questions`."""
    if name not in TASKS:
        raise UserError(f"--task {name}: no such task.{did_you_mean(name, list(TASKS))} There are: {', '.join(TASKS)}.")
    if loaded.tokenizer is None:
        raise UserError(f"--task {name} needs a tokenizer, and {loaded.source} has none.")
    questions = read_questions(TASKS[name], path, loaded.tokenizer, limit)
    result = run_task(TASKS[name], loaded.model, questions, batch_size=batch_size, compute=compute, progress=progress)
    if result["cut"]:
        progress.say(
            f"{result['cut']} texts are longer than the model's {loaded.model.config.block_size} positions: their "
            "beginning was left out, so the numbers do not compare with those of longer models"
        )
    published = None if limit is not None else PUBLISHED.get(name, {}).get(loaded.released)
    return {"model": loaded.source, "step": loaded.step, **result, "published": published}


def read_questions(task: Task, path: Path | None, tokenizer: Tokenizer, limit: int | None = None) -> list[Question]:
    """The questions of a task, from a jsonl or parquet file or, without one, from the hub; UserError names the line."""
    path = path or hub_file(task.repo, task.file)
    questions: list[Question] = []
    for number, record in enumerate(_records(path, task.columns), 1):
        if limit is not None and len(questions) == limit:
            break
        try:
            text, texts, label = task.read(record)
            context, *endings = (tokenizer.encode(each).astype(np.int64) for each in (text, *texts))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}, record {number}: no {task.name} question ({error!r}).") from None
        if not all(map(len, (context, *endings))):
            raise UserError(f"{path}, record {number}: a context or an ending without a single token.")
        questions.append(Question(context, tuple(endings), label))
    if not questions:
        raise UserError(f"{path}: holds no questions.")
    return questions


def _records(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if path.suffix == ".parquet":
        parquet = package("pyarrow.parquet", f"Reading {path.name}")
        try:
            yield from parquet.read_table(path, columns=list(columns)).to_pylist()
        except (ValueError, OSError) as error:  # damage is a ValueError of pyarrow's
            raise UserError(f"{path}: cannot be read as parquet: {error}") from None
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: no JSON object: {error}") from None


def run_task(
    task: Task,
    model: GPT,
    questions: Sequence[Question],
    *,
    batch_size: int,
    compute: Compute,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Answer all questions: accuracies and perplexity, None where the task has none.

    `cut` counts texts longer than the context, whose beginning was left out.

    Args:
        batch_size: texts a forward pass; changes likelihoods by rounding at most.
    """
    rows = [(question.context, ending) for question in questions for ending in question.endings]
    scores, greedy = score_endings(model, rows, batch_size=batch_size, compute=compute, progress=progress)
    block_size = model.config.block_size
    means = scores / np.array([min(len(ending), block_size) for _, ending in rows])
    right, right_norm = int(greedy.sum()), 0
    if not task.single:
        cuts = np.cumsum([len(question.endings) for question in questions])[:-1]
        labels = [question.label for question in questions]
        right, right_norm = (
            sum(int(own.argmax()) == label for own, label in zip(np.split(each, cuts), labels, strict=True))
            for each in (scores, means)
        )
    return {
        "task": task.name,
        "examples": len(questions),
        "accuracy": right / len(questions),
        "accuracy_norm": None if task.single else right_norm / len(questions),
        "perplexity": math.exp(min(700.0, -float(scores.mean()))) if task.single else None,
        "cut": sum(len(context) + len(ending) > block_size + 1 for context, ending in rows),
    }


def score_endings(
    model: GPT, rows: Sequence[tuple[Ids, Ids]], *, batch_size: int, compute: Compute, progress: Progress = QUIET
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Log-likelihood of each ending after its context, nats, and whether each of its tokens was the most likely.

    A text longer than block_size + 1 tokens loses its beginning.
    """
    scores, greedy, done = np.zeros(len(rows)), np.zeros(len(rows), dtype=bool), 0
    with inference(model):
        for start in range(0, len(rows), batch_size * SORTED_TOGETHER):
            together = range(start, min(start + batch_size * SORTED_TOGETHER, len(rows)))
            by_length = sorted(together, key=lambda i: len(rows[i][0]) + len(rows[i][1]))
            for first in range(0, len(by_length), batch_size):
                numbers = by_length[first : first + batch_size]
                scores[numbers], greedy[numbers] = _score_batch(model, [rows[i] for i in numbers], compute)
                done += len(numbers)
                progress.at("evaluating", done, len(rows), f"{done:,} of {len(rows):,} texts")
    return scores, greedy


def _score_batch(
    model: GPT, rows: Sequence[tuple[Ids, Ids]], compute: Compute
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """One padded batch; what stands behind a text cannot influence it, and does not count."""
    texts = [np.concatenate(row)[-model.config.block_size - 1 :] for row in rows]
    longest = max(map(len, texts))
    idx = np.zeros((len(rows), longest), dtype=np.int64)  # (B, T + 1)
    counts = np.zeros((len(rows), longest), dtype=bool)
    for row, (text, (_, ending)) in enumerate(zip(texts, rows, strict=True)):
        idx[row, : len(text)] = text
        counts[row, max(1, len(text) - len(ending)) : len(text)] = True
    counted = torch.from_numpy(counts[:, 1:]).to(compute.device)
    tokens = torch.from_numpy(idx).to(compute.device)
    targets = tokens[:, 1:][counted]  # (N,): those of the endings alone
    with compute.autocast():
        x = model.hidden_states(tokens[:, :-1])  # (B, T, C)
        logits = model.logits(x[counted]).float()  # (N, V)
    losses = F.cross_entropy(logits, targets, reduction="none").cpu().numpy().astype(np.float64)
    hit = (logits.argmax(-1) == targets).cpu().numpy()
    row_of = np.nonzero(counts[:, 1:])[0]
    scores = -np.bincount(row_of, weights=losses, minlength=len(rows)).astype(np.float64)
    greedy: npt.NDArray[np.bool_] = np.bincount(row_of[~hit], minlength=len(rows)) == 0
    return scores, greedy
