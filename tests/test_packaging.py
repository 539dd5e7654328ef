"""What is installed is what is meant: presets in the wheel, the command, and nothing of the tests."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import nanogpt_cli
from nanogpt_cli.config.presets import preset_names, presets_folder

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in a wheel built from this tree."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


def test_presets_are_in_the_wheel(wheel: list[str]) -> None:
    stems = {Path(name).stem for name in wheel if name.startswith("nanogpt_cli/presets/")}
    assert stems == {path.stem for path in (REPOSITORY / "presets").glob("*.toml")} == set(preset_names())


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel: list[str]) -> None:
    package = REPOSITORY / "nanogpt_cli"
    files = {p.relative_to(REPOSITORY).as_posix() for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    others = {name for name in wheel if not name.startswith(("nanogpt_cli/presets/", "nanogpt_cli-"))}
    assert others == files


def test_presets_are_found_where_they_are_installed() -> None:
    package = Path(nanogpt_cli.__file__).parent
    assert presets_folder() in (package / "presets", package.parent / "presets")
    assert (presets_folder() / "shakespeare_char.toml").is_file()


def test_the_distribution_gives_the_command() -> None:
    distribution = metadata.distribution("nanogpt-cli")
    (command,) = [entry for entry in distribution.entry_points if entry.group == "console_scripts"]
    assert (command.name, command.value) == ("nanogpt", "nanogpt_cli.cli.main:main")
    assert distribution.version == nanogpt_cli.__version__
