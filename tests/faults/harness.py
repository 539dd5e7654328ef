"""`nanogpt` in processes of its own, forked from one that has torch loaded: half a second each instead of three."""

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

from hypothesis import HealthCheck, settings

PRELOADED = (
    "torch._dynamo",  # torch.optim loads it with the first optimizer
    "torch._inductor",
    "torch.profiler._cupti_monitor",
    "pytest",  # for patches that stand in a test file
    "hypothesis",
    "rich.live",
    "rich.progress",
    "rich.table",
    "tomli_w",
    "safetensors.torch",
    "nanogpt_cli.cli.report",
    "nanogpt_cli.cli.main",
    *(f"nanogpt_cli.cli.{command}" for command in ("train", "resume", "prepare", "export", "sample", "eval", "runs")),
    "nanogpt_cli.data.text.prepare",
    "nanogpt_cli.weights.export",
    "nanogpt_cli.training.run",
    "nanogpt_cli.view.live",
)


NUMBERS = itertools.count()


def search(examples: int) -> settings:
    """For hypothesis: so many examples, always the same; as many as FUZZ_EXAMPLES says, and always others."""
    more = os.environ.get("FUZZ_EXAMPLES")
    return settings(
        max_examples=int(more or examples),
        deadline=None,
        derandomize=more is None,
        suppress_health_check=list(HealthCheck),
    )


class Patch(Protocol):
    """What is done to the process before the command runs in it."""

    def install(self, folder: Path) -> None:
        """`folder` is the working folder."""


@dataclass
class Result:
    """How a command ended: its exit code, or minus the signal that killed it, and what it wrote."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Command:
    """A command that runs."""

    def __init__(self, arguments: Sequence[str], folder: Path, patches: Sequence[Patch]) -> None:
        streams = folder / ".streams"
        streams.mkdir(exist_ok=True)
        number = next(NUMBERS)  # two commands may run at the same time
        self.outputs = streams / f"{number}.out", streams / f"{number}.err"
        self.process = _server().Process(target=_command, args=(list(arguments), folder, *self.outputs, patches))
        with _no_main_module():
            self.process.start()

    def signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signum)

    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._read(1)

    def _read(self, which: int) -> str:
        path = self.outputs[which]
        return path.read_text(errors="replace") if path.exists() else ""  # it may have been killed before it began

    def wait(self, seconds: float = 120) -> Result:
        """Its end; a process that takes longer is killed, and the test fails."""
        self.process.join(seconds)
        late = self.process.is_alive()
        if late:
            self.process.kill()
            self.process.join()
        result = Result(self.process.exitcode or 0, self._read(0), self.err())
        assert not late, f"still running after {seconds} s: {result}"
        return result


def nanogpt(folder: Path, arguments: str | Sequence[str], *patches: Patch) -> Result:
    """Run one command in `folder` to its end."""
    return Command(arguments.split() if isinstance(arguments, str) else arguments, folder, patches).wait()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


@contextmanager
def _no_main_module() -> Iterator[None]:
    """A new process would import the script that started this one, pytest, before anything else."""
    main = sys.modules["__main__"]
    file, main.__file__ = main.__file__, None
    try:
        yield
    finally:
        main.__file__ = file


def _command(arguments: list[str], folder: Path, out: Path, err: Path, patches: Sequence[Patch]) -> None:
    import torch

    from nanogpt_cli.cli import report
    from nanogpt_cli.cli.main import main

    torch.set_num_threads(1)  # the number is part of a run's layout
    # drawing the curves takes longer than these runs, and so does a whole closing sample
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    report.SAMPLE_TOKENS = 5
    os.chdir(folder)
    os.environ["NANOGPT_CACHE"] = str(folder / ".cache")
    for target, number in ((out, 1), (err, 2)):
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    for patch in patches:
        patch.install(folder)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = ["nanogpt", *arguments]
    main()
