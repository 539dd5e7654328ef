"""Places that cannot be written, answered with how to name another."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nanogpt_cli.errors import UserError
from nanogpt_cli.files import DiskFullError


@contextlib.contextmanager
def writing(place: Path, another: str) -> Iterator[None]:
    """While a result is written to `place`, which the user named; `another` says how to name another.

    Raises:
        UserError: the system does not let it be written.
        DiskFullError: as it is.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error.strerror or error}. {another}") from None
