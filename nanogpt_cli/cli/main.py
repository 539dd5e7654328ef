"""The command `nanogpt`: its commands, and the boundary where every error becomes one message and an exit code."""

import errno
import os
import signal
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from nanogpt_cli.cli.command import WIDTH, Group, styled
from nanogpt_cli.errors import NanogptError, StoppedError, UserError
from nanogpt_cli.terminal import escaped, give_up

PROGRAM = "nanogpt"
INTERRUPTED = 130

# in the order of a working day; each is the function of its name in the module of its name
COMMANDS = "prepare", "train", "resume", "eval", "sample", "mfu", "export", "plot", "watch", "presets", "runs"
Group.names = COMMANDS

app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDTH},
)


# the usual --help option of a group makes Typer import pydantic before any command
@app.callback(invoke_without_command=True, add_help_option=False)
def nanogpt(
    context: typer.Context,
    wants_help: Annotated[bool, typer.Option("--help", help="Show this message and stop.")] = False,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and stop.")] = False,
    install_completion: Annotated[
        bool, typer.Option("--install-completion", help="Complete commands, flags and names in this shell.")
    ] = False,
) -> None:
    """Train, fine-tune, evaluate and sample small GPTs. COMMAND --help says more about each command."""
    if version:
        from nanogpt_cli import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit
    if install_completion:
        from typer.completion import install  # type: ignore[attr-defined]

        shell, path = install(prog_name=PROGRAM)
        print(f"Completion for {shell} stands in {path}; it works in new shells.")
        raise typer.Exit
    if wants_help:
        typer.echo(context.get_help())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UserError.exit_code)


def main() -> None:
    """Entry point of the console script."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a narrow console must not end a run
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # once more, while the first one was told
        code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interpreter that ends answers with a traceback
    sys.exit(code)


def _open_missing_streams() -> None:
    """Where one of the three streams is closed, a file of ours would take its number and get what is meant for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; what is no error of the user's or the world's is raised."""
    command = typer.main.get_command(app)
    usage_error: Any = typer.BadParameter.__mro__[2]  # the base of Click's own errors has no public name in old Typers
    if f"_{PROGRAM.upper()}_COMPLETE" in os.environ:  # a shell asks for completions
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
        command(arguments, prog_name=PROGRAM)
    try:
        with command.make_context(PROGRAM, arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", INTERRUPTED)
    except StoppedError as stopped:
        return _stopped(stopped)
    except NanogptError as error:
        return _failed(str(error), error.exit_code)
    except BrokenPipeError:
        _leave_pipe()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typed = error.errno == errno.ENAMETOOLONG  # a name that no file system takes is the user's
        return _failed(f"{where}{error.strerror or error}", (UserError if typed else NanogptError).exit_code)
    except usage_error as error:
        return _failed(_usage(error), UserError.exit_code)
    except Exception as error:
        stop = _interruption(error)
        if stop is None:
            raise
        if isinstance(stop, StoppedError):
            return _stopped(stop)
        return _failed("interrupted", INTERRUPTED)
    return 0


def _stopped(stopped: StoppedError) -> int:
    """What the user wanted is no error."""
    return _failed(str(stopped).removeprefix("Stopped "), stopped.exit_code, "stopped", color="yellow")


def _interruption(error: BaseException | None) -> BaseException | None:
    """The signal that came first, where what it interrupted failed in its own way on the way out."""
    while error is not None and not isinstance(error, StoppedError | KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _usage(error: Any) -> str:
    """Typer's own message, with the way to the help text."""
    context = getattr(error, "ctx", None)
    where, hint = (f"{context.command_path}: ", f" {context.command_path} --help says more.") if context else ("", "")
    missing = getattr(getattr(error, "param", None), "metavar", None)
    if missing in ("RUN", "MODEL"):
        from nanogpt_cli.runs.directory import RUNS, list_runs

        hint = f" Runs in {RUNS}/: {', '.join(run.name for run in list_runs()) or 'none'}.{hint}"
    words = error.format_message().replace("Value error, ", "").rstrip(".")  # of pydantic, which says nothing to users
    return f"{where}{words}.{hint}"


def _failed(message: str, code: int, what: str = "error:", color: str = "red") -> int:
    if os.environ.get("NANOGPT_DEBUG"):
        import traceback

        traceback.print_exc()
    try:
        typer.echo(f"{styled(what, fg=color, bold=True)} {escaped(message)}", err=True)
    except OSError:  # nobody listens, or the disk that stderr goes to is full: the exit code still tells
        _leave_pipe()
    return code


def _leave_pipe() -> None:
    """Whoever read has gone: what is still buffered goes nowhere, quietly."""
    for stream in (sys.stdout, sys.stderr):
        give_up(stream)
