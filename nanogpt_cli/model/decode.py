"""A model made ready to write text: weights packed once for the device, keys and values kept, one position a step.

Generation reads every weight for every position, so it is bound by memory, not by arithmetic: on a CPU the matrices are
laid out as oneDNN wants them (2.5 times faster than F.linear for a few rows), in bfloat16 they are half as long, and on
CUDA a step is one captured graph instead of hundreds of launches.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogpt_cli.model.gpt import GPT

PACK_ROWS = 16  # the number of rows oneDNN lays the matrices out for; others work too


class FrozenLinear(nn.Module):
    """x W^T + b with the product in W's format; on a CPU with W laid out for oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        onednn = torch.backends.mkldnn.is_available()
        self.packed = onednn and weight.device.type == "cpu" and dtype != torch.float16
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), PACK_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) of any format -> (..., out) in the weight's."""
        x = x.to(self.dtype)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)


def frozen_copy(model: GPT, dtype: torch.dtype) -> GPT:
    """A copy in evaluation mode whose block matrices are FrozenLinear in `dtype`; all else is shared with `model`.

    The residual stream, the norms and the output head stay in the model's own format: bfloat16 would round GPT-2's
    logits of around -100 to halves.
    """
    with torch.device("meta"):
        copy = GPT(model.config)
    copy.load_state_dict(model.state_dict(), assign=True)
    for parent in [m for m in copy.modules() if not isinstance(m, nn.Linear)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                kept = child.weight.dtype if name == "lm_head" else dtype
                setattr(parent, name, FrozenLinear(child.weight, child.bias, kept))
    if model.lm_head is None:
        copy.lm_head = FrozenLinear(model.wte.weight, None, model.wte.weight.dtype)  # type: ignore[assignment]
    return copy.eval().requires_grad_(False)


class LayerCache:
    """Keys and values of one layer: (rows, nkv, capacity, hs), filled from the front."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0
        self.place: Tensor | None = None  # where a captured step writes, (1,) int64; then `length` is not used

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take k, v (rows, nkv, T, hs); returns all, and attn_mask (1, capacity) if some do not count."""
        if self.place is not None:
            self.k.index_copy_(2, self.place, k)
            self.v.index_copy_(2, self.place, v)
            return self.k, self.v, torch.arange(self.k.shape[2], device=k.device)[None] <= self.place
        start, self.length = self.length, self.length + k.shape[2]
        self.k[: len(k), :, start : self.length] = k
        self.v[: len(v), :, start : self.length] = v
        return self.k[: len(k), :, : self.length], self.v[: len(v), :, : self.length], None

    def spread(self) -> None:
        """Give every row what the first one holds."""
        self.k[1:, :, : self.length] = self.k[:1, :, : self.length]
        self.v[1:, :, : self.length] = self.v[:1, :, : self.length]


class Decoder:
    """Next-token logits for rows that grow together, with or without a cache.

    Args:
        model: taken as it is; may be in training mode, and stays so.
        dtype: of the block matrices and, except on a CPU, of the cache; None is float32.
    """

    def __init__(self, model: GPT, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or torch.float32
        self.model = frozen_copy(model, self.dtype)
        self.block_size = model.config.block_size
        self.device = model.wte.weight.device
        self.layers: list[LayerCache] = []
        self._replay: Callable[[Tensor], Tensor] | None = None

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids (rows, T) -> logits (rows, V) of the position after, everything computed anew."""
        return self.model.logits(self.model.hidden_states(tokens)[:, -1])

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, rows: int, capacity: int) -> Tensor:
        """As `logits`, keeping keys and values for up to `capacity` positions; one row may stand for all `rows`."""
        config = self.model.config
        shape = (rows, config.kv_heads, capacity, config.head_width)
        if not self.layers or self.layers[0].k.shape != shape:
            # a CPU attends twice as fast in float32
            dtype = torch.float32 if self.device.type == "cpu" else self.dtype
            self.layers = [LayerCache(shape, dtype, self.device) for _ in range(config.n_layer)]
            self._replay = None
        for layer in self.layers:
            layer.length, layer.place = 0, None
        x = self.model.hidden_states(tokens, self.layers)
        if len(tokens) < rows:
            for layer in self.layers:
                layer.spread()
        return self.model.logits(x[:, -1])

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """The newest ids (rows, 1) -> logits (rows, V)."""
        if self.device.type != "cuda":
            positions = torch.tensor([self.layers[0].length], device=self.device)
            return self.model.logits(self.model.hidden_states(tokens, self.layers, positions)[:, -1])
        with torch.cuda.device(self.device):  # streams and graphs belong to the current device
            if self._replay is None:
                self._replay = self.capture(tokens)
            return self._replay(tokens)

    def capture(self, tokens: Tensor, graph: bool = True) -> Callable[[Tensor], Tensor]:
        """A step whose shapes never change: it writes at a place kept on the device and masks what is not filled yet.

        With `graph` (CUDA only) it is recorded once and replayed.
        """
        ids, place = tokens.clone(), torch.tensor([self.layers[0].length], device=self.device)

        def work() -> Tensor:  # a repetition writes the same place again
            for layer in self.layers:
                layer.place = place
            return self.model.logits(self.model.hidden_states(ids, self.layers, place)[:, -1])

        run = _recorded(work) if graph else work

        def step(newest: Tensor) -> Tensor:
            ids.copy_(newest)
            place.fill_(self.layers[0].length)
            out = run()
            for layer in self.layers:
                layer.length += 1
            return out

        return step


def _recorded(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`work` as a CUDA graph, to be run again on what then stands where it reads; it must do no harm when repeated."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # picks kernels before the recording
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
