"""Some operations of every command go wrong; python -m tests.faults.enumeration does it to all of them."""

from pathlib import Path

import pytest

from tests.faults.enumeration import CODES, SCENES, SMALL, enumerate_faults, table

EVERY = {"Train": 55, "Resume": 55, "TwoRanks": 70}  # the others have fewer operations


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_nothing_gets_through(tmp_path: Path, scene: str) -> None:
    every = EVERY.get(scene, 15)
    outcomes = list(enumerate_faults(tmp_path / "lab", chosen=(scene,), every=every, **SMALL))
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert {outcome.fault for outcome in outcomes} == CODES.keys()
    assert scene in table(outcomes)
