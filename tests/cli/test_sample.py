"""`nanogpt sample`: what is written where, from which prompt, and what is refused."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.cli import main
from nanogpt_cli.config.schema import ModelSettings
from nanogpt_cli.data.tokenizers import BytesTokenizer, CharTokenizer, Tokenizer, get_tokenizer
from nanogpt_cli.inference import sample as sampling
from nanogpt_cli.inference.sample import Sample
from nanogpt_cli.weights.load import load_model
from tests.models import ALPHABET, SETTINGS, make_run

Call = Callable[..., tuple[int, str, str]]
RULE = "-" * 40


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Sample in a folder with the run `a`, on the CPU; exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main.run(["sample", *arguments, "--device", "cpu"])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let the model "generate" given ids, one list a sample; returns what it was asked for."""

    def script(*samples: list[int | None]) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def generate(model: Any, prompt: list[int], num: int, settings: Any, **more: Any) -> Iterator[list[int | None]]:
            asked.append({"prompt": list(prompt), "settings": settings, **more})
            for step in range(max(map(len, samples))):
                yield [ids[step] if step < len(ids) else None for ids in samples[:num]]

        monkeypatch.setattr(sampling, "generate", generate)
        return asked

    return script


def test_text_on_stdout_and_everything_else_on_stderr(call: Call) -> None:
    code, out, err = call("a", "--prompt", "a cab", "--max-new-tokens", "30")
    assert code == 0
    assert out.startswith("a cab")
    assert len(out) == 5 + 30 + 1
    assert set(out) <= set(ALPHABET.alphabet)
    assert "best.pt (step 7" in err


def test_a_seed_is_a_text_and_sample_i_stays_the_same(call: Call) -> None:
    few, many, other = (
        call("a", "--prompt", "b", "--json", "--max-new-tokens", "40", "--num-samples", n, "--seed", seed)[1]
        for n, seed in (("2", "5"), ("4", "5"), ("2", "6"))
    )
    texts = [[one["text"] for one in json.loads(out)["samples"]] for out in (few, many, other)]
    assert texts[0] == texts[1][:2]
    assert len(set(texts[1])) == 4
    assert texts[0] != texts[2]


def test_temperature_0_is_the_most_likely_text(call: Call) -> None:
    import torch

    first, second = (
        call("a", "--prompt", "bad", "--temperature", "0", "--max-new-tokens", "10", *more)[1]
        for more in ([], ["--seed", "9", "--top-k", "3", "--top-p", "0.2"])
    )
    ids = ALPHABET.encode("bad").tolist()
    model = load_model("a").model
    for _ in range(10):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert first == second == ALPHABET.decode(ids) + "\n"


def test_several_samples_stand_under_a_rule(call: Call) -> None:
    out = call("a", "--prompt", "a", "--prompt", "bb", "--num-samples", "3", "--max-new-tokens", "5")[1]
    assert out.count(RULE) == 5
    blocks = [block.strip("\n") for block in out.split(RULE)]
    assert [block[0] for block in blocks] == list("aaabbb")


def test_prompts_from_files_and_stdin(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.txt").write_text("a bag\non ice", encoding="utf-8")
    out = call("a", "--prompt-file", "p.txt", "--max-new-tokens", "3", "--json")[1]
    assert json.loads(out)["samples"][0]["prompt"] == "a bag\non ice"
    for flag in ("--prompt", "--prompt-file"):
        stdin = io.TextIOWrapper(io.BytesIO(b"bed"))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert json.loads(call("a", flag, "-", "--json", "--max-new-tokens", "2")[1])["samples"][0]["prompt"] == "bed"


def test_a_prompt_longer_than_the_context_is_told(call: Call) -> None:
    code, out, err = call("a", "--prompt", "a bag on ice " * 3, "--max-new-tokens", "2")
    assert code == 0
    assert "39 tokens; the model reads the last 16" in err
    assert out.startswith("a bag on ice " * 3)


def test_numbers_and_words_of_logic_are_text(call: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "digits", tokenizer=CharTokenizer("123Truenosy-fah=bc"))
    for text in ("123", "True", "none", "--no-such"):
        code, out, _ = call("digits", "--prompt", text, "--max-new-tokens", "2")
        assert code == 0
        assert out.startswith(text)


@pytest.mark.parametrize(
    ("tokenizer", "start", "words"),
    [
        (ALPHABET, [0], "a newline"),
        (CharTokenizer("abc", "b"), [1], "'b', the most frequent character"),
        (BytesTokenizer(), [256], "end of text"),
        (None, [0], "id 0"),
    ],
)
def test_where_a_sample_starts_without_a_prompt(
    call: Call, tmp_path: Path, scripted: Any, tokenizer: Tokenizer | None, start: list[int], words: str
) -> None:
    make_run(tmp_path / "runs" / "b", replace(SETTINGS, vocab_size=300), tokenizer)
    asked = scripted([1, 1])
    code, out, err = call("b")
    assert code == 0
    assert asked[0]["prompt"] == start
    assert f"no prompt: starting from {words}" in err
    assert "endoftext" not in out


def test_settings_reach_the_model(call: Call, scripted: Any) -> None:
    asked = scripted([1])
    call("a")
    settings = asked[0]["settings"]
    assert (settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p) == (500, 0.8, 200, None)
    call("a", "--top-k", "none", "--top-p=0.9", "--temperature", "0", "--max_new_tokens=7", "--seed", "3")
    settings = asked[1]["settings"]
    assert (settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p) == (7, 0.0, None, 0.9)
    assert (settings.seed, asked[1]["token_limit"]) == (3, 18)


def test_padding_can_never_be_drawn(call: Call, tmp_path: Path, scripted: Any) -> None:
    asked = scripted([1])
    make_run(tmp_path / "runs" / "padded", replace(SETTINGS, vocab_size=64))
    call("padded")
    assert asked[0]["token_limit"] == 18


def test_a_padded_bpe_model_writes_text(call: Call, tmp_path: Path) -> None:
    tiny = ModelSettings(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=50304)
    make_run(tmp_path / "runs" / "bpe", tiny, get_tokenizer("gpt2"))
    code, out, _ = call("bpe", "--prompt", "Hello", "--max-new-tokens", "100", "--top-k", "none", "--json")
    assert code == 0
    assert json.loads(out)["samples"][0]["tokens"] <= 100


def test_end_of_text_ends_a_sample_and_is_not_shown(call: Call, tmp_path: Path, scripted: Any) -> None:
    make_run(tmp_path / "runs" / "b", replace(SETTINGS, vocab_size=257), BytesTokenizer())
    scripted([97, 98, 256], [97, 98, 99, 100])
    _, out, _ = call("b", "--prompt", "x", "--num-samples", "2", "--json")
    samples = json.loads(out)["samples"]
    assert [(one["text"], one["ended"]) for one in samples] == [("ab", "end of text"), ("abcd", "length")]


def test_stop_texts_end_each_sample_on_its_own(call: Call, scripted: Any) -> None:
    ids = ALPHABET.encode
    scripted(list(ids("ab cde")), list(ids("dddddd")), list(ids("abdede")))
    _, out, _ = call("a", "--prompt", "o", "--num-samples", "3", "--stop", "cd", "--stop", "ded", "--json")
    samples = json.loads(out)["samples"]
    assert [(one["text"], one["ended"]) for one in samples] == [
        ("ab ", "stop"),
        ("dddddd", "length"),
        ("ab", "stop"),
    ]


@pytest.mark.parametrize("stops", [(), ("cd",), ("abc", "bd")])
@pytest.mark.parametrize("text", ["ab cde", "aaabab", "ccccd", "ababcab", "c"])
def test_streamed_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: tuple[str, ...]) -> None:
    sample = Sample(ALPHABET, stops)
    shown = ""
    for token in ALPHABET.encode(text).tolist():
        if not sample.done:
            shown += sample.add(token)
    shown += sample.finish("length")
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown == sample.text == text[: min(places, default=len(text))]
    assert sample.ended == ("stop" if places else "length")


def test_characters_of_several_tokens_are_shown_whole_and_broken_bytes_never_raise() -> None:
    tokenizer = BytesTokenizer()
    sample = Sample(tokenizer)
    pieces = [sample.add(token) for token in "é🙂\n".encode()]
    assert pieces == ["", "é", "", "", "", "🙂", "\n"]
    broken = Sample(tokenizer)
    assert "".join(broken.add(token) for token in [0xF0, 0x9F, 0x41, 0xFF]) + broken.finish("length") == "�A�"
    half = Sample(tokenizer)
    assert half.add(0xC3) == ""
    assert half.finish("length") == "�"


@pytest.mark.parametrize("token", [-9223372036854775808, -1, 18, 2**40])
def test_a_faulty_backend_is_named(call: Call, scripted: Any, token: int) -> None:
    scripted([1, token])
    code, _, err = call("a")
    assert code == 1
    assert f"returned token id {token}, outside 0 to 17" in err
    assert "backend" in err


def test_a_model_without_tokenizer_speaks_in_ids(call: Call, tmp_path: Path, scripted: Any) -> None:
    make_run(tmp_path / "runs" / "b", tokenizer=None)
    asked = scripted([4, 17])
    code, out, _ = call("b", "--prompt", "1 2 3")
    assert (code, asked[0]["prompt"]) == (0, [1, 2, 3])
    assert out.split("1 2 3")[1].split() == ["4", "17"]
    code, _, err = call("b", "--prompt", "text")
    assert code == 2
    assert "must be ids" in err
    assert call("b", "--prompt", "1 18")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "café 🙂"], "é 🙂"),
        (["--prompt", "Zebra"], "Its 18 characters are"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt-file", "latin.txt"], "not UTF-8"),
        (["--top-k", "0"], "--top-k 0: a whole number of at least 1, or none"),
        (["--top-k", "many"], "--top-k many"),
        (["--top-p", "1.5"], "--top-p 1.5"),
        (["--top-p", "nan"], "--top-p nan"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--seed", str(2**63)], "--seed"),
        (["--num-samples", "0"], "--num-samples"),
        (["--num-samples", str(10**22)], "Draw fewer at a time"),
        (["--stop", ""], "--stop"),
        (["--start", "x"], "--prompt TEXT"),
    ],
)
def test_mistakes_are_one_message_and_exit_2(call: Call, arguments: list[str], words: str) -> None:
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    code, out, err = call("a", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


class TestCommand:
    """What only a process of its own can show."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make_run(tmp_path / "runs" / "a", replace(SETTINGS, vocab_size=257), BytesTokenizer())
        make_run(tmp_path / "runs" / "accents", tokenizer=CharTokenizer("é🙂\nabcdefghijklmno"))
        return tmp_path

    def start(self, folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "nanogpt_cli", "sample", *arguments, "--device", "cpu"],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def test_a_narrow_console_never_ends_in_a_crash(self, folder: Path) -> None:
        process = self.start(
            folder, "accents", "--prompt", "é🙂", "--max-new-tokens", "50", PYTHONIOENCODING="ascii", PYTHONUTF8="0"
        )
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.startswith(b"??")

    def test_a_closed_pipe_ends_quietly(self, folder: Path) -> None:
        process = self.start(folder, "a", "--max-new-tokens", "100000", "--prompt", "x")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=120) == 0, err
        assert b"Traceback" not in err
        assert b"rror" not in err
