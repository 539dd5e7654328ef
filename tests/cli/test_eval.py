"""`nanogpt eval`: the numbers it shows, that nothing changes, and what it refuses."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanogpt_cli.cli import main
from nanogpt_cli.config.schema import SystemSettings
from nanogpt_cli.data.tokenizers import CharTokenizer
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.inference.evaluate import PUBLISHED, evaluate_split
from nanogpt_cli.machine.device import choose_compute
from nanogpt_cli.runs.lock import lock
from nanogpt_cli.weights import load as loading
from tests.conftest import TEXT, write_data_set
from tests.models import SETTINGS, make_run, nanogpt_checkpoint, random_model

Call = Callable[..., tuple[int, str, str]]
TOKENIZER = CharTokenizer(TEXT)
MODEL = replace(SETTINGS, vocab_size=TOKENIZER.size)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in a folder with a data set and a run; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    data_set = open_data_set(write_data_set(tmp_path / "data" / "tiny"))
    make_run(tmp_path / "runs" / "a", MODEL, TOKENIZER, data=data_set.fingerprint())

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main.run(["eval", *arguments, "--device", "cpu"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_numbers_are_those_of_the_library_and_the_run_is_unchanged(call: Call, tmp_path: Path) -> None:
    before = digests(tmp_path / "runs"), digests(tmp_path / "data")
    code, out, err = call("a", "--json")
    assert (code, digests(tmp_path / "runs"), digests(tmp_path / "data")) == (0, *before)
    report = json.loads(out)
    tokens = open_data_set(tmp_path / "data" / "tiny").val
    compute = choose_compute(SystemSettings(device="cpu", dtype="float32"), MODEL)
    lengths = TOKENIZER.byte_lengths()
    expected = evaluate_split(random_model(MODEL), tokens, batch_size=1, compute=compute, byte_lengths=lengths)
    assert report["loss"] == pytest.approx(expected.loss, abs=1e-6)
    assert report["bits_per_byte"] == pytest.approx(expected.bits_per_byte, abs=1e-6)
    assert report["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    assert (report["tokens"], report["step"], report["split"], report["data"]) == (509, 7, "val", "tiny")
    assert "best.pt (step 7" in err


def test_a_run_that_is_training_can_be_evaluated(call: Call, tmp_path: Path) -> None:
    with lock(tmp_path / "runs" / "a"):
        before = digests(tmp_path / "runs")
        assert call("a")[0] == 0
        assert digests(tmp_path / "runs") == before


def test_the_same_number_for_any_batch_size(call: Call) -> None:
    losses = [json.loads(call("a", "--json", "--batch-size", str(n))[1])["loss"] for n in (1, 4, 16)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-6)


def test_the_table_for_people(call: Call) -> None:
    code, out, _ = call("a", "--split", "train", "--checkpoint", "last")
    assert code == 0
    for words in ("tiny train", "loss, nats a token", "perplexity", "bits per byte", "tokens predicted", "4,589"):
        assert words in out
    assert "published" not in out


def test_other_data_by_name_or_folder(call: Call, tmp_path: Path) -> None:
    write_data_set(tmp_path / "data" / "other_text", TEXT[:1000] + "To be".ljust(2000, "."))
    by_name = call("a", "--data", "other_text", "--json")
    by_folder = call("a", "--data-dir", "data/other_text", "--json")
    assert by_name[0] == by_folder[0] == 2  # other characters: another alphabet
    assert "the same ids mean different text" in by_name[2]
    write_data_set(tmp_path / "data" / "same_letters", TEXT[::-1])
    by_name = call("a", "--data", "same_letters", "--json")
    assert json.loads(by_name[1])["data"] == "same_letters"
    assert json.loads(call("a", "--data-dir", "data/same_letters", "--json")[1]) == json.loads(by_name[1])


def test_data_that_changed_since_is_told(call: Call, tmp_path: Path) -> None:
    write_data_set(tmp_path / "data" / "tiny", TEXT[::-1])
    code, _, err = call("a")
    assert code == 0
    assert "not what the model was trained on" in err


def test_models_that_do_not_know_their_data(call: Call) -> None:
    torch.save(nanogpt_checkpoint(replace(MODEL, bias=False, activation="gelu"), config={}), "ckpt.pt")
    code, _, err = call("ckpt.pt")
    assert code == 2
    assert "add --data NAME" in err
    code, out, _ = call("ckpt.pt", "--data", "tiny", "--json")
    assert code == 0
    assert json.loads(out)["bits_per_byte"] is not None  # by the tokenizer of the data


def test_a_nanogpt_out_dir_finds_its_data_set(call: Call) -> None:
    Path("out").mkdir()
    torch.save(nanogpt_checkpoint(replace(MODEL, bias=False, activation="gelu")), "out/ckpt.pt")
    code, out, err = call("out", "--json")
    assert (code, json.loads(out)["data"]) == (0, "tiny")
    assert "tokenizer: the 23 characters of data/tiny" in err


def test_a_diverged_model_has_no_finite_perplexity(call: Call, tmp_path: Path) -> None:
    model = {name: 1e4 * tensor for name, tensor in random_model(MODEL).state_dict().items()}
    data = open_data_set(tmp_path / "data" / "tiny").fingerprint()
    make_run(tmp_path / "runs" / "far", MODEL, TOKENIZER, data=data, model=model)
    code, out, _ = call("far", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["loss"] > 700
    assert report["perplexity"] is None
    assert "inf" in call("far")[1]


def test_published_losses_stand_beside_ours_and_say_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def released(word: str, checkpoint: str) -> loading.LoadedModel:
        return loading.LoadedModel(random_model(MODEL), TOKENIZER, "gpt2-xl, OpenAI's weights", released="gpt2-xl")

    monkeypatch.setattr(loading, "load_model", released)
    write_data_set(Path("data/openwebtext"))
    code, out, _ = call("gpt2-xl", "--data", "openwebtext")
    assert code == 0
    assert "published by nanoGPT" in out
    assert "2.54" in out
    assert json.loads(call("gpt2-xl", "--data", "openwebtext", "--json")[1])["published"]["loss"] == 2.54
    assert "published" not in call("gpt2-xl", "--data", "tiny")[1]


def test_published_numbers_are_complete() -> None:
    from nanogpt_cli.weights.pretrained import GPT2_MODELS

    assert PUBLISHED["loss"].keys() == GPT2_MODELS.keys()


@pytest.mark.parametrize("task", ["hellaswag", "lambada"])
def test_tasks(call: Call, task: str) -> None:
    record = {"ctx": "To be", "endings": ["or not", "to suffer"], "label": 1, "text": "To be or not to be"}
    Path("q.jsonl").write_text((json.dumps(record) + "\n") * 3)
    code, out, _ = call("a", "--task", task, "--task-file", "q.jsonl", "--json", "--limit", "2")
    assert code == 0
    report = json.loads(out)
    assert (report["task"], report["examples"]) == (task, 2)
    assert (report["accuracy_norm"] is None) == (task == "lambada")
    code, out, err = call("a", "--task", task, "--task-file", "q.jsonl")
    assert code == 0
    assert "accuracy" in out
    assert ("16 positions" in err) == (task == "lambada")  # 18 characters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no such model"),
        (["a", "--split", "test"], "'test' is not one of 'val', 'train'"),
        (["a", "--data", "tiny", "--data-dir", "x"], "give one of them"),
        (["a", "--data", "unheard_of"], "data/unheard_of"),
        (["a", "--data-dir", "nowhere"], "There is no data set in nowhere"),
        (["a", "--task", "helaswag"], "Did you mean hellaswag?"),
        (["a", "--task", "lambada", "--data", "tiny"], "brings its own texts"),
        (["a", "--task-file", "x.jsonl"], "belong to --task"),
        (["a", "--task", "lambada", "--task-file", "x.jsonl"], "x.jsonl: no such file"),
        (["a", "--batch-size", "0"], "--batch-size"),
        (["a", "--dtype", "float8"], "dtype"),
        (["a", "--checkpoint", "newest"], "best, last, or a file"),
    ],
)
def test_mistakes_are_one_message_and_exit_2(call: Call, arguments: list[str], words: str) -> None:
    code, out, err = call(*arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_ids_beyond_the_table_are_named(call: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "small", replace(MODEL, vocab_size=5), None)
    code, _, err = call("small", "--data", "tiny")
    assert code == 2
    assert "the vocabulary has 5 ids" in err
