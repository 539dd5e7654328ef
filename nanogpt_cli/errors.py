"""The errors a user can meet, each with the exit code it ends the program with."""

from importlib import import_module
from typing import Any


class NanogptError(Exception):
    """Something failed while running. The message is shown as it stands, without a traceback."""

    exit_code = 1
    shared = False  # whether every process of a run raises it: then one of them tells the user


class UserError(NanogptError):
    """The input is wrong. The message says where, what was found, what is allowed and what to type."""

    exit_code = 2


class NonFiniteError(NanogptError):
    """Training met NaN or infinity; nothing non-finite was saved."""

    exit_code = 3
    shared = True


class StoppedError(NanogptError):
    """A signal ended the work after everything worth keeping was saved."""

    shared = True

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def package(module: str, purpose: str) -> Any:
    """A module that need not be installed; UserError says what `purpose` needs it, and how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UserError(f"{purpose} needs the package {name}. Install it: pip install {name}") from error


def typed(word: object) -> str:
    """A path or name as it has to be typed in a shell: quoted where it holds spaces and the like."""
    import shlex

    return shlex.quote(str(word))


def did_you_mean(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """' Did you mean X?' for the known word nearest to `word`, or an empty string."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
