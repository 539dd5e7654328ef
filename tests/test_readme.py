"""The commands of README and docs/ run as they stand there; only training is cut short."""

import re
import shlex
from pathlib import Path

import pytest

from nanogpt_cli.cli.main import COMMANDS, run
from nanogpt_cli.config.presets import preset_names
from nanogpt_cli.training import choice
from tests.conftest import TEXT, write_data_set

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = "--max-iters 4 --eval-interval 4 --eval-iters 1 --n-embd 16 --n-layer 1 --peak-tflops 1"


def commands(page: Path, fence: str) -> list[str]:
    """The lines of a page's code blocks that open with ```fence."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{fence}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def shortened(line: str) -> list[str]:
    words = shlex.split(line)[1:]
    if {"--minutes", "--hours", "--depth"} & set(words):  # which choose what SHORT sets
        return [*dict.fromkeys([*words, "--dry-run"]), "--n-embd", "16", "--peak-tflops", "1"]
    if words[0] == "train" and "--dry-run" not in words:
        return [*words, *SHORT.split()]
    if words[0] == "resume":
        return [*words[:2], "--max-iters", "6"]
    return words


def in_shell(page: Path) -> list[str]:
    return [line for line in commands(page, "sh") if line.startswith("nanogpt ")]


@pytest.mark.parametrize("page", [page for page in PAGES if in_shell(page)], ids=lambda page: page.stem)
def test_commands_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choice, "LONGEST_TIMING", 0.01)
    Path("my.txt").write_text("ROMEO:\nBut soft, what light!\n" + 3 * TEXT, encoding="utf-8")
    assert run(["prepare", "my.txt", "--name", "shakespeare_char"]) == 0  # stands in for the download
    assert run(["prepare", "my.txt", "--name", "shakespeare", "--tokenizer", "bytes"]) == 0
    for line in in_shell(page):
        assert run(shortened(line)) == 0, f"{line}\n{capfd.readouterr().err}"
    assert page.stem != "README" or "ROMEO:" in capfd.readouterr().out


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "\n".join(commands(ROOT / "docs" / "python.md", "python"))
    assert "max_iters=40" in code
    monkeypatch.chdir(tmp_path)
    write_data_set(Path("data/shakespeare_char"), "ROMEO:\nBut soft, what light!\n" + 3 * TEXT)
    code = code.replace("max_iters=40", "max_iters=2, n_embd=16").replace("max_iters=80", "max_iters=3")
    exec(compile(code, "README.md", "exec"), {})
    assert 0 < float(capfd.readouterr().out.splitlines()[-1]) < 10


def test_install_lines_are_what_ci_does() -> None:
    start, test = (line for line in commands(ROOT / "README.md", "sh") if line.startswith("python3 -m venv"))
    script = (ROOT / ".ci" / "run").read_text()
    pin = re.search(r"torch==[\d.]+", script)
    assert pin is not None
    for line in (start, test):
        assert pin.group() in line
    assert "'.[dev]'" in test
    assert "'.[dev]'" in script
    assert test.endswith("pytest")
    assert "/pytest" in script
    assert run([*shlex.split(start.split("&&")[-1].split("/bin/nanogpt")[1]), "--help"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_preset_and_page_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"^(?:`?nanogpt|.*`nanogpt) ([a-z]+)\b", text, flags=re.MULTILINE):
        assert name in COMMANDS or name in ("stands", "help"), name
    for name in re.findall(r"--preset ([a-z0-9_]+)", text):
        assert name in preset_names()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target


def test_the_reference_of_commands_is_what_help_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    code = compile((ROOT / "docs" / "generate.py").read_text(encoding="utf-8"), "generate.py", "exec")
    module = {"__name__": "generate", "__file__": str(ROOT / "docs" / "generate.py")}
    exec(code, module)
    assert module["reference"]() == (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), (
        "python docs/generate.py writes it anew"
    )
