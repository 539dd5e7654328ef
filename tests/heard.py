"""Progress that remembers what it was told."""

from nanogpt_cli.progress import Progress


class Heard(Progress):
    """`said`: its lines; `steps`: (what, done, total) of every call of `at`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, float, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def at(self, what: str, done: float, total: float, text: str = "") -> None:
        self.steps.append((what, done, total))
