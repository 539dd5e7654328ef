"""One working folder for all faults: its data set and its unbroken run are what everything is compared with."""

import shutil
import sys

import pytest

from tests.faults.lives import Lab

# forks, signals and open files that lose their names are none of Windows' ways
collect_ignore_glob = ["test_*.py"] if sys.platform == "win32" else []


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def lab(shared_lab: Lab) -> Lab:
    """The working folder, without a run called cut."""
    shutil.rmtree(shared_lab.folder / "runs" / "cut", ignore_errors=True)
    return shared_lab
