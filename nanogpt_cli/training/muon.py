"""Muon (Jordan et al., 2024): matrices move along the orthogonal part of their momentum.

Matrices of one shape are worked on as a stack, so that an update takes a few dozen launches whatever the depth. Several
ranks share the stacks out and gather what the others found. Of a sharded model (FSDP) each rank has some rows of every
parameter and of its momentum, and the directions are gathered first, since Muon needs whole matrices.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_cli.config.schema import ModelSettings, OptimSettings
from nanogpt_cli.machine.distributed import Processes
from nanogpt_cli.model.gpt import matrix_heights

STEPS, COEFFICIENTS, EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7  # of the Newton-Schulz iteration, as in torch.optim.Muon


def orthogonalize(x: Tensor) -> Tensor:
    """Near each matrix of a bfloat16 stack (K, r, c), r <= c, the one with singular values of about 1."""
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT  # (K, r, r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass
class Stack:
    """Parameters of one shape (R, c): the rows this rank has of them, and the momentum of these rows."""

    names: list[str]
    rows: list[Tensor]  # K of (at most r, c)
    heights: tuple[int, ...]  # of the matrices in each parameter; their sum is R
    momentum: Tensor  # (K, r, c); r is R on one rank, and the height of the first rank's share of a sharded model

    @property
    def count(self) -> int:
        """Rows this rank has of each parameter: the last ranks may have fewer than r."""
        return self.rows[0].shape[0]


class Muon(torch.optim.Optimizer):
    """One group of matrices, with torch.optim.Muon's numbers.

    Args:
        rows: by name, what this rank has of each parameter.
        owners: the parameters themselves.
        config: says which of them are several matrices, one above the other: each is orthogonalised on its own.
    """

    def __init__(
        self,
        rows: Mapping[str, nn.Parameter],
        owners: Mapping[str, nn.Parameter],
        config: ModelSettings,
        settings: OptimSettings,
        processes: Processes,
    ) -> None:
        defaults = {"lr": settings.muon_lr, "peak": settings.muon_lr, "weight_decay": settings.weight_decay}
        super().__init__(list(rows.values()), defaults)
        self.mu, self.processes = settings.muon_momentum, processes
        self.sharded = any(rows[name] is not owners[name] for name in rows)
        by_shape: dict[Any, list[str]] = defaultdict(list)
        for name in rows:
            shape = owners[name].shape
            by_shape[shape, matrix_heights(config, name, shape[0])].append(name)
        self.stacks = []
        for (shape, parts), names in by_shape.items():
            most = -(-shape[0] // processes.world_size) if self.sharded else shape[0]
            momentum = torch.zeros(len(names), most, shape[1], device=rows[names[0]].device)
            self.stacks.append(Stack(names, [rows[name] for name in names], parts, momentum))

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """One update from the gradients; nothing changes where `skip` (a float32 scalar on the device) is 1."""
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        go = 1 - skip
        keep = 1 - lr * decay * go
        pieces = [self._direction(stack, skip).split(stack.heights, dim=1) for stack in self.stacks]
        for stack, found in zip(self.stacks, self._orthogonal(pieces), strict=True):
            # a tall matrix's longer columns: as large a change of each entry as a square one's
            sized = [p.float() * (go * (-lr * max(1.0, p.shape[1] / p.shape[2]) ** 0.5)) for p in found]
            change = torch.cat(sized, dim=1) if len(sized) > 1 else sized[0]  # (K, R, c)
            start = self.processes.rank * stack.momentum.shape[1] if self.sharded else 0
            torch._foreach_mul_(stack.rows, keep)
            torch._foreach_add_(stack.rows, list(change[:, start : start + stack.count].unbind(0)))

    def _direction(self, stack: Stack, skip: Tensor) -> Tensor:
        """Nesterov's look ahead, whole parameters in bfloat16 (K, R, c); the momentum moves on."""
        momentum = stack.momentum[:, : stack.count]
        grads = torch.stack([rows.grad for rows in stack.rows if rows.grad is not None])  # (K, count, c)
        grads = torch.where(skip > 0, momentum, grads)  # which leaves the momentum as it is, bit for bit
        momentum.lerp_(grads, 1 - self.mu)
        ahead = grads.lerp_(momentum, self.mu).bfloat16()
        if not self.sharded:
            return ahead
        padded = ahead.new_zeros(stack.momentum.shape)
        padded[:, : stack.count] = ahead
        gathered = self.processes.gather(padded)  # (ranks, K, r, c)
        return gathered.transpose(0, 1).flatten(1, 2)[:, : sum(stack.heights)]

    def _orthogonal(self, pieces: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
        """The orthogonal pieces, (K, h, c) as they came; each rank works on its share of every shape."""
        by_shape: dict[torch.Size, list[tuple[int, int]]] = defaultdict(list)
        wide = [[p.mT if p.shape[1] > p.shape[2] else p for p in row] for row in pieces]
        for i, row in enumerate(wide):
            for j, piece in enumerate(row):
                by_shape[piece.shape[1:]].append((i, j))
        for places in by_shape.values():
            matrices = torch.cat([wide[i][j] for i, j in places])  # (M, r, c)
            found = orthogonalize(matrices) if self.processes.world_size == 1 else self._shared_out(matrices)
            for (i, j), piece in zip(places, found.split([len(wide[i][j]) for i, j in places]), strict=True):
                wide[i][j] = piece.mT if pieces[i][j].shape[1] > pieces[i][j].shape[2] else piece
        return wide

    def _shared_out(self, matrices: Tensor) -> Tensor:
        ranks, rank = self.processes.world_size, self.processes.rank
        each = -(-len(matrices) // ranks)
        mine = matrices[rank * each : (rank + 1) * each]
        share = matrices.new_zeros(each, *matrices.shape[1:])
        share[: len(mine)] = orthogonalize(mine)
        return self.processes.gather(share).flatten(0, 1)[: len(matrices)]

    def momentum(self) -> dict[str, Tensor]:
        """By name, that of the rows this rank has; the live tensors."""
        return {name: stack.momentum[k, : stack.count] for stack in self.stacks for k, name in enumerate(stack.names)}
