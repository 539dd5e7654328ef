"""How far a longer piece of work is: the one way for work to tell it, whoever listens."""

from typing import Protocol


class Progress(Protocol):
    """Hears what work does; a bar, a line now and then, or nobody."""

    def say(self, text: str) -> None:
        """One line about what was chosen or found."""

    def at(self, what: str, done: float, total: float, text: str = "") -> None:
        """`done` of `total` of the work called `what`, and in `text` what there is by now. Called often; may raise."""


class Quiet:
    """Progress that nobody hears."""

    def say(self, text: str) -> None: ...

    def at(self, what: str, done: float, total: float, text: str = "") -> None: ...


QUIET = Quiet()
