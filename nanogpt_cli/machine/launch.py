"""Starting the ranks of this machine with torch's elastic launcher, and ending as one: one message, one exit code.

The protocol. The launcher trains nothing and holds no lock: it makes the run directory, then starts one worker a rank
that continues it (`nanogpt resume RUN`), each told its rank by torch's variables and the rest by `LAUNCHER`. From
then on rank 0 holds the run's lock, writes and prints; the other ranks' output goes to files that are read only if
one dies. A signal to the launcher is passed on once, and the ranks save and stop together at a step border; a second
signal kills them. A rank that fails writes its message, exit code and the time to TORCHELASTIC_ERROR_FILE. The others
then lose contact and fail too, so what is told is the earliest error that is not about lost contact, or the first
death without any. Ranks that have not ended `STRAGGLERS` seconds after the first are killed: they wait for one that
is gone. A death that a restart may cure is followed by a launch that shares nothing with the last, at most --max-
restarts times.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from nanogpt_cli.errors import NanogptError, StoppedError, typed
from nanogpt_cli.files import process_started
from nanogpt_cli.machine.rank_env import LAUNCHER, Launcher, Nodes
from nanogpt_cli.machine.signals import StopSignals

STRAGGLERS = 10.0  # seconds between the end of the first rank and that of the others
LAST_LINES = 20  # of what a rank wrote before it died without a word


class RankDiedError(NanogptError):
    """A rank crashed or was killed: what a restart may cure."""


def launch(
    run: str, processes: int, machines: Nodes, peak: tuple[float, str] | None, say: Callable[[str], None]
) -> None:
    """Run `processes` ranks on this machine to the end of the run, with at most `machines.max_restarts` restarts.

    Args:
        run: a path or name; of no meaning on other machines than 0.
        peak: if the ranks need not find out.

    Raises:
        NanogptError: the error of the rank that failed first, with that rank's exit code.
        RankDiedError: so did a rank, too often.
        StoppedError: a signal; the ranks have saved.
    """
    for attempt in range(machines.max_restarts + 1):
        # every machine counts the same failures, so that all agree on the number of an attempt
        launcher = Launcher(os.getpid(), machines, str(attempt), peak)
        error = _Ranks(["-m", "nanogpt_cli", "resume", run], processes, launcher).run()
        if error is None:
            return
        if not isinstance(error, RankDiedError):
            raise error
        if attempt == machines.max_restarts:
            raise RankDiedError(f"{error}\nTo go on from the last checkpoint: nanogpt resume {typed(run)}")
        say(f"{error}\nRestart {attempt + 1} of {machines.max_restarts}, from the last checkpoint.")


class _Ranks:
    """One launch. The elastic agent runs in a thread, so that signals reach us and not its own handlers."""

    def __init__(self, command: list[str], count: int, launcher: Launcher) -> None:
        self.command, self.count, self.launcher = command, count, launcher
        self.failures: dict[int, ProcessFailure] = {}
        self.crash: Exception | None = None  # of the agent itself
        self.agent: LocalElasticAgent | None = None
        self.first_end: float | None = None  # when a rank was first missed
        self.passed_on = False  # whether the ranks have the signal that came

    def run(self) -> NanogptError | None:
        """Launch, watch and wait; the error to tell, None after success."""
        thread = threading.Thread(target=self._run_agent, daemon=True)
        os.environ[LAUNCHER] = self.launcher.to_environment()  # for the workers, who inherit it
        threads = max(1, torch.get_num_threads() // self.count)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # all of them share the cores
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # stack traces of lost sockets
        with (
            tempfile.TemporaryDirectory(prefix="nanogpt-", ignore_cleanup_errors=True) as logs,
            StopSignals(lambda name: None) as signals,
        ):
            self.logs = Path(logs)
            thread.start()
            try:
                while thread.is_alive():
                    thread.join(0.1)
                    self._watch(signals)
            except StoppedError:  # a second signal
                self._signal(_KILL)
                thread.join(5)
                _leave_panel()
                raise
            if self.crash is not None:
                raise self.crash
            if not self.failures:
                return None
            if any(failure.exitcode == -_KILL for failure in self.failures.values()):
                _leave_panel()
            if signals.signum is None:
                return self._cause()
            told = [f.error_file_data for f in self.failures.values()]
            name = signal.Signals(signals.signum).name
            kept = f"Stopped by {name}. What was saved before is whole: nanogpt resume goes on."
            message = next((str(data["message"]) for data in told if data.get("exit_code", 0) > 128), kept)
            return StoppedError(message, signals.signum)

    def _run_agent(self) -> None:
        run_id = uuid.uuid4().hex
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what is to be told, we tell
        try:
            rendezvous = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", run_id, 1, 1))
            spec = WorkerSpec(
                role="rank",
                local_world_size=self.count,
                rdzv_handler=rendezvous,
                entrypoint=sys.executable,
                args=tuple(self.command),
                max_restarts=0,  # its restarts reuse a port and read stale keys
                monitor_interval=0.1,
            )
            # rank 0 writes to our terminal; the others should have nothing to say, and are heard if they die
            quiet = dict.fromkeys(range(1, self.count), Std.ALL)
            self.agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(self.logs), redirects=quiet))
            self.failures = self.agent.run().failures
            rendezvous.shutdown()
        except Exception as error:  # handed over to the main thread
            self.crash = error

    def _pids(self) -> list[int]:
        workers = self.agent.get_worker_group().workers if self.agent else []
        return [worker.id for worker in workers if worker.id is not None]

    def _signal(self, signum: int) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _watch(self, signals: StopSignals) -> None:
        pids = self._pids()
        if not pids:
            return
        if signals.signum is not None and not self.passed_on:
            self.passed_on = True
            self._signal(signals.signum)
        if self.first_end is None and not all(map(process_started, pids)):
            self.first_end = time.monotonic()
        if self.first_end is not None and time.monotonic() - self.first_end > STRAGGLERS:
            self._signal(_KILL)  # blocked where no Python runs: waiting for a rank that is gone

    def _cause(self) -> NanogptError:
        """What to tell: the first error that is not about another rank's end, else the first death, else any."""
        told = {r: f.error_file_data for r, f in self.failures.items() if "exit_code" in f.error_file_data}
        own = {r: data for r, data in told.items() if not data["lost"]}
        killed = {r: f for r, f in self.failures.items() if r not in told and f.exitcode < 0}
        if own or (told and not killed):
            first: dict[str, Any] = min((own or told).values(), key=lambda data: float(data["time"]))
            error = (RankDiedError if first["crash"] else NanogptError)(first["message"])
            error.exit_code = first["exit_code"]
            return error
        rank, failure = next(iter((killed or self.failures).items()))
        number = self.launcher.machines.number * self.count + rank
        end = f"ended with exit code {failure.exitcode}"
        if failure.exitcode < 0:
            end = f"was killed by {signal.Signals(-failure.exitcode).name}"
            end += " (the system does that when memory runs out)" * (failure.exitcode == -_KILL)
        texts = [path.read_text("utf-8") for path in self.logs.glob(f"**/{rank}/std*.log")]
        lines = "\n".join(texts).splitlines()
        last = "\n".join(["", "The last it wrote:", *lines[-LAST_LINES:]]) if lines else ""
        return RankDiedError(f"rank {number} {end}.{last}")


_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows knows no other end


def _leave_panel() -> None:
    """A rank that was killed could not leave its panel: show the cursor, and go on below."""
    if sys.stderr.isatty():
        print("\x1b[0m\x1b[?25h", file=sys.stderr, flush=True)
