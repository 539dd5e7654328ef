"""Several ranks in processes forked from one that has torch loaded, joined as torchrun would have them join."""

import contextlib
import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from nanogpt_cli.config.layers import flag_layer
from nanogpt_cli.machine.rank_env import Nodes
from nanogpt_cli.progress import QUIET

ONE_MACHINE = Nodes()
PRELOADED = ("torch._dynamo", "torch._inductor", "nanogpt_cli.training.run", "tests.runner")


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def free_port() -> int:
    """One between 20,000 and 40,000, where the system does not look for ports of its own choice either."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


def as_torchrun(rank: int, count: int, port: int) -> dict[str, Any]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if count > 1 else {}


def as_srun(rank: int, count: int, port: int) -> dict[str, Any]:
    return {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NUM_TASKS": count,
        "SLURM_STEP_TASKS_PER_NODE": count,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_ID": port - 20000,  # the port follows from it
    }


def ranks(
    count: int,
    job: Callable[..., Any],
    *arguments: Any,
    environ: Callable[[int, int, int], dict[str, Any]] = as_torchrun,
    codes: list[int] | None = None,
) -> list[Any]:
    """What `job(*arguments)`, which must be importable, returns on each rank (None where it did not come to an end).

    Fails if the processes end with other exit codes than `codes`, by default all 0.
    """
    port, answers = free_port(), _server().SimpleQueue()
    processes = []
    main, sys.modules["__main__"].__file__ = sys.modules["__main__"].__file__, None  # not to be imported there
    for rank in range(count):
        texts = {name: str(value) for name, value in environ(rank, count, port).items()}
        processes.append(_server().Process(target=_work, args=(rank, texts, answers, job, arguments)))
        processes[-1].start()
    sys.modules["__main__"].__file__ = main
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.kill()
    found: dict[int, Any] = {}
    while not answers.empty():
        rank, answer = answers.get()
        found[rank] = answer
    assert [process.exitcode for process in processes] == (codes or [0] * count)
    return [found.get(rank) for rank in range(count)]


def _work(rank: int, environ: dict[str, str], answers: SimpleQueue, job: Callable[..., Any], arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environ)
    answers.put((rank, job(*arguments)))
    answers._writer.close()


def train(
    settings: dict[str, Any] | None,
    run: Path,
    *,
    machines: Nodes = ONE_MACHINE,
    say: Callable[[str], None] = print,
    **changes: Any,
) -> Any:
    """Start a run with `settings`, or continue it if they are None; on rank 0 the step it ended at."""
    from nanogpt_cli.training.request import Request, TrainRequest
    from nanogpt_cli.training.resume import ResumeRequest
    from nanogpt_cli.training.run import Command

    given = {**(settings or {}), **changes}
    flags = flag_layer({key: str(value) for key, value in given.items() if value is not None})
    request: Request = ResumeRequest(str(run), flags) if settings is None else TrainRequest((flags,), run)
    ended = Command(request, machines, False, contextlib.nullcontext(QUIET), lambda plan: None, say).run()
    return ended[1].step if ended else None


def recorded(settings: dict[str, Any] | None, run: Path, **changes: Any) -> tuple[Any, list[list[int]]]:
    """`train`, and the rows of each micro-batch that this rank took, in order (some read ahead come on top)."""
    from nanogpt_cli.data.tokens import batches

    taken: list[list[int]] = []
    rank_rows = batches.rank_rows

    def watching(*args: Any) -> range:
        rows = rank_rows(*args)
        taken.append(list(rows))
        return rows

    batches.rank_rows = watching
    return train(settings, run, **changes), taken


def resume(run: Path, max_iters: int, **changes: Any) -> Any:
    """Continue a run to `max_iters`."""
    return train(None, run, max_iters=max_iters, **changes)
