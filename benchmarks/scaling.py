"""Scaling on paper: from the time of one micro-step on one GPU to tokens/s on many, by volume and link speed alone.

    python benchmarks/scaling.py [--preset gpt2] [--rows 512] [--micro-batch 12] [--step-ms 135] [--json]

`--step-ms` is a forward and backward pass over `--micro-batch` rows on one GPU: measure your own with `nanogpt mfu`.
The default is nanoGPT's published 135 ms on an A100 (its README, "iteration time from ~250ms / iter to 135ms / iter").

What a rank sends in an update over n ranks (ring algorithms, as NCCL counts; P parameters):

- DDP: one all-reduce of float32 gradients in the last micro-step, 2 (n-1)/n 4P bytes;
- FSDP: in every micro-step an all-gather of bfloat16 weights before the forward and again before the backward pass, and
  a reduce-scatter of float32 gradients, (n-1)/n (2P + 2P + 4P) bytes.

Speeds, published by NVIDIA, one direction: NVLink of an A100 300 GB/s; DGX A100 8 x 200 Gbit/s InfiniBand, 200 GB/s a
machine of 8 GPUs; beside it one 100 Gbit/s Ethernet port a machine. DDP hides what fits behind the backward pass of
the last micro-step (2/3 of it), FSDP what fits behind each micro-step. Latency, stragglers and small micro-batches
cost more than this: the numbers are upper bounds, and say where it cannot pay, not that it does.

Check: nanoGPT's own 480 rows on 8 A100s come out at 675 ms; its README's "about 4 days" for 600,000 updates are 576 ms.
"""

import argparse
import json
from dataclasses import asdict, dataclass

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.model.sizes import parameter_table

GPUS = (8, 64, 512)
MACHINE = 8  # GPUs
NVLINK = 300.0  # GB/s
NETWORKS = {"InfiniBand 8 x 200 Gbit/s": 200.0, "Ethernet 100 Gbit/s": 12.5}  # GB/s a machine
BACKWARD = 2 / 3  # of a micro-step
PAYS = 0.5  # below this efficiency more GPUs are wasted


@dataclass(frozen=True)
class Estimate:
    """One update on `gpus` GPUs."""

    gpus: int
    way: str
    network: str
    gigabytes: float  # sent by each rank
    compute_ms: float
    exposed_ms: float  # communication that computing does not hide
    tokens_per_s: float
    efficiency: float


def estimate(
    way: str, network: str, gpus: int, parameters: int, rows: int, block_size: int, micro_batch: int, row_ms: float
) -> Estimate:
    """What one update of `rows` rows takes; a rank takes at most `micro_batch` rows at once."""
    mine = rows / gpus
    micro_steps = max(1, round(mine / micro_batch))
    compute = mine * row_ms
    share = (gpus - 1) / gpus
    speed = NVLINK if gpus <= MACHINE else min(NVLINK, NETWORKS[network])  # GB/s = MB/ms
    if way == "DDP":
        gigabytes = 2 * share * 4 * parameters / 1e9
        exposed = max(0.0, 1000 * gigabytes / speed - BACKWARD * compute / micro_steps)
    else:
        gigabytes = micro_steps * share * 8 * parameters / 1e9
        exposed = max(0.0, 1000 * gigabytes / speed - compute)
    tokens_per_s = rows * block_size / (compute + exposed) * 1000
    return Estimate(gpus, way, network, gigabytes, compute, exposed, tokens_per_s, compute / (compute + exposed))


def last_that_pays(way: str, network: str, parameters: int, rows: int, *rest: float) -> int:
    """The largest power of two of GPUs, at most one a row, that work at least half of their time."""
    block_size, micro_batch, row_ms = int(rest[0]), int(rest[1]), rest[2]
    counts = [2**i for i in range(3, rows.bit_length())]
    each = [estimate(way, network, n, parameters, rows, block_size, micro_batch, row_ms) for n in counts]
    return max(e.gpus for e in each if e.efficiency >= PAYS)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--rows", type=int, default=512, help="of an update, over all GPUs")
    parser.add_argument("--micro-batch", type=int, default=12)
    parser.add_argument("--step-ms", type=float, default=135.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    model = combine(preset_layer(given.preset)).config.replace("model", vocab_size=50304).model
    parameters = sum(parameter_table(model).values())
    rest = (parameters, given.rows, model.block_size, given.micro_batch, given.step_ms / given.micro_batch)
    found = [
        estimate(way, network, gpus, *rest)
        for network in NETWORKS
        for way in ("DDP", "FSDP")
        for gpus in GPUS
        if gpus <= given.rows
    ]
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    tokens = given.rows * model.block_size
    print(f"{given.preset}, {parameters:,} parameters, {given.rows} rows = {tokens:,} tokens an update, ", end="")
    print(f"{given.step_ms:g} ms for {given.micro_batch} rows on one GPU:\n")
    print("| network between machines | | GPUs | sent by each | computing | waiting | tokens/s | efficiency |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for e in found:
        print(
            f"| {e.network} | {e.way} | {e.gpus} | {e.gigabytes:.2f} GB | {e.compute_ms:.0f} ms | "
            f"{e.exposed_ms:.0f} ms | {e.tokens_per_s / 1e6:.2f} M | {e.efficiency:.0%} |"
        )
    print()
    for network in NETWORKS:
        ends = [f"{way} {last_that_pays(way, network, *rest)}" for way in ("DDP", "FSDP")]
        print(f"GPUs that still work half of their time or more, {network}: up to {', '.join(ends)}.")


if __name__ == "__main__":
    main()
