"""AdamW, and Muon for block matrices beside AdamW, as one optimizer whose state goes by parameter name."""

from collections.abc import Callable
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

NamedState = dict[str, dict[str, Tensor]]


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """What Muon takes: the two-dimensional weights inside the blocks."""
    return name.startswith("h.") and parameter.ndim == 2


class Optimizer:
    """Updates the parameters of a bare model, or this rank's chunks of a sharded one.

    AdamW (Loshchilov & Hutter, 2019) decays matrices only. With `optimizer = "muon"` block matrices are updated, and
    alone decayed, by Muon (Jordan et al., 2024).
    """

    def __init__(self, model: GPT, settings: OptimSettings, device: torch.device, processes: Processes = ALONE) -> None:
        self.device = device
        self.owners: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.parameters = {n: p if to_local(p) is p else nn.Parameter(to_local(p)) for n, p in self.owners.items()}
        by_muon = settings.optimizer == "muon"
        matrices = {n: p for n, p in self.parameters.items() if by_muon and is_block_matrix(n, p)}
        self.adamw = torch.optim.AdamW(
            _adamw_groups({n: p for n, p in self.parameters.items() if n not in matrices}, settings),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.replicated = processes.distributed and not self.sharded
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
        if self.replicated:
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

    def clip(self, limit: float, add: Callable[[Tensor], Tensor] = lambda squares: squares) -> Tensor:
        """Bring the gradients' norm down to `limit`, unless that is 0; the norm before.

        Args:
            add: adds up over the ranks, each of which has a part of a sharded model's squares.
        """
        parameters = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.sharded:
            norm = add(norm.square()).sqrt()
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

    @property
    def sharded(self) -> bool:
        """Whether this rank has a part of each parameter only."""
        return any(self.parameters[name] is not owner for name, owner in self.owners.items())

    def moments(self) -> dict[str, Tensor]:
        """What this rank has of the moments, with names to show."""
        found = {
            f"{n} ({key})": m for n, p in self.parameters.items() for key, m in self.adamw.state.get(p, {}).items()
        }
        if self.muon is not None:
            found |= {f"{name} (momentum)": momentum for name, momentum in self.muon.moments().items()}
        return found

    def state_by_name(self) -> dict[str, NamedState]:
        """{"adamw": {parameter: {exp_avg, exp_avg_sq, step}}, "muon": {parameter: {momentum_buffer}}}.

        Moments of a sharded model are whole on rank 0 only; every rank must call this.
        """
        adamw = {
            n: {
                key: full_tensor(value, self.owners[n]) if value.ndim else value
                for key, value in self.adamw.state[p].items()
            }
            for n, p in self.parameters.items()
            if p in self.adamw.state
        }
        return {"adamw": adamw, "muon": {} if self.muon is None else self.muon.state_by_name()}

    def load_state_by_name(self, state: dict[str, NamedState], *, adopt: bool = False) -> None:
        """Take moments over, as copies unless `adopt` is set; rates, decay and betas stay as the settings say.

        Raises:
            KeyError: a parameter of the state does not exist here.
        """
        for name, moments in state["adamw"].items():
            parameter, owner = self.parameters[name], self.owners[name]
            self.adamw.state[parameter] = {
                key: _placed(local_rows(value, owner) if value.ndim else value, parameter, copy=not adopt)
                for key, value in moments.items()
            }
        if self.muon is not None:
            self.muon.load_state_by_name(state["muon"])


def _placed(value: Tensor, like: Tensor, *, copy: bool) -> Tensor:
    return value.to(device=like.device, dtype=torch.float32, copy=copy)


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
