"""Some operations of every command go wrong; python -m tests.faults.enumeration does it to all of them."""

import pytest

from tests.faults.enumeration import (
    CODES,
    FILMED,
    SCENES,
    SMALL,
    Prepare,
    Scene,
    enumerate_faults,
    filmed,
    table,
)
from tests.faults.lives import Lab, clear
from tests.faults.pairs import PAIRS, Stage
from tests.faults.power import Disk

EVERY = {"Train": 55, "Resume": 55, "TwoRanks": 70}  # the others have fewer operations


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults") / "lab", **SMALL)


@pytest.mark.parametrize("kind", SCENES)
def test_nothing_gets_through(small: Lab, kind: type[Scene]) -> None:
    outcomes = list(enumerate_faults(small, chosen=(kind.__name__,), every=EVERY.get(kind.__name__, 15)))
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert {outcome.fault for outcome in outcomes} == CODES.keys() | ({"power cut"} if kind in FILMED else set())
    assert kind.__name__ in table(outcomes)


@pytest.mark.parametrize("forgotten", ["data/cut/.prepare/train.bin", "data/cut"])
def test_the_model_of_power_cuts_sees_what_is_not_synced(small: Lab, forgotten: str) -> None:
    scene, folder = Prepare(small), small.folder
    steps = [step for step in filmed(scene) if step.event[:2] != ("fsync", forgotten)]
    last, disk, whole = len(steps) - 1, Disk(steps, folder), set()
    for now, state in disk.states(lambda now: now == last):
        if now == last:
            clear(folder, scene.made)
            disk.build(state, folder, scene.made)
            whole.add(small.is_whole(folder / "data" / "cut"))
    assert False in whole


@pytest.mark.parametrize("name", PAIRS)
def test_two_commands_at_once(small: Lab, name: str) -> None:
    stage = Stage(small, PAIRS[name])
    stage.play(stage.operations // 3)
