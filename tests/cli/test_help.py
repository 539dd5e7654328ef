"""Help answers at once, in sections, with one spelling of every flag; and every flag reaches the settings."""

import inspect
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli import __version__
from nanogpt_cli.cli import command as commands
from nanogpt_cli.cli import main
from nanogpt_cli.cli.main import COMMANDS
from nanogpt_cli.config.schema import SECTIONS, settings

HEAVY = ("torch", "numpy", "rich", "pydantic", "tiktoken", "pyarrow", "matplotlib")


def help_of(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main.run([*line, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, command)
    assert text.startswith(f"Usage: nanogpt {command} ")
    assert len(text.splitlines()[2].strip()) > 10
    assert not re.search(r"--\w+_\w+", text)  # one spelling
    assert text.count("--help") == 1
    assert "  -q, --quiet " in text
    assert "  --json " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_every_command_are_lines_that_it_takes(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[dict[str, Any]] = []

    def take(name: str) -> Any:
        function = inspect.signature(real(name), eval_str=True)

        def instead(**given: Any) -> None:
            taken.append(given)

        instead.__signature__ = function  # type: ignore[attr-defined]
        instead.__annotations__ = {one.name: one.annotation for one in function.parameters.values()}
        return instead

    lines = re.findall(rf"^  (nanogpt {command}\b.*)$", help_of(capsys, command), re.MULTILINE)
    assert len(lines) > 1
    real = commands.command_function
    monkeypatch.setattr(commands, "command_function", take)
    for line in lines:
        assert main.run(shlex.split(line)[1:]) == 0, line
    assert len(taken) == len(lines)


@pytest.mark.parametrize("line", ["-q --json presets", "--json presets --quiet", "--quiet presets --json"])
def test_flags_of_all_commands_may_stand_in_front(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(line.split()) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)[0]["name"], captured.err) == ("finetune_shakespeare", "")


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)


def test_train_lists_every_setting_by_section_with_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "train")
    places = [text.index(f"\n[{section}] ") for section in SECTIONS]
    assert places == sorted(places)
    for known in settings().values():
        assert len(re.findall(rf"^  {known.flag}(?=[ \n])", text, re.MULTILINE)) == 1
    flat = " ".join(text.split())
    assert "--block-size INT Context length [default: 64 tokens]" in flat
    assert "--min-lr FLOAT Learning rate at the end of the decay [default: learning_rate / 10]" in flat
    assert "--compile auto|on|off Compile the model with torch.compile [default: auto]" in flat
    assert "--bias / --no-bias Biases in linear layers and norms [default: on]" in flat


def test_resume_lists_only_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "resume")
    for known in settings().values():
        assert (f"  {known.flag} " in text) == (known.resume == "free")


@pytest.mark.parametrize("known", settings().values(), ids=lambda known: known.name)
def test_every_setting_is_a_flag_of_train(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real parser: the text arrives at the layer, and nothing else does."""
    seen: dict[str, Any] = {}

    class Enough(Exception):  # noqa: N818
        pass

    def stop(flags: dict[str, Any]) -> None:
        seen.update({name: value for name, value in flags.items() if value is not None})
        raise Enough

    monkeypatch.setattr("nanogpt_cli.config.layers.flag_layer", stop)
    line = [known.flag] if known.kind is bool else [f"{known.flag.replace('-', '_').replace('__', '--')}=x"]
    with pytest.raises(Enough):
        main.run(["train", *line])
    assert seen == {known.name: True if known.kind is bool else "x"}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_imports_nothing_heavy() -> None:
    """All help texts in one process: what one of them imports would show."""
    code = f"""
import sys, contextlib, io
from nanogpt_cli.cli import command as commands
from nanogpt_cli.cli import main
for command in [[], *([name] for name in main.COMMANDS)]:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main.run([*command, "--help"]) == 0
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code) == "[]\n"


def test_help_takes_less_than_twice_the_time_of_importing_typer() -> None:
    lines = {
        "typer": [sys.executable, "-c", "import typer"],
        "program": [sys.executable, "-m", "nanogpt_cli", "--help"],
        "train": [sys.executable, "-m", "nanogpt_cli", "train", "--help"],  # the longest
    }
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(7):  # in turns, so that a busy machine hits all alike
        for name, line in lines.items():
            began = time.perf_counter()
            subprocess.run(line, stdout=subprocess.DEVNULL, check=True)
            seconds[name].append(time.perf_counter() - began)
    quickest = {name: min(values) for name, values in seconds.items()}  # what the work takes, without the others
    assert quickest["program"] < 2 * quickest["typer"]
    assert quickest["train"] < 2 * quickest["typer"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"nanogpt {__version__}\n"


def test_the_installed_command_answers(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "nanogpt"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (done.stdout, done.stderr) == (f"nanogpt {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nanogpt tr", "train"),
        ("nanogpt train --learn", "--learning-rate"),
        ("nanogpt train --preset shake", "shakespeare_char"),
        ("nanogpt train --activation g", "gelu_tanh"),
        ("nanogpt mfu gpt2_m", "gpt2_medium"),
        ("nanogpt resume r", "runs/mine"),
    ],
)
def test_completion(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.toml").touch()
    for name, value in {"COMPLETE": "complete_bash", "WORDS": words, "CWORD": str(words.count(" "))}.items():
        monkeypatch.setenv({"COMPLETE": "_NANOGPT_COMPLETE"}.get(name, f"COMP_{name}"), value)
    with pytest.raises(SystemExit):
        main.run([])
    assert expected in capsys.readouterr().out.split()


def test_help_without_docstrings() -> None:
    for line in (["--help"], ["train", "--help"], ["runs", "--help"]):
        command = [sys.executable, "-OO", "-m", "nanogpt_cli", *line]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_help_of_a_command_is_found_under_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in ((["help", "watch"], ["watch", "--help"]), (["help"], ["--help"]), (["-V"], ["--version"])):
        assert main.run(words) == main.run(same) == 0
        shown = capsys.readouterr().out
        assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
