"""AdamW, and Muon for block matrices beside AdamW, as one optimizer whose state goes by parameter name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_cli.config.schema import OptimSettings
from nanogpt_cli.machine.distributed import ALONE, Processes
from nanogpt_cli.machine.sharding import full_tensor, local_rows, to_local
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.muon import Muon

EMBEDDINGS = ("wte.", "wpe.")
HEAD = "lm_head."

NamedState = Mapping[str, Mapping[str, Tensor]]


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """What Muon takes: the two-dimensional weights inside the blocks."""
    return name.startswith("h.") and parameter.ndim == 2


class Optimizer:
    """Updates the parameters of a bare model, or this rank's chunks of a sharded one.

    AdamW (Loshchilov & Hutter, 2019) decays matrices only. With `optimizer = "muon"` block matrices are updated, and
    alone decayed, by Muon (Jordan et al., 2024).
    """

    def __init__(self, model: GPT, settings: OptimSettings, device: torch.device, processes: Processes = ALONE) -> None:
        self.device, self.processes = device, processes
        self.owners: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.parameters = {n: p if to_local(p) is p else nn.Parameter(to_local(p)) for n, p in self.owners.items()}
        self.sharded = any(self.parameters[name] is not owner for name, owner in self.owners.items())
        by_muon = settings.optimizer == "muon"
        matrices = {n: p for n, p in self.parameters.items() if by_muon and is_block_matrix(n, p)}
        self.adamw = torch.optim.AdamW(
            _adamw_groups({n: p for n, p in self.parameters.items() if n not in matrices}, settings),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.muon = Muon(matrices, self.owners, model.config, settings, processes) if matrices else None

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW, and Muon where there is one: what a gradient scaler unscales."""
        return [self.adamw] if self.muon is None else [self.adamw, self.muon]

    def set_rates(self, factor: float) -> None:
        """Every group's learning rate = its own peak times `factor`."""
        for optimizer in self.torch_optimizers():
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor

    def zero_grad(self) -> None:
        """Drop all gradients, of the parameters and of the chunks that show them to the optimizers.

        Those of replicas become zeros where they are, in DDP's buckets: new ones would be held beside the buckets.
        """
        if self.processes.distributed and not self.sharded:
            torch._foreach_zero_([p.grad for p in self.owners.values() if p.grad is not None])
            return
        for parameter in (*self.owners.values(), *self.parameters.values()):
            parameter.grad = None

    def take_gradients(self) -> None:
        """Show the optimizers their chunks of the gradients, which must be complete and not yet unscaled."""
        for name, owner in self.owners.items():
            chunk = self.parameters[name]
            if chunk is not owner:
                assert owner.grad is not None
                chunk.data, chunk.grad = to_local(owner), to_local(owner.grad)

    def clip(self, limit: float) -> Tensor:
        """Bring the gradients' norm down to `limit`, unless that is 0; the norm before."""
        parameters = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.sharded:  # each rank has a part of the squares
            norm = self.processes.sum(norm.square()).sqrt()
        # multiplying by one costs a sweep over all gradients; only a CPU can look at the norm without waiting
        if limit and not (self.device.type == "cpu" and norm.item() + 1e-6 <= limit):
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def step(self, skip: Tensor) -> None:
        """One update from the gradients; nothing changes where `skip` (a float32 scalar on the device) is 1."""
        # a CPU reads the flag for nothing; on MPS the read waits, but its fused AdamW ignores found_inf
        if self.device.type in ("cpu", "mps") and skip.item():
            return
        self.adamw.found_inf = skip  # type: ignore[attr-defined]
        self.adamw.grad_scale = None  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None:
            self.muon.update(skip)

    def _state(self) -> dict[str, NamedState]:
        momentum = {} if self.muon is None else self.muon.momentum()
        return {
            "adamw": {n: self.adamw.state[p] for n, p in self.parameters.items() if p in self.adamw.state},
            "muon": {name: {"momentum_buffer": rows} for name, rows in momentum.items()},
        }

    def moments(self) -> dict[str, Tensor]:
        """What this rank has of the moments, with names to show."""
        named = [(name, held) for part in self._state().values() for name, held in part.items()]
        return {f"{name} ({key})": moment for name, held in named for key, moment in held.items()}

    def state_by_name(self) -> dict[str, NamedState]:
        """{"adamw": {parameter: {exp_avg, exp_avg_sq, step}}, "muon": {parameter: {momentum_buffer}}}.

        Moments of a sharded model are whole on rank 0 only; every rank must call this.
        """

        def whole(name: str, moment: Tensor) -> Tensor:
            return full_tensor(moment, self.owners[name]) if moment.ndim else moment

        return {
            part: {name: {key: whole(name, moment) for key, moment in held.items()} for name, held in named.items()}
            for part, named in self._state().items()
        }

    def load_state_by_name(self, state: Mapping[str, NamedState], *, adopt: bool = False) -> None:
        """Take moments over, as copies unless `adopt` is set; rates, decay and betas stay as the settings say."""
        for name, moments in state["adamw"].items():
            parameter, owner = self.parameters[name], self.owners[name]
            mine = {key: local_rows(value, owner) if value.ndim else value for key, value in moments.items()}
            self.adamw.state[parameter] = {
                key: value.to(parameter.device, torch.float32, copy=not adopt) for key, value in mine.items()
            }
        momentum = {} if self.muon is None else self.muon.momentum()
        for name, moments in state["muon"].items():
            momentum[name].copy_(local_rows(moments["momentum_buffer"], self.owners[name]))


def _adamw_groups(parameters: dict[str, nn.Parameter], settings: OptimSettings) -> list[dict[str, Any]]:
    """Groups by decay (two and more dimensions) and by peak rate (embeddings, head, the rest).

    Beside Muon nothing here decays: embeddings then have rates a hundred times higher, which would shrink them away.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.ndim >= 2 and settings.optimizer == "adamw" else 0.0
        scale = 1.0
        if name.startswith(EMBEDDINGS):
            scale = settings.embed_lr_scale
        elif name.startswith(HEAD):
            scale = settings.head_lr_scale
        groups.setdefault((decay, settings.learning_rate * scale), []).append(parameter)
    return [{"params": ps, "weight_decay": decay, "peak": peak} for (decay, peak), ps in groups.items()]
