"""What eight ranks send each other in an update, counted in a group that only pretends to be there."""

import json
import subprocess
import sys

import pytest

COUNT = """
import collections, json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_cli.config.layers import combine
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.derived import Split
from nanogpt_cli.machine.device import Compute
from nanogpt_cli.machine.distributed import Processes
from nanogpt_cli.training.state import build_state
from nanogpt_cli.training.step import TrainStep

class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.count[func._schema.name.removeprefix("c10d::").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
preset, parallel, micro_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = combine(preset_layer(preset)).config
for key, value in {"n_embd": 96, "n_head": 6, "block_size": 16, "vocab_size": 128}.items():
    config = config.replace("model", **{key: value})
config = config.replace("system", parallel=parallel)
processes, compute = Processes(0, 8), Compute(torch.device("cpu"), torch.float32, False, True, {})
state = build_state(config, compute, processes)
model = state.model if parallel == "fsdp" else processes.wrap(state.model, compute)
step = TrainStep(state, model, Split(1, micro_steps, 8), compute, processes)
ids = torch.zeros(1, 16, dtype=torch.long)
for _ in range(2):  # the first update prepares groups
    with Collectives() as seen:
        step(iter([(ids, ids.clone())] * micro_steps), between=lambda: None, wishes=())
print(json.dumps(seen.count))
"""


def collectives(preset: str, parallel: str, micro_steps: int) -> dict[str, int]:
    """By name, of one update."""
    command = [sys.executable, "-c", COUNT, preset, parallel, str(micro_steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_fsdp_gathers_in_each_micro_step_and_reduces_once(micro_steps: int) -> None:
    """Twelve blocks and the root; blocks again on the way back. Then one sum for the norm, one for loss and flags."""
    found = collectives("gpt2", "fsdp", micro_steps)
    assert found["_reduce_scatter_base"] == 13
    assert found["_allgather_base"] <= 26 * micro_steps
    assert found["allreduce"] == 2


def test_muon_gathers_once_a_shape() -> None:
    """What it found, of two shapes of matrices; of a sharded model the directions before, of four of parameters."""
    assert collectives("gpt2_modern", "fsdp", 1)["allgather"] == 2 + 4
