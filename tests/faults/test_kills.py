"""A process killed at the worst instants: the run goes on and ends as if nothing had happened."""

import random
from pathlib import Path

import pytest

from tests.faults.lives import KILLED, Lab, metrics, random_kill
from tests.faults.soak import soak
from tests.faults.taps import At, Kill

CHOSEN = {
    "while the run directory is made": [At("rename", "config.toml")],
    "before the run directory has its name": [At("rename", "runs/cut"), At("rename", "runs/cut", when="after")],
    "before the first checkpoint": [At("create", "ckpt.pt~")],
    "half-way through a checkpoint": [At("write", "ckpt.pt~", 30, "half")],
    "between the new file and the old name": [At("rename", "ckpt-previous.pt", 2, "after")],
    "before a checkpoint has its name": [At("rename", "ckpt.pt", 2)],
    "between the first checkpoint and the best weights": [At("rename", "ckpt.pt", 1, "after")],
    "half-way through the best weights": [At("write", "best.pt~", 3, "half")],
    "between two best weights": [At("rename", "best.pt", 2)],
    "between checkpoint and milestone": [At("rename", "ckpt.pt", 3, "after")],
    "between a metrics line and the checkpoint": [At("write", "metrics.jsonl", 4, "after")],
    "half-way through a metrics line": [At("write", "metrics.jsonl", 5, "half")],
    "while a run is taken over": [
        At("fsync", "ckpt.pt~", 3),
        At("rename", "metrics.jsonl"),
        At("rename", "metrics.jsonl", 1, "after"),
        At("rename", "config.toml"),
    ],
    "after the last checkpoint": [At("rename", "ckpt.pt", -1, "after"), At("rename", "best.pt")],
    "after the last milestone": [At("rename", "ckpt-000012.pt", 1, "after")],
}


def test_the_unbroken_run_has_it_all(lab: Lab) -> None:
    losses = [line["val_loss"] for line in metrics(lab.whole) if "val_loss" in line]
    best = [loss == min(losses[: place + 1]) for place, loss in enumerate(losses)]
    assert best[-1]
    assert not all(best)
    assert len(list(lab.whole.glob("ckpt-0*.pt"))) == 2


@pytest.mark.parametrize("places", CHOSEN.values(), ids=CHOSEN.keys())
def test_chosen_instants(lab: Lab, places: list[At]) -> None:
    results = lab.live("cut", [Kill(lab.place(at)) for at in places])
    assert [result.code for result in results] == [KILLED] * len(places)


@pytest.mark.parametrize("seed", range(2))
def test_a_life_of_random_kills(lab: Lab, seed: int) -> None:
    draw = random.Random(seed)
    kills = [random_kill(draw, events, lab.seconds) for events in (lab.train_events, *[lab.resume_events] * 3)]
    lab.live("cut", kills)


PREPARING = {
    "before anything is written": At("create", "train.bin"),
    "half-way through the tokens": At("write", "train.bin", 1, "half"),
    "before they are noted": At("rename", "state.json"),
    "before the metadata": At("rename", ".prepare/meta.toml"),
    "before train.bin is in place": At("rename", "my/train.bin"),
    "between the two splits": At("rename", "my/train.bin", 1, "after"),
    "before the data set is complete": At("rename", "my/meta.toml"),
    "after it": At("rename", "my/meta.toml", 1, "after"),
    "before the work folder is gone": At("unlink", "state.json"),
}


@pytest.mark.parametrize("at", PREPARING.values(), ids=PREPARING.keys())
def test_prepare_is_whole_or_absent(lab: Lab, at: At) -> None:
    assert lab.prepare_killed("other", Kill(at)) == KILLED


def test_prepare_over_another_data_set(lab: Lab) -> None:
    """Making a data set again never mixes the old and the new one."""
    for at in [*PREPARING.values()][3:8]:
        assert lab.prepare_killed("other", Kill(at), over=True) == KILLED


def test_prepare_again_after_all_was_done(lab: Lab) -> None:
    """The note of unfinished files must not be taken for one about files that have left."""
    assert lab.prepare_killed("other", Kill(At("rename", "my/meta.toml", 1, "after")), again="--force") == KILLED


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak(tmp_path: Path) -> None:
    """More of the same: python -m tests.faults.soak --kills 100 --seed 0 prints what was tried."""
    assert soak(tmp_path, kills=100, seed=0)
