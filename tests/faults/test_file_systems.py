"""File systems that can do less: shared folders of virtual machines, network mounts, memory cards."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import nanogpt
from tests.faults.lives import KILLED, Lab
from tests.faults.taps import At, Kill


@dataclass(frozen=True)
class Without:
    """A file system on which some of sync, mode, link, symlink, lock, and the question for free space fail."""

    missing: tuple[str, ...]
    number: int

    def install(self, folder: Path) -> None:
        import fcntl

        def refuse(*arguments: Any, **more: Any) -> Any:
            raise OSError(self.number, os.strerror(self.number))

        def files_alone(file: Any, real: Callable[[Any], None] = os.fsync) -> None:
            if stat.S_ISDIR(os.fstat(file).st_mode):
                refuse()
            real(file)

        if "sync" in self.missing:
            os.fsync = files_alone
        if "mode" in self.missing:
            os.chmod = os.fchmod = refuse
        if "link" in self.missing:
            os.link = os.symlink = refuse
        if "lock" in self.missing:
            fcntl.flock = refuse
        if "space" in self.missing:
            shutil.disk_usage = os.statvfs = refuse


ALL = ("sync", "mode", "link", "lock", "space")
SYNCS, LOCKS = "this file system syncs no folders", "has no locks"


@pytest.mark.parametrize(
    ("missing", "number"),
    [(ALL, errno.EINVAL), (ALL, errno.ENOTSUP), (("mode", "link"), errno.EPERM), (("lock",), errno.ENOLCK)],
)
def test_all_work_is_done_and_said_once_what_cannot_be_promised(
    lab: Lab, missing: tuple[str, ...], number: int
) -> None:
    poor = Without(missing, number)
    for folder in ("data/cut", "out"):
        shutil.rmtree(lab.folder / folder, ignore_errors=True)
    prepared = nanogpt(lab.folder, "prepare my.txt --name cut --tokenizer char", poor)
    assert prepared.code == 0, prepared
    assert lab.is_whole(lab.folder / "data" / "cut")
    assert prepared.err.count(SYNCS) == ("sync" in missing), prepared
    assert prepared.err.count("no lock in the user's cache") == ("lock" in missing), prepared
    killed = nanogpt(lab.folder, lab.line("cut"), poor, Kill(At("rename", "ckpt.pt", 2, "after")))
    assert killed.code == KILLED
    resumed = nanogpt(lab.folder, "resume runs/cut", poor)
    assert resumed.code == 0, resumed
    lab.check_end("cut")
    for err in (killed.err, resumed.err):
        told = [line for line in err.splitlines() if "this file system" in line]
        assert len(told) == bool({"sync", "lock"} & {*missing}), err
        assert [words in " ".join(told) for words in (SYNCS, LOCKS)] == ["sync" in missing, "lock" in missing]
    exported = nanogpt(lab.folder, "export runs/cut out", poor)
    assert exported.code == 0, exported
    assert nanogpt(lab.folder, "sample out --max-new-tokens 3").code == 0
