"""Free memory, as a container and as its machine see it."""

from pathlib import Path

import pytest

from nanogpt_cli.machine.memory import free_in_cgroup


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """1,000 bytes of 4,096 allowed are in use, 600 of them files' pages that nobody has touched for a while."""
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 700\ninactive_file 600\nactive_file 100\n")
    return tmp_path


def test_page_cache_counts_as_free(cgroup: Path) -> None:
    assert free_in_cgroup(cgroup) == 4096 - 1000 + 600


def test_no_limit_says_nothing(cgroup: Path, tmp_path: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    assert free_in_cgroup(cgroup) is None
    assert free_in_cgroup(tmp_path / "none") is None
