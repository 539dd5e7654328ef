"""AdamW, and Muon for block matrices beside AdamW, as one optimizer whose state goes by parameter name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt_cli.config.schema import OptimSettings
from nanogpt_cli.machine.sharding import full_tensor, local_rows, to_local

QKV = "attn.c_attn.weight"  # three matrices stacked: Muon orthogonalises each on its own
EMBEDDINGS = ("wte.", "wpe.")
HEAD = "lm_head."

NamedState = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Slice:
    """A leaf that shares memory with rows of a parameter, so that Muon sees one matrix at a time."""

    owner: nn.Parameter
    rows: slice
    leaf: nn.Parameter


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """What Muon takes: the two-dimensional weights inside the blocks."""
    return name.startswith("h.") and parameter.ndim == 2


class Optimizer:
    """Updates the parameters of a bare model, or this rank's chunks of a sharded one.

    AdamW (Loshchilov & Hutter, 2019) decays matrices only. With `optimizer = "muon"` block matrices are updated, and
    alone decayed, by Muon (Jordan et al., 2024).
    """

    def __init__(self, model: nn.Module, settings: OptimSettings, device: torch.device) -> None:
        self.device = device
        self.owners: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.parameters = {n: p if to_local(p) is p else nn.Parameter(to_local(p)) for n, p in self.owners.items()}
        by_muon = settings.optimizer == "muon"
        matrices = {n: p for n, p in self.parameters.items() if by_muon and is_block_matrix(n, p)}
        self.slices = {n: _slices(n, p) for n, p in matrices.items()}
        self.adamw = torch.optim.AdamW(
            _adamw_groups({n: p for n, p in self.parameters.items() if n not in matrices}, settings),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.muon: torch.optim.Muon | None = None
        if matrices:
            leaves = [part.leaf for part in self._parts()]
            self.muon = torch.optim.Muon(
                leaves, lr=settings.muon_lr, momentum=settings.muon_momentum, weight_decay=settings.weight_decay
            )
            self.muon.param_groups[0]["peak"] = settings.muon_lr
            for leaf in leaves:
                self.muon.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """The one or two optimizers inside."""
        return [self.adamw] if self.muon is None else [self.adamw, self.muon]

    def set_rates(self, factor: float) -> None:
        """Every group's learning rate = its own peak times `factor`."""
        for optimizer in self.torch_optimizers():
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in (*self.owners.values(), *self.parameters.values()):
            parameter.grad = None
        for part in self._parts():
            part.leaf.grad = None

    def take_gradients(self) -> None:
        """Show the optimizers their parts of the gradients, which must be complete and not yet unscaled."""
        for name, owner in self.owners.items():
            chunk = self.parameters[name]
            if chunk is not owner:
                assert owner.grad is not None
                chunk.data, chunk.grad = to_local(owner), to_local(owner.grad)
        for part in self._parts():
            assert part.owner.grad is not None
            part.leaf.grad = part.owner.grad[part.rows]

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

    def _parts(self) -> list[Slice]:
        return [part for parts in self.slices.values() for part in parts]

    def step(self, skip: Tensor) -> None:
        """One update from the gradients; nothing changes where `skip` (a float32 scalar on the device) is 1."""
        self.adamw.found_inf = skip  # type: ignore[attr-defined]
        self.adamw.grad_scale = None  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None:
            self._step_muon(skip)

    @torch.no_grad()
    def _step_muon(self, skip: Tensor) -> None:
        assert self.muon is not None
        if self.device.type == "cpu":  # reading the flag costs nothing here, copies would
            if not skip.item():
                self.muon.step()
            return
        # torch's Muon knows no found_inf: keep what was, and select it back on the device
        tensors = [t for part in self._parts() for t in (part.leaf, self.muon.state[part.leaf]["momentum_buffer"])]
        before = [tensor.clone() for tensor in tensors]
        self.muon.step()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(skip > 0, old, tensor))

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
            for name, parts in self.slices.items():
                buffers = [self.muon.state[part.leaf]["momentum_buffer"] for part in parts]
                found |= {f"{name} (momentum {i})": buffer for i, buffer in enumerate(buffers)}
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
        muon: NamedState = {}
        if self.muon is not None:
            for name, parts in self.slices.items():
                muon[name] = {"momentum_buffer": torch.cat([self.muon.state[s.leaf]["momentum_buffer"] for s in parts])}
        return {"adamw": adamw, "muon": muon}

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
            for name, moments in state["muon"].items():
                for part in self.slices[name]:
                    buffer = _placed(moments["momentum_buffer"][part.rows], part.leaf, copy=not adopt)
                    self.muon.state[part.leaf] = {"momentum_buffer": buffer}


def _placed(value: Tensor, like: Tensor, *, copy: bool) -> Tensor:
    return value.to(device=like.device, dtype=torch.float32, copy=copy)


def _slices(name: str, parameter: nn.Parameter) -> list[Slice]:
    count = 3 if name.endswith(QKV) else 1
    height = parameter.shape[0] // count
    bounds = [slice(i * height, (i + 1) * height) for i in range(count)]
    return [Slice(parameter, rows, nn.Parameter(parameter.detach()[rows])) for rows in bounds]


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
