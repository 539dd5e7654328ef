"""Some operations of every command go wrong; python -m tests.faults.enumeration does it to all of them."""

from pathlib import Path

import pytest

from tests.faults.enumeration import CODES, SCENES, SMALL, enumerate_faults, table


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_nothing_gets_through(tmp_path: Path, scene: str) -> None:
    outcomes = list(enumerate_faults(tmp_path / "lab", chosen=(scene,), every=55, **SMALL))
    assert {outcome.fault for outcome in outcomes} == CODES.keys()
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert scene in table(outcomes)
