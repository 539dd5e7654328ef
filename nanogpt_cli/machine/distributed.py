"""The processes of one run: how they join, and what they do together. One process is the plain case.

The protocol. Rank 0 of the run listens at an address that all know from their environment, or torch's launcher does
for it. Every rank writes its host under its number there and waits until all have: so that a missing one is named,
which torch's own rendezvous cannot do. Then they form a gloo group, over which plain values and errors travel, and,
where tensors live on GPUs, an nccl group beside it. Rank 0 decides alone (files, clock, plans) and broadcasts; a
problem that any rank may have is gathered by `agree`, so that either all go on or all raise the same error and one of
them tells it. All collectives are called in the same order on every rank, and errors that end a rank outside `agree`
end the others by a lost connection. They leave through a barrier: who went first would look like one that died.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

from nanogpt_cli.config.schema import SystemSettings
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.rank_env import RankEnv

T = TypeVar("T")

# a process that died is noticed at once; this is for one that hangs, and longer than any save by rank 0 takes
PATIENCE = timedelta(hours=1)
STUCK = timedelta(minutes=10)  # for GPUs, which wait for each other's passes only: while rank 0 saves, gloo waits
PARTING = timedelta(minutes=2)  # rank 0 may still be sending metrics away


@dataclass(frozen=True)
class Processes:
    """This process among `world_size`; rank 0 writes, prints and decides by the clock."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None  # what tensors on the device go through; words always go through gloo

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there is anyone to talk to."""
        return self.world_size > 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        if self.distributed:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Equally shaped tensors of all ranks, one above the other: (ranks, *shape)."""
        found = torch.empty(self.world_size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        parts = list(found.view(torch.uint8).unbind())  # as bytes, since gloo does not know every format
        dist.all_gather(parts, tensor.contiguous().view(torch.uint8), group=self.group)
        return found

    def from_main(self, value: T) -> T:
        """What rank 0 gave, on every rank; plain values only."""
        if not self.distributed:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def agree(self, problem: NanogptError | None) -> None:
        """Raise on every rank if one of them has a problem: the first one's, which only rank 0 need tell."""
        if not self.distributed:
            if problem is not None:
                raise problem
            return
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (socket.gethostname(), problem))
        for rank, (host, error) in enumerate(found):
            if error is not None:
                shared = type(error)(str(error) if rank == 0 else f"rank {rank} on {host}: {error}")
                shared.shared = True
                raise shared

    def on_device(self, compute: Compute, backend: str) -> "Processes":
        """The same processes with a way for tensors on the device, "nccl" or "gloo"."""
        if not self.distributed or backend == "gloo":
            return self
        torch.cuda.set_device(compute.device)
        return replace(self, group=dist.new_group(backend=backend, timeout=STUCK))

    def wrap(self, model: nn.Module, compute: Compute) -> nn.Module:
        """The module to call in training: gradients are averaged over the ranks."""
        if not self.distributed:
            return model
        ids = [compute.device.index] if compute.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            model, device_ids=ids, process_group=self.group, gradient_as_bucket_view=True
        )

    def leave(self) -> None:
        """Part from the others when all are done: who goes first must not look like one that died."""
        if self.distributed:
            with contextlib.suppress(RuntimeError):  # who got through first may be gone already
                dist.monitored_barrier(timeout=PARTING)
            dist.destroy_process_group()  # in any case: its threads can abort an interpreter that ends around them


ALONE = Processes()


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-step: only the last one of a step averages gradients over the ranks.

    The gradients of a sharded model are whole until then: 4 bytes a parameter against a reduction in each micro-step.
    DDP looks at the switch in the forward pass too, so both must be inside.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if last or not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def check_gpus(system: SystemSettings, processes: int, highest_index: int) -> None:
    """Refuse more processes on this machine than it has GPUs, up to `highest_index` as this process numbers them."""
    kind = system.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "mps" and processes > 1:
        raise UserError(f"--gpus {processes}: there is one Apple GPU. Use --gpus 1, or --device cpu.")
    count = torch.cuda.device_count()
    if kind == "cuda" and highest_index >= count > 0:
        raise UserError(
            f"--gpus {processes}: this machine has {count} CUDA device{'s' * (count > 1)}. "
            f"Use --gpus {count}{' or fewer' * (count > 1)}; --device cpu takes any number."
        )
    if ":" in system.device and processes > 1:
        raise UserError(f"--device {system.device} names one GPU, --gpus asks for {processes}: use --device {kind}.")


def choose_backend(asked: str, device: torch.device) -> str:
    """ "nccl" where it can be had, else "gloo"; UserError if "nccl" was asked for and cannot be had."""
    nccl = device.type == "cuda" and dist.is_nccl_available()  # builds for Windows have none
    if asked == "nccl" and not nccl:
        raise UserError(f"--backend nccl: not to be had on {device.type} with this torch build. Use --backend auto.")
    return "nccl" if nccl and asked != "gloo" else "gloo"


def join(env: RankEnv, timeout: float) -> Processes:
    """Join the other ranks within `timeout` seconds; UserError names those that did not come, or the port if taken."""
    deadline = time.monotonic() + timeout
    hosts = env.rank == 0 and not env.agent_store
    if not hosts:
        _await_listener(env, timeout)
    try:
        tcp = TCPStore(
            env.address,
            env.port,
            is_master=hosts,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        if not hosts:
            raise
        raise UserError(
            f"port {env.port} on this machine, where the processes are to meet, is taken or closed "
            f"({str(error).splitlines()[0]}). "
            "Choose another: --rdzv-endpoint HOST:PORT, or MASTER_PORT with torchrun and srun."
        ) from None
    store = PrefixStore(env.attempt, tcp)
    keys = [f"rank {rank}" for rank in range(env.world_size)]
    store.set(keys[env.rank], socket.gethostname())
    deadline += 5 * (env.rank > 0)  # rank 0 speaks for all, if it is there
    while not store.check(keys):
        if store.check(["missing"]):
            ranks: list[int] = json.loads(store.get("missing"))
            machines = sorted({rank // env.local_size for rank in ranks})
            missing = UserError(
                f"{env.world_size - len(ranks)} of {env.world_size} processes met at {env.address}:{env.port} in "
                f"{timeout:g} s; missing: rank {', '.join(map(str, ranks))} (machine {', '.join(map(str, machines))}). "
                "Start the same command on every machine, each with its own --node-rank; --rdzv-timeout waits longer."
            )
            missing.shared = 0 not in ranks
            raise missing
        if time.monotonic() > deadline:
            store.set("missing", json.dumps([rank for rank, key in enumerate(keys) if not store.check([key])]))
            time.sleep(1)  # the others read it, before the store goes with this process
        time.sleep(0.05)
    dist.init_process_group(
        "gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=timedelta(seconds=timeout)
    )
    _set_pg_timeout(PATIENCE, dist.group.WORLD)
    return Processes(env.rank, env.world_size)


def _await_listener(env: RankEnv, timeout: float) -> None:
    """Try until somebody listens where the ranks are to meet; torch's own tries fill the screen."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((env.address, env.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"nobody was found at {env.address}:{env.port} in {timeout:g} s ({error}). "
                    "Start the command on machine 0 too, and name it in --rdzv-endpoint as this machine can reach it; "
                    "--rdzv-timeout waits longer."
                ) from None
        time.sleep(0.2)


def lost_contact(error: BaseException) -> bool:
    """Whether an error only says that another process has gone: that one's own error is the one to read."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
