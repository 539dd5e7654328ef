"""`nanogpt prepare` as it is typed: results, mistakes, signals, kills, memory."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanogpt_cli.cli import main
from nanogpt_cli.data.tokens.data_set import open_data_set

TEXT = "".join(f"Line {n} of the play, {'so ' * (n % 7)}it is said.\n" for n in range(2000))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))


def line(*words):
    return [sys.executable, "-m", "nanogpt_cli", "prepare", *map(str, words)]


@pytest.fixture
def prepare(capsys, monkeypatch):
    """Run the command in this process; what it wrote on stdout and stderr."""

    def run(*words, code=0, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert main.run(["prepare", *map(str, words)]) == code, capsys.readouterr().err
        return capsys.readouterr()

    return run


def corpus(path, megabytes):
    """Text that tiktoken has work with."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice(list("abcdefgh"), rng.integers(1, 9))) for _ in range(5000)])
    block = "\n".join(" ".join(rng.choice(words, 12)) for _ in range(16_600)) + "\n\n"
    with path.open("w", encoding="utf-8") as file:
        for number in range(megabytes):
            file.write(f"{number}\n{block}")
    return path


def test_own_text_and_the_next_line_to_type(prepare):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    out, err = prepare("my.txt")
    assert "data/my made in" in out
    assert f"{int(len(TEXT) * 0.9):,} train + {len(TEXT) - int(len(TEXT) * 0.9):,} val" in out
    assert out.endswith("Next: nanogpt train --dataset my\n")
    assert "tokenizer: char" in err
    out, _ = prepare("my.txt")
    assert "data/my is complete already, nothing to do" in out


def test_json_is_one_document(prepare):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    out, _ = prepare("my.txt", "--json", "--tokenizer", "bytes", "--data-dir", "here", "--name", "it's")
    result = json.loads(out)
    assert result["tokens"] == {"train": int(len(TEXT) * 0.9), "val": len(TEXT) - int(len(TEXT) * 0.9) + 1}
    assert result["folder"] == "here"
    assert result["tokenizer"] == "bytes"
    assert result["documents"] == 1
    assert result["characters_per_token"] == pytest.approx(1.0, abs=1e-4)
    assert result["epochs"] == pytest.approx(12 * 64 * 2000 / result["tokens"]["train"])
    assert result["next"] == """nanogpt train --dataset 'it'"'"'s' --data-dir here"""
    assert not result["already"]


def test_options_for_own_text(prepare):
    Path("a.jsonl").write_text('{"story": "one"}\n{"story": "two"}\n{"story": "three"}\n')
    Path("b").write_bytes("vier|f\xfcnf|sechs".encode("latin-1"))
    out, _ = prepare("a.jsonl", "--text_field", "story", "--json", "--val-fraction", "0.5")
    assert json.loads(out)["documents"] == 3
    out, _ = prepare("b", "--encoding", "latin-1", "--separator", "|", "--split", "documents", "--val-fraction", "0.5",
                     "--split-seed", "3", "--json")  # fmt: skip
    assert "seed 3" in json.loads(out)["split_rule"]
    Path("c.txt").write_bytes(b"one\xff\n\ntwo\n\nthree" * 9)
    out, _ = prepare("c.txt", "--replace-bad-bytes", "--separator", r"\n\n", "--json")
    assert json.loads(out)["documents"] == 19


@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}])
def test_text_is_utf_8_whatever_the_console_is(prepare, environment):
    Path("café.txt").write_bytes("é\n".encode() * 100)
    env = {**os.environ, **environment}
    subprocess.run(line("café.txt", "--name", "cafe"), env=env, check=True)
    assert open_data_set(Path("data/cafe")).tokenizer.alphabet == "\né"


def test_stdin(prepare):
    out, _ = prepare("-", "--name", "piped", "--json", stdin=TEXT.encode())
    assert json.loads(out)["characters"] == len(TEXT)
    assert json.loads(prepare("-", "--name", "piped", "--json", stdin=TEXT.encode())[0])["already"]
    _, err = prepare("-", "--name", "piped", stdin=b"something else entirely", code=2)
    assert "--force" in err
    rows = b'{"text": "a"}\n{"text": "b"}\n{"text": "cc"}'
    out, _ = prepare("-", "--name", "rows", "--format", "jsonl", "--json", "--tokenizer", "char", stdin=rows)
    assert json.loads(out)["documents"] == 3
    assert sorted(path.name for path in Path("data").iterdir()) == ["piped", "rows"]
    assert "--name NAME" in prepare("-", stdin=b"x", code=2)[1]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "shakespeare_char"),
        (["shakespear"], "Did you mean shakespeare?"),
        (["nowhere/file.txt"], "no such file or folder"),
        (["my.txt", "--shards", "3"], "--shards: for known data sets only"),
        (
            ["openwebtext", "--separator", "x", "--val-fraction", "0.2"],
            "--separator, --val-fraction: for own text only",
        ),
        (["my.txt", "--val-fraction", "1"], "--val-fraction 1.0"),
        (["my.txt", "--split-seed", "1"], "--split documents"),
        (["my.txt", "--encoding", "utf-9"], "--encoding utf-9"),
        (["my.txt", "--workers", "0"], "workers"),
        (["my.txt", "--split", "none"], "split"),
        (["my.txt", "--verify"], "There is no data set in data/my"),
    ],
)
def test_mistakes(prepare, words, part):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    _, err = prepare(*words, code=2)
    assert part in err
    assert not Path("data").exists()


def test_a_known_word_is_a_name_and_a_path_is_a_file(prepare):
    Path("tinystories").write_text(TEXT, encoding="utf-8")
    out, _ = prepare("./tinystories", "--name", "mine", "--json")
    assert json.loads(out)["characters"] == len(TEXT)
    assert "is the name of another data set" in prepare("./tinystories", code=2)[1]


def test_verify(prepare):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    prepare("my.txt")
    assert "is as it was made" in prepare("my.txt", "--verify")[1]
    assert json.loads(prepare("my", "--verify", "--json")[0])["verified"]
    damaged = bytearray(Path("data/my/val.bin").read_bytes())
    damaged[5] ^= 1
    Path("data/my/val.bin").write_bytes(damaged)
    assert "val.bin is damaged" in prepare("my", "--verify", code=2)[1]


# --- ended from outside


def started(*words):
    """The command with its workers at work, as soon as something is written."""
    process = subprocess.Popen(line(*words, "--workers", "2"), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    written = Path("data/big/.prepare/train.bin")
    while time.monotonic() < deadline and process.poll() is None:
        if written.exists() and written.stat().st_size > 1_000_000:
            return process
        time.sleep(0.02)
    raise AssertionError(process.communicate())


@pytest.fixture
def big(gpt2):
    """Text that takes some seconds."""
    return corpus(Path("big.txt"), 12)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_work_goes_on_after_any_end(prepare, big, signum):
    process = started(big)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    if signum == signal.SIGKILL:
        assert process.returncode == -signum
    else:
        assert process.returncode == 128 + signum
        assert f"stopped by {signum.name}. To go on from here: the same command again." in err.decode()
    assert b"Traceback" not in err
    assert not Path("data/big/meta.toml").exists()
    prepare(big)
    prepare(big, "--name", "whole", "--workers", "1")
    for split in ("train", "val"):
        assert Path(f"data/big/{split}.bin").read_bytes() == Path(f"data/whole/{split}.bin").read_bytes()


def test_an_ignored_signal_stays_ignored(big):
    """As SIGHUP is under nohup, and SIGINT for a job that a script put into the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = started(big)
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, b"Stopped" in err) == (0, False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes here")
def test_memory_does_not_grow_with_the_text(gpt2):
    peaks = []
    for megabytes in (30, 300):
        path = corpus(Path(f"text{megabytes}.txt"), megabytes)
        code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1_500_000 << 10},) * 2)"
        code += "; from nanogpt_cli.cli.main import main; main()"
        words = ["prepare", str(path), "--workers", "1"]
        subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
        peaks.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    assert peaks[1] < 400
    assert peaks[1] < peaks[0] + 30


@pytest.mark.parametrize(
    "command", [["prepare", "my", "--verify"], ["train", "--dataset", "my", "--dry-run"], ["eval", "runs/my"]]
)
def test_token_files_that_are_read_through_are_told(prepare, command, capsys, monkeypatch):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    prepare("my.txt")
    monkeypatch.setattr("nanogpt_cli.cli.progress.SILENCE", -1.0)
    if command[0] == "eval":
        assert main.run(["train", "--dataset", "my", "--max-iters", "1", "--eval-iters", "1"]) == 0
        capsys.readouterr()
    assert main.run(command) == 0
    err = capsys.readouterr().err
    assert "checking my/train.bin: 100.0%, 0 of 0 MB" in err
    assert "checking my/val.bin: 100.0%" in err
