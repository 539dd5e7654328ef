"""One working folder for all faults: its data set and its unbroken run are what everything is compared with."""

import shutil
import sys

import pytest

if sys.platform == "win32":
    pytest.skip("forks, signals and file locks of another kind", allow_module_level=True)

from tests.faults.lives import Lab


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def lab(shared_lab: Lab) -> Lab:
    """The working folder, without a run called cut."""
    shutil.rmtree(shared_lab.folder / "runs" / "cut", ignore_errors=True)
    return shared_lab
