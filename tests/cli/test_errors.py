"""One message and the right exit code for everything that goes wrong, and a traceback only for whoever asks."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from nanogpt_cli import errors
from nanogpt_cli.cli import command as commands
from nanogpt_cli.cli import main

COMMAND = [sys.executable, "-m", "nanogpt_cli"]


def failing(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        """Fail."""
        raise error

    return command


@pytest.fixture
def fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[BaseException], tuple[int, str]]:
    """Run a command that raises; its exit code and what stands on stderr."""

    def call(error: BaseException) -> tuple[int, str]:
        monkeypatch.setattr(commands.Group, "names", ("fail",))
        monkeypatch.setattr(commands, "command_function", lambda name: failing(error))
        code = main.run(["fail"])
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return call


CODES = [
    (errors.NanogptError("the disk is full"), 1),
    (errors.UserError("no such run"), 2),
    (errors.NonFiniteError("the loss is NaN"), 3),
    (errors.StoppedError("stopped at step 5", 2), 130),
    (errors.StoppedError("stopped at step 5", 15), 143),
    (KeyboardInterrupt(), 130),
    (OSError(errno.ENOSPC, "No space left on device", "x.bin"), 1),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 1),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=lambda x: repr(x))
def test_each_error_has_its_exit_code_and_one_line(fail, error: BaseException, code: int) -> None:
    found, message = fail(error)
    assert found == code
    assert message.startswith("stopped " if isinstance(error, errors.StoppedError) else "error: ")
    assert message.count("\n") == 1
    assert "Traceback" not in message


def test_an_os_error_names_the_file(fail) -> None:
    assert (
        fail(OSError(errno.ENOSPC, "No space left on device", "x.bin"))[1] == "error: x.bin: No space left on device\n"
    )


def test_text_of_others_commands_no_terminal(fail) -> None:
    _, message = fail(errors.UserError("\x1b]0;title\x07\u202e: no such run"))
    assert message == "error: \\x1b]0;title\\x07\\u202e: no such run\n"


def test_what_a_signal_interrupted_may_fail_in_its_own_way(fail) -> None:
    error = RuntimeError("cannot join thread before it is started")
    error.__context__ = errors.StoppedError("Stopped by SIGTERM.", 15)
    assert fail(error) == (143, "stopped by SIGTERM.\n")
    error.__context__ = KeyboardInterrupt()
    assert fail(error) == (130, "error: interrupted\n")


def test_variables_that_are_half_set_stop_no_command_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.run(["runs"]) == 0
    assert main.run(["presets"]) == 0
    assert main.run(["train", "--dry-run"]) == 2
    assert "RANK is not set in the environment" in capsys.readouterr().err


def test_debug_shows_the_traceback(fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOGPT_DEBUG", "1")
    code, message = fail(errors.UserError("no such run"))
    assert code == 2
    assert "Traceback" in message
    assert message.endswith("error: no such run\n")


def test_a_fault_of_the_program_keeps_its_traceback(fail) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())


def test_exit_inside_a_command_is_respected(fail) -> None:
    assert fail(typer.Exit(5)) == (5, "")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_colour_is_for_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(typer, "echo", lambda text, err: print(text, file=sys.stderr))  # as on a terminal
    assert main.run(["trian"]) == 2
    assert ("\x1b" in capsys.readouterr().err) == (not environment)


def test_debug_is_off_by_default() -> None:
    assert "NANOGPT_DEBUG" not in os.environ


USAGE = [
    ([], "Usage: nanogpt COMMAND"),
    (["trian"], "nanogpt trian: no such command. Did you mean train? There are: "),
    (["--verison"], "nanogpt: there is no --verison. Did you mean --version?"),
    (["generate", "x"], "nanogpt generate: no such command. Type nanogpt sample MODEL."),
    (["train", "my text.txt"], "'my text.txt' is one word too many. A data set or a text file is --dataset 'my text."),
    (["train", "preset", "gpt2"], "nanogpt train: preset is one word too many. A recipe is --preset gpt2"),
    (["train", "my.toml"], "A file of settings is --config my.toml"),
    (["train", "--resume"], "there is no --resume. Type nanogpt resume RUN."),
    (["train", "--lr", "1e-3"], "there is no --lr. Type --learning-rate."),
    (["train", "--n-layers=2"], "there is no --n-layers. Did you mean --n-layer?"),
    (["resume", "x", "--preset", "gpt2"], "there is no --preset. A recipe is for nanogpt train"),
    (["sample", "gpt2", "once", "upon"], "nanogpt sample: once is one word too many. A prompt is --prompt 'once upon'"),
    (["eval", "gpt2", "tiny"], "Other data is --data NAME or --data-dir DIR."),
    (["mfu", "a", "b"], "nanogpt mfu: b is one word too many. nanogpt mfu --help says more."),
    (["runs", "a", "b"], "a: no such run."),
    (["resume"], "nanogpt resume: Missing argument"),
    (["train", "--preset", "gpt"], "--preset gpt: no such preset. Did you mean gpt2?"),
    (["train", "--learning_rate", "fast"], "--learning-rate is 'fast': a number above 0 is needed."),
    (["train", "--config", "none.toml"], "none.toml: no such file."),
    (["train", "--dataset", "shakespear_char"], "Did you mean shakespeare_char?"),
    (["resume", "none"], "none: no such run."),
    (["train", "--compile", "maybe"], "--compile is 'maybe': auto, on, off are allowed."),
    (["train", "--n-head", "3", "--learning-rate", "x"], "n_embd = 128 is not divisible by n_head = 3"),
    (["train", "--run", "r\udce9"], "--run r\\udce9: the name is no UTF-8"),
    (["resume", "none", "--checkpoint", "x.pt"], "--run NEW"),
    (["prepare", ""], "nanogpt prepare: '' is an empty word."),
    (["prepare", "x.txt", "--separator", ""], "nanogpt prepare: --separator needs a value; '' is none."),
    (["resume", "x" * 300], "no such run"),
    (["train", "--gpus=2", "--max-restarts=-1"], "--max-restarts -1: a whole number of at least 0 is needed."),
    (["presets", "shwo", "gpt2"], "nanogpt presets show NAME"),
    (["presets", "show", "gtp2"], "no such preset. Did you mean gpt2?"),
]


@pytest.mark.parametrize(("line", "message"), USAGE, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes_on_the_line_exit_2_and_make_nothing(
    line: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(line) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    """Whoever reads the first bytes only, as head does, gets exit code 0 and no message."""
    code = "import sys; from nanogpt_cli.cli import main, presets, show\n"
    code += "show.table = lambda *a, **k: [print('x' * 1000) for _ in range(10_000)]\nsys.exit(main.run(['presets']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10) == b"x" * 10
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_a_pipe_closed_before_the_last_flush_ends_quietly(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "presets"], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_narrow_console_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    line = [*COMMAND, "presets", "show", "caf\u00e9"]
    done = subprocess.run(line, capture_output=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: --preset caf")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "resume", "none"], stderr=full, cwd=tmp_path, check=False)
    assert done.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_words_that_find_no_room_end_no_work(tmp_path: Path) -> None:
    for words in ("show.say('a')", "show.warn('a')", "show.groups([('a', [('b', 'c', 'd')])], stderr=True)"):
        code = f"from nanogpt_cli.cli import show\n{words}\n{words}\nprint('done')"
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE, check=False)
        assert (done.returncode, done.stdout) == (0, b"done\n")
