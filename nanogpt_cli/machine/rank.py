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
DEFAULT_TIMEOUT = 600.0  # seconds
LONGEST_TIMEOUT = 7 * 86400.0  # seconds; torch cannot count much further


@dataclass(frozen=True)
class Machines:
    """Where the processes of a run are started: the launch flags of train and resume.

    Raises:
        UserError: the flags do not go together.
    """

    count: int = 1  # --nnodes
    number: int = 0  # --node-rank, from 0
    endpoint: str = ""  # --rdzv-endpoint, HOST or HOST:PORT of machine 0
    timeout: float = DEFAULT_TIMEOUT  # --rdzv-timeout, seconds to wait for all to join
    max_restarts: int = 0  # --max-restarts

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UserError(
                f"--node-rank {self.number} with --nnodes {self.count}: machines are numbered 0 to {self.count - 1}."
            )
        if self.count > 1 and not self.endpoint:
            raise UserError(
                f"--nnodes {self.count} needs --rdzv-endpoint HOST:PORT: the name of machine 0 and a free port on it, "
                "the same on every machine."
            )
        if self.endpoint:
            split_endpoint(self.endpoint)
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UserError(
                f"--rdzv-timeout {self.timeout:g}: seconds are needed, above 0 and at most {LONGEST_TIMEOUT:,.0f}."
            )
        if self.max_restarts < 0:
            raise UserError(f"--max-restarts {self.max_restarts}: a whole number of at least 0 is needed.")


@dataclass(frozen=True)
class Launcher:
    """What our launcher tells its workers."""

    pid: int
    machines: Machines
    attempt: str  # different for every launch, the same on all machines
    peak: tuple[float, str] | None = None  # FLOP/s of one device and how it is known

    def to_environment(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Place:
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

    @property
    def several(self) -> bool:
        """Whether this process is a rank among others."""
        return self.world_size > 1


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place.

    torchrun sets RANK, LOCAL_RANK, WORLD_SIZE and the like; srun sets SLURM_STEP_NUM_TASKS (which a batch script
    itself, or a shell in an allocation, does not have).
    """
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= environ.keys():
        return _of_torch(environ)
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_slurm(environ)
    return Place()


def _of_torch(environ: Mapping[str, str]) -> Place:
    local_rank, local_size = int(environ["LOCAL_RANK"]), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    launcher = None
    if LAUNCHER in environ:
        told = json.loads(environ[LAUNCHER])
        launcher = Launcher(**{**told, "machines": Machines(**told["machines"])})
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    address, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", DEFAULT_PORT))
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher and launcher.machines.count > 1:  # torch's launcher knows this machine alone
        rank, world_size = launcher.machines.number * local_size + local_rank, launcher.machines.count * local_size
        address, port = split_endpoint(launcher.machines.endpoint)
        agent_store = False
    attempt = launcher.attempt if launcher else environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, local_size, world_size, local_rank, address, port, agent_store, attempt, launcher)


def _of_slurm(environ: Mapping[str, str]) -> Place:
    job = int(environ.get("SLURM_JOB_ID", "0"))
    local_rank = int(environ["SLURM_LOCALID"])
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        local_size=int(re.findall(r"\d+", environ["SLURM_STEP_TASKS_PER_NODE"])[0]),  # "8(x2)"
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        device_index=0 if len(visible) == 1 and visible[0] else local_rank,  # --gpus-per-task shows each its own
        address=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        port=int(environ.get("MASTER_PORT", 20000 + job % 20000)),  # jobs that share a machine get different ones
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
    """HOST:PORT, HOST or [IPv6]:PORT as (host, port).

    Raises:
        UserError: it is none of them.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\s]+))(?::(\d{1,5}))?", endpoint)
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise UserError(
            f"--rdzv-endpoint {endpoint}: HOST:PORT is needed, the name of machine 0 and a free port on it, "
            "such as node1:29500."
        )
    return found[1] or found[2], port
