"""Which process of a run this one is, as the environment tells it: our own launcher, torchrun, or SLURM's srun.

Nothing here imports torch, so that a process may ask before it decides to speak.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nanogpt_cli.errors import UserError

LAUNCHER = "NANOGPT_LAUNCHER"  # the variable in which our launcher tells its workers what torch's does not
DEFAULT_PORT = 29500  # torchrun's
HIGHEST_PORT = 65535
DEFAULT_TIMEOUT = 600.0  # seconds
LONGEST_TIMEOUT = 7 * 86400.0  # seconds; torch cannot count much further


@dataclass(frozen=True)
class Nodes:
    """Where the processes of a run are started: the launch flags of train and resume; UserError if they contradict."""

    count: int = 1  # --nnodes
    number: int = 0  # --node-rank, from 0
    endpoint: str = ""  # --rdzv-endpoint, HOST or HOST:PORT of machine 0
    timeout: float = DEFAULT_TIMEOUT  # --rdzv-timeout, seconds to wait for all to join
    max_restarts: int = 0  # --max-restarts

    def __post_init__(self) -> None:
        nodes, seconds = f"--nnodes {self.count}", f"seconds are needed, above 0 and at most {LONGEST_TIMEOUT:,.0f}"
        if not 0 <= self.number < self.count:
            raise UserError(f"--node-rank {self.number} with {nodes}: machines are numbered 0 to {self.count - 1}.")
        if self.count > 1 and not self.endpoint:
            needed = "--rdzv-endpoint HOST:PORT: the name of machine 0 and a free port on it, the same on every machine"
            raise UserError(f"{nodes} needs {needed}.")
        if self.endpoint:
            split_endpoint(self.endpoint)
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UserError(f"--rdzv-timeout {self.timeout:g}: {seconds}.")
        if self.max_restarts < 0:
            raise UserError(f"--max-restarts {self.max_restarts}: a whole number of at least 0 is needed.")


@dataclass(frozen=True)
class Launcher:
    """What our launcher tells its workers."""

    pid: int
    machines: Nodes
    attempt: str  # different for every launch, the same on all machines
    peak: tuple[float, str] | None = None  # FLOP/s of one device and how it is known

    def to_environment(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class RankEnv:
    """This process among `world_size`; rank 0 writes, prints and decides by the clock."""

    rank: int = 0
    local_size: int = 1  # processes on this machine
    world_size: int = 1
    device_index: int = 0  # of the GPUs this process sees
    address: str = ""  # where rank 0, or torch's launcher for it, waits for the others
    port: int = 0
    agent_store: bool = False  # torch's launcher waits there, not rank 0
    attempt: str = ""
    launcher: Launcher | None = None
    machines: int = 1  # on which a process that is not distributed launches others

    @property
    def distributed(self) -> bool:
        """Whether this process is a rank among others."""
        return self.world_size > 1


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """What the environment says of this process; UserError names a variable that is missing or cannot be so.

    torchrun sets RANK, LOCAL_RANK, WORLD_SIZE and the like; srun sets SLURM_STEP_NUM_TASKS (which a batch script
    itself, or a shell in an allocation, does not have).
    """
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= environ.keys() or _number(environ, "WORLD_SIZE", 1) > 1:
        return _of_torch(environ)
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _of_slurm(environ)
    return RankEnv()


def _number(
    environ: Mapping[str, str], name: str, default: int | None = None, *, low: int = 0, high: int = 1 << 20
) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not low <= int(text) <= high:
        raise _unusable(environ, name, f"a whole number from {low:,} to {high:,}")
    return int(text)


def _unusable(environ: Mapping[str, str], name: str, needed: str) -> UserError:
    found = f"is {environ[name]!r}" if name in environ else "is not set"
    return UserError(
        f"{name} {found} in the environment, beside other variables of several processes: {needed} is needed. torchrun "
        f"and srun set it; for a run of one process: env -u WORLD_SIZE -u SLURM_STEP_NUM_TASKS -u {name} nanogpt ..."
    )


def _of_torch(environ: Mapping[str, str]) -> RankEnv:
    world_size = _number(environ, "WORLD_SIZE", low=1)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, low=1, high=world_size)
    rank, local_rank = (_number(environ, name, high=world_size - 1) for name in ("RANK", "LOCAL_RANK"))
    address = environ.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environ, "MASTER_PORT", DEFAULT_PORT, low=1, high=HIGHEST_PORT)
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launcher = _launcher(environ)
    if launcher and launcher.machines.count > 1:  # torch's launcher knows this machine alone
        rank, world_size = launcher.machines.number * local_size + local_rank, launcher.machines.count * local_size
        address, port = split_endpoint(launcher.machines.endpoint)
        agent_store = False
    attempt = launcher.attempt if launcher else environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankEnv(rank, local_size, world_size, local_rank, address, port, agent_store, attempt, launcher)


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    if LAUNCHER not in environ:
        return None
    try:
        told = json.loads(environ[LAUNCHER])
        return Launcher(**{**told, "machines": Nodes(**told["machines"])})
    except (ValueError, TypeError, KeyError):
        raise _unusable(environ, LAUNCHER, "what our own launcher sets") from None


def _of_slurm(environ: Mapping[str, str]) -> RankEnv:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", low=1)
    job = _number(environ, "SLURM_JOB_ID", 0, high=10**9)
    local_rank = _number(environ, "SLURM_LOCALID", high=world_size - 1)
    tasks = re.match(r"\d{1,7}", environ.get("SLURM_STEP_TASKS_PER_NODE", ""), re.ASCII)  # "8(x2)"
    if tasks is None:
        raise _unusable(environ, "SLURM_STEP_TASKS_PER_NODE", "the number of tasks on each machine, such as 8(x2),")
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return RankEnv(
        rank=_number(environ, "SLURM_PROCID", high=world_size - 1),
        local_size=int(tasks[0]),
        world_size=world_size,
        device_index=0 if len(visible) == 1 and visible[0] else local_rank,  # --gpus-per-task shows each its own
        address=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
        # jobs that share a machine get different ones
        port=_number(environ, "MASTER_PORT", 20000 + job % 20000, low=1, high=HIGHEST_PORT),
        attempt=f"{environ.get('SLURM_STEP_ID', '')}-{environ.get('SLURM_RESTART_COUNT', '')}",
    )


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: "node[003-004,9],x1" is node003."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\](\S*))?", nodes)
    if found is None:
        raise UserError(f"SLURM_STEP_NODELIST is {nodes!r}: no machine in it. Set MASTER_ADDR to the first machine.")
    name, number, rest = found.groups()
    return name + (number or "") + (rest or "").partition(",")[0]


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """HOST:PORT, HOST or [IPv6]:PORT as (host, port); UserError if it is none of them."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\s]+))(?::(\d{1,5}))?", endpoint)
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port <= HIGHEST_PORT:
        raise UserError(
            f"--rdzv-endpoint {endpoint}: HOST:PORT is needed, the name of machine 0 and a free port on it, "
            "such as node1:29500."
        )
    return found[1] or found[2], port
