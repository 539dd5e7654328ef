"""How far a longer piece of work is: the one way for work to tell it, whoever listens."""


class Progress:
    """Hears what work does: nobody, or in a subclass a bar, or a line now and then."""

    def say(self, text: str) -> None:
        """One line about what was chosen or found."""

    def at(self, what: str, done: float, total: float, text: str = "") -> None:
        """`done` of `total` of the work called `what`, and in `text` what there is by now. Called often; may raise."""


QUIET = Progress()
