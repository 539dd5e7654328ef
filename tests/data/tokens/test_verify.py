"""Checking the content of token files: damage is found, and large files are read through once, not at every start."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nanogpt_cli.data.tokens import verify
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.data.tokens.files import Tokens
from nanogpt_cli.errors import UserError
from nanogpt_cli.progress import Progress
from tests.heard import Heard


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a split has been read through."""
    done, read_through = list[str](), verify.read_through

    def counted(tokens: Tokens, progress: Progress) -> tuple[str, int | None]:
        done.append(tokens.paths[0].name)
        return read_through(tokens, progress)

    monkeypatch.setattr(verify, "read_through", counted)
    return done


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SMALL", 1)


@pytest.fixture
def folder(data_set: Callable[..., Path]) -> Path:
    return data_set(np.random.default_rng(0).integers(0, 60, 500_000))


def flip(path: Path, place: int, *, keep_time: bool = False) -> None:
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 1, 5_000, 999_998])
def test_a_flipped_bit_is_found(folder: Path, place: int) -> None:
    open_data_set(folder)
    flip(folder / "train.bin", place, keep_time=True)
    with pytest.raises(UserError, match=r"train\.bin is damaged.*SHA-256.*nanogpt prepare PATH --name mine"):
        open_data_set(folder)


def test_swapped_splits_of_one_size_are_found(data_set: Callable[..., Path]) -> None:
    folder = data_set(np.arange(100) % 60, np.arange(100) % 50)
    (folder / "train.bin").replace(folder / "other")
    (folder / "val.bin").replace(folder / "train.bin")
    (folder / "other").replace(folder / "val.bin")
    with pytest.raises(UserError, match="damaged"):
        open_data_set(folder)


def test_small_files_are_read_through_at_every_start(folder: Path, scans: list[str]) -> None:
    open_data_set(folder)
    open_data_set(folder)
    assert scans == ["train.bin", "val.bin"] * 2


@pytest.mark.usefixtures("everything_is_large")
class TestLargeFiles:
    def test_are_read_through_once(self, folder: Path, scans: list[str], tmp_path: Path) -> None:
        first = open_data_set(folder)
        assert scans == ["train.bin", "val.bin"]
        again = open_data_set(folder)
        assert len(scans) == 2
        assert again.train.highest_id == first.train.highest_id == 59
        assert len(list((tmp_path / "cache" / "verified").iterdir())) == 2
        open_data_set(folder, verify=True)
        assert len(scans) == 4

    def test_foreign_ones_too(self, folder: Path, scans: list[str]) -> None:
        (folder / "meta.toml").unlink()
        assert open_data_set(folder).train.highest_id == 59
        assert open_data_set(folder).train.highest_id == 59
        assert scans == ["train.bin", "val.bin"]

    def test_are_read_again_when_they_were_written_again(self, folder: Path, scans: list[str]) -> None:
        open_data_set(folder)
        os.utime(folder / "train.bin")
        open_data_set(folder)
        assert scans == ["train.bin", "val.bin", "train.bin"]

    def test_a_change_behind_the_time_stamp_shows_in_the_sampled_blocks(self, folder: Path) -> None:
        open_data_set(folder)
        flip(folder / "train.bin", 0, keep_time=True)
        with pytest.raises(UserError, match="damaged"):
            open_data_set(folder)

    def test_damage_is_not_remembered_as_sound(self, folder: Path, scans: list[str]) -> None:
        flip(folder / "train.bin", 500_000)
        for _ in range(2):
            with pytest.raises(UserError, match="damaged"):
                open_data_set(folder)
        assert scans == ["train.bin", "train.bin"]

    def test_an_outcome_for_one_dtype_is_none_for_another(self, folder: Path) -> None:
        (folder / "meta.toml").unlink()
        assert open_data_set(folder).train.highest_id == 59
        assert (open_data_set(folder, token_dtype="uint32").train.highest_id or 0) > 65536

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"sha256": 1}', b"\xff"])
    def test_a_damaged_cache_costs_a_scan(self, folder: Path, scans: list[str], tmp_path: Path, damage: bytes) -> None:
        open_data_set(folder)
        for record in (tmp_path / "cache" / "verified").iterdir():
            record.write_bytes(damage)
        open_data_set(folder)
        assert len(scans) == 4
        open_data_set(folder)
        assert len(scans) == 4

    def test_a_cache_that_cannot_be_written_costs_a_scan(
        self, folder: Path, scans: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "file" / "cache"))
        open_data_set(folder)
        open_data_set(folder)
        assert len(scans) == 4

    def test_a_process_that_trusts_another_reads_nothing_through(self, folder: Path, scans: list[str]) -> None:
        assert open_data_set(folder, trusted=True).train.highest_id == 59  # as meta.toml says
        assert scans == []

    def test_a_bad_id_is_found_in_a_remembered_file_too(self, folder: Path) -> None:
        (folder / "meta.toml").unlink()
        ids = np.fromfile(folder / "val.bin", "<u2")
        ids[77] = 60_000
        ids.tofile(folder / "val.bin")
        for _ in range(2):
            with pytest.raises(UserError, match=r"val\.bin holds id 60,000 at token 77"):
                open_data_set(folder)


def test_progress_counts_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK", 400_000)
    heard = Heard()
    open_data_set(folder, progress=heard)
    assert [(done, total) for _, done, total in heard.steps if total == 1_000_000] == [
        (0, 1_000_000),
        (400_000, 1_000_000),
        (800_000, 1_000_000),
        (1_000_000, 1_000_000),
    ]
    assert all("mine" in what for what, _, _ in heard.steps)
