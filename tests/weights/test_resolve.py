"""What a word names, for every command alike; and what is said where it names nothing."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanogpt_cli.errors import UserError
from nanogpt_cli.weights.resolve import find_model, find_run, look_up


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("")


def test_a_run_is_found_by_path_and_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("runs/my-run_1/config.toml")
    run = here / "runs" / "my-run_1"
    for word in ("runs/my-run_1", "runs/my-run_1/", str(run), "my-run_1", "my_run_1", "my-run-1"):
        assert find_run(word).path.resolve() == run, word
        assert find_model(word).kind == "run"
    monkeypatch.chdir(run)
    assert find_run(".").name == "my-run_1"


def test_an_exact_name_wins_over_one_that_is_alike() -> None:
    for name in ("a-b", "a_b"):
        put(f"runs/{name}/config.toml")
    assert [find_run(name).name for name in ("a-b", "a_b")] == ["a-b", "a_b"]
    assert find_model("a_b").path == Path("runs/a_b")


def test_a_folder_that_is_nothing_hides_no_run() -> None:
    Path("demo").mkdir()
    put("runs/demo/config.toml")
    assert find_model("demo").path == find_run("demo").path == Path("runs/demo")


@pytest.mark.parametrize(
    ("file", "word", "kind"),
    [
        ("out/ckpt.pt", "out", "checkpoint folder"),
        ("out/ckpt.pt", "out/ckpt.pt", "file"),
        ("hf/config.json", "hf", "Hugging Face folder"),
        ("hf/model.safetensors", "hf/model.safetensors", "Hugging Face folder"),
    ],
)
def test_kinds(file: str, word: str, kind: str) -> None:
    put(file)
    assert find_model(word).kind == kind


def test_a_run_and_published_weights_of_one_name_are_told_apart() -> None:
    assert find_model("gpt2-xl").published == find_model("gpt2_xl").published == "gpt2-xl"
    put("runs/gpt2/config.toml")
    found = find_model("gpt2")
    assert (found.kind, found.path) == ("run", Path("runs/gpt2"))
    assert found.note == "gpt2 is also the name of published weights; for those type openai-community/gpt2"
    other = find_model("openai-community/gpt2")
    assert (other.kind, other.published, other.note) == ("published", "gpt2", "")
    assert find_model("runs/gpt2").note == ""  # nobody takes a path for published weights


def test_messages_name_what_is_there_instead() -> None:
    with pytest.raises(UserError, match="There are no runs in runs/"):
        find_run("x")
    put("runs/shakespeare/config.toml")
    put("runs/shakespeare/ckpt.pt")
    with pytest.raises(UserError, match=r"Did you mean shakespeare\? Runs in runs/: shakespeare"):
        find_run("shakespear")
    with pytest.raises(
        UserError, match=r"Did you mean shakespeare\? There is no such path; runs in runs/: shakespeare"
    ):
        find_model("shakespear")
    with pytest.raises(UserError, match=r"is a file of a run\. Name the run itself: runs/shakespeare"):
        find_run("runs/shakespeare/ckpt.pt")
    Path("out").mkdir()
    with pytest.raises(UserError, match=r"out is no run directory: it has no config\.toml"):
        find_run("out")
    with pytest.raises(UserError, match="out is a folder, but no model"):
        find_model("out")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(word=st.text() | st.text("./\0~*", max_size=6) | st.just("x" * 5000))
def test_any_word_finds_something_or_is_answered(word: str) -> None:
    with contextlib.suppress(UserError):
        assert find_run(word).config.exists()
    with contextlib.suppress(UserError):
        assert find_model(word) == look_up(word)


def test_torch_is_not_needed_for_an_answer() -> None:
    code = "import sys, nanogpt_cli.weights.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
