"""HellaSwag and LAMBADA: by hand, against transformers, and for any batch."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanogpt_cli.config.schema import SystemSettings
from nanogpt_cli.errors import UserError
from nanogpt_cli.inference import tasks
from nanogpt_cli.inference.tasks import TASKS, read_questions, run_task, score_endings
from nanogpt_cli.machine.device import choose_compute
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.weights import pretrained as hub
from tests.models import ALPHABET, SETTINGS, exported, random_model

COMPUTE = choose_compute(SystemSettings(device="cpu", dtype="float32"), SETTINGS)
LONG = replace(SETTINGS, block_size=64)

HELLASWAG = [
    {"ctx": "a cab", "endings": ["bed", "gab hide", "a", "jam on a pan"], "label": 2},
    {"ctx": "bad", "endings": ["ape dam", "lab", "pig", "mild blob"], "label": "0"},
    {"ctx": "cabbage on ice", "endings": ["land", "go be a cod", "deck", "foal"], "label": 3},
]
LAMBADA = [{"text": "a cab on a lamp"}, {"text": "bed"}, {"text": "i go and i\nbag on ice"}]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def log_likelihood(model: Any, context: str, ending: str) -> tuple[float, int, bool]:
    """Sum, number of tokens, and whether greedy; one text at a time, from logits in float64."""
    ids = torch.from_numpy(ALPHABET.encode(context + ending).astype(np.int64))[None]
    out = model(ids[:, :-1])
    logs = torch.log_softmax((out if isinstance(out, torch.Tensor) else out.logits).detach().double(), -1)[0]
    total, greedy, start = 0.0, True, len(context)
    for place in range(start, ids.shape[1]):
        total += float(logs[place - 1, ids[0, place]])
        greedy &= int(logs[place - 1].argmax()) == int(ids[0, place])
    return total, ids.shape[1] - start, greedy


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_hellaswag_by_hand(tmp_path: Path, batch_size: int) -> None:
    model = random_model(LONG)
    questions = read_questions(TASKS["hellaswag"], write_lines(tmp_path / "val.jsonl", HELLASWAG), ALPHABET)
    result = run_task(TASKS["hellaswag"], model, questions, batch_size=batch_size, compute=COMPUTE)
    right = right_norm = 0
    for record in HELLASWAG:
        scored = [log_likelihood(model, record["ctx"], " " + ending) for ending in record["endings"]]
        right += max(range(4), key=lambda i: scored[i][0]) == int(record["label"])
        right_norm += max(range(4), key=lambda i: scored[i][0] / scored[i][1]) == int(record["label"])
    assert (result["examples"], result["cut"], result["perplexity"]) == (3, 0, None)
    assert result["accuracy"] == right / 3
    assert result["accuracy_norm"] == right_norm / 3


def test_likelihoods_written_out(tmp_path: Path) -> None:
    """Written-out likelihoods: a model that prefers `a` everywhere."""
    model = random_model(LONG)

    def logits(x: torch.Tensor) -> torch.Tensor:
        always = torch.zeros(len(x), 18)
        always[:, ALPHABET.encode("a")[0]] = 2.0
        return always

    model.logits = logits  # type: ignore[method-assign]
    lines = [{"ctx": "b", "endings": ["aaaa", "bb", "ab", "bbbbbb"], "label": 1}]
    questions = read_questions(TASKS["hellaswag"], write_lines(tmp_path / "a", lines), ALPHABET)
    norm = math.log(17 + math.exp(2.0))
    scores, _ = score_endings(
        model, [(q.context, e) for q in questions for e in q.endings], batch_size=2, compute=COMPUTE
    )
    # " aaaa" is a space at 0 and four at 2; " bb" is three at 0
    assert scores == pytest.approx([8 - 5 * norm, -3 * norm, 2 - 3 * norm, -7 * norm], abs=1e-5)
    result = run_task(TASKS["hellaswag"], model, questions, batch_size=9, compute=COMPUTE)
    assert (result["accuracy"], result["accuracy_norm"]) == (0.0, 0.0)


def test_lambada_by_hand(tmp_path: Path) -> None:
    model = random_model(LONG)
    records = [record for record in LAMBADA if " " in record["text"]]
    questions = read_questions(TASKS["lambada"], write_lines(tmp_path / "a.jsonl", records), ALPHABET)
    result = run_task(TASKS["lambada"], model, questions, batch_size=2, compute=COMPUTE)
    scored = []
    for record in records:
        context, _, word = record["text"].rpartition(" ")
        scored.append(log_likelihood(model, context, " " + word))
    assert result["perplexity"] == pytest.approx(math.exp(-sum(s[0] for s in scored) / len(scored)), rel=1e-4)
    assert result["accuracy"] == sum(s[2] for s in scored) / len(scored)
    assert result["accuracy_norm"] is None


def test_a_greedy_ending_is_right(tmp_path: Path) -> None:
    model = random_model(LONG)
    ids = list(ALPHABET.encode("bad").astype(int))
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    rows = [(np.array(ids[:3]), np.array(ids[3:])), (np.array(ids[:3]), np.array([*ids[3:6], (ids[6] + 1) % 18]))]
    assert score_endings(model, rows, batch_size=2, compute=COMPUTE)[1].tolist() == [True, False]


def test_transformers_gives_the_same_likelihoods(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra dev) is not installed")
    model = random_model(LONG)
    exported(model, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    questions = read_questions(TASKS["hellaswag"], write_lines(tmp_path / "a.jsonl", HELLASWAG), ALPHABET)
    rows = [(q.context, e) for q in questions for e in q.endings]
    scores, _ = score_endings(model, rows, batch_size=5, compute=COMPUTE)
    texts = [(r["ctx"], " " + e) for r in HELLASWAG for e in r["endings"]]
    assert scores == pytest.approx([log_likelihood(theirs, *text)[0] for text in texts], abs=1e-4)


def test_long_texts_lose_their_beginning_and_are_counted(tmp_path: Path) -> None:
    model = random_model(SETTINGS)  # 16 positions
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "a bad cabbage on a blob of ice jam"}])
    questions = read_questions(TASKS["lambada"], lines, ALPHABET)
    result = run_task(TASKS["lambada"], model, questions, batch_size=2, compute=COMPUTE)
    end = "a bad cabbage on a blob of ice jam"[-17:]
    assert result["cut"] == 1
    assert result["perplexity"] == pytest.approx(math.exp(-log_likelihood(model, end[:-4], " jam")[0]), rel=1e-4)


def test_parquet_is_read_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra hf is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra hf is not installed")
    records = [{**record, "label": str(record["label"]), "ind": i} for i, record in enumerate(HELLASWAG)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "val.parquet")
    questions = read_questions(TASKS["hellaswag"], tmp_path / "val.parquet", ALPHABET, limit=2)
    assert [q.label for q in questions] == [2, 0]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        read_questions(TASKS["hellaswag"], tmp_path / "broken.parquet", ALPHABET)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("hellaswag", '{"ctx": "a"}', "record 1: no hellaswag question"),
        ("hellaswag", '{"ctx": "a", "endings": ["b"], "label": 4}', "label 4 of 1"),
        ("hellaswag", '{"ctx": "", "endings": ["b"], "label": 0}', "without a single token"),
        ("lambada", '{"text": "bed"}', "a text of one word"),
        ("lambada", "not json", "line 1: no JSON"),
        ("lambada", "[1]", "record 1"),
        ("lambada", "", "no questions"),
        ("lambada", '{"text": "a Zebra"}', "Z"),
    ],
)
def test_files_that_are_no_questions(tmp_path: Path, name: str, line: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(UserError, match=words):
        read_questions(TASKS[name], tmp_path / "a.jsonl", ALPHABET)


def test_without_a_file_the_hub_is_asked_for_a_pinned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cached(repo: hub.HubRepo, path: str) -> Path:
        asked.append((repo.name, repo.revision[:6], repo.kind, path))
        return write_lines(tmp_path / "a.jsonl", LAMBADA[:1])

    monkeypatch.setattr(tasks, "hub_file", cached)
    assert len(read_questions(TASKS["lambada"], None, ALPHABET)) == 1
    assert asked == [("EleutherAI/lambada_openai", "900124", "dataset", "data/lambada_test_en.jsonl")]


def test_padding_never_changes_a_score() -> None:
    model: GPT = random_model(LONG)
    generator = np.random.Generator(np.random.PCG64(3))
    rows = [(generator.integers(0, 18, n), generator.integers(0, 18, m)) for n, m in [(1, 1), (30, 9), (5, 20), (2, 3)]]
    alone = [score_endings(model, [row], batch_size=1, compute=COMPUTE)[0][0] for row in rows]
    assert score_endings(model, rows, batch_size=4, compute=COMPUTE)[0] == pytest.approx(alone, abs=1e-4)
