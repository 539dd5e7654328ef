"""Files of a repository on the hub: listed at a pinned revision, fetched one ahead, checked, deleted when read.

A copy of the repository in a folder serves as well; checksums may stand in a file SHA256SUMS at its top.
"""

import fnmatch
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanogpt_cli.data.catalogue import Entry
from nanogpt_cli.data.download import CONNECT_SECONDS, sha256_of
from nanogpt_cli.data.text.inputs import Inputs
from nanogpt_cli.errors import NanogptError, UserError, package
from nanogpt_cli.progress import QUIET, Progress

PATIENCE = 10.0  # seconds between two words about a download that the work waits for
INSTEAD = "With a copy of the repository in a folder: --source FOLDER. Nothing was changed."


@dataclass(frozen=True)
class RepositoryFile:
    """A file as the hub lists it."""

    path: str
    bytes: int
    sha256: str | None = None


class LocalRepository:
    """A copy of a repository on this machine."""

    remote = False  # whether what `fetch` gives is a copy, to be deleted after use

    def __init__(self, source: str) -> None:
        folder = Path(source.removeprefix("file:")).expanduser()
        if not folder.is_dir():
            raise UserError(f"--source {source}: no such folder. It should hold a copy of the hub's repository.")
        self.name, self.folder = str(folder), folder
        sums = folder / "SHA256SUMS"
        lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
        self.sums = {path.lstrip("*"): digest for digest, path in (line.split(maxsplit=1) for line in lines if line)}

    def files(self, pattern: str) -> list[RepositoryFile]:
        """The files whose paths match, sorted."""
        found = {path.relative_to(self.folder).as_posix(): path for path in self.folder.glob(pattern)}
        return [RepositoryFile(name, found[name].stat().st_size, self.sums.get(name)) for name in sorted(found)]

    def fetch(self, file: RepositoryFile, folder: Path) -> Path:
        """The file itself, where it lies; nothing comes to `folder`."""
        return self.folder / file.path


class HubRepository:
    """A data set repository on the Hugging Face hub, or on what HF_ENDPOINT names."""

    remote = True

    def __init__(self, repository: str, revision: str) -> None:
        for needed in ("pyarrow", "huggingface_hub"):
            package(needed, f"The data set {repository}")
        from huggingface_hub import constants, errors, hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # drawn by another thread they would tear ours
        self.endpoint, self.offline, self.download = constants.ENDPOINT, constants.HF_HUB_OFFLINE, hf_hub_download
        # the base of the HTTP library's errors, whichever library it is
        self.network_errors = (OSError, errors.HfHubHTTPError.__mro__[1])
        self.name, self.repository, self.revision = f"{repository} at {revision[:8]}", repository, revision

    def files(self, pattern: str) -> list[RepositoryFile]:
        """The files whose paths match, sorted; NanogptError if the hub does not answer.

        Asked directly: the library tries an unreachable hub for half a minute.
        """
        folder = pattern.rpartition("/")[0]
        url = f"{self.endpoint}/api/datasets/{self.repository}/tree/{self.revision}/{folder}"
        if self.offline:
            raise NanogptError(f"{self.name} cannot be listed: HF_HUB_OFFLINE is set. {INSTEAD}")
        try:
            with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
                listing: list[dict[str, Any]] = json.load(answer)
        except (OSError, ValueError) as error:
            raise NanogptError(f"{self.name} cannot be listed: {error} ({url}). {INSTEAD}") from error
        found = [entry for entry in listing if fnmatch.fnmatchcase(entry["path"], pattern)]
        files = [RepositoryFile(entry["path"], entry["size"], (entry.get("lfs") or {}).get("oid")) for entry in found]
        return sorted(files, key=lambda file: file.path)

    def fetch(self, file: RepositoryFile, folder: Path) -> Path:
        """The file, below `folder`, on from where a download was cut short; NanogptError if it cannot be had."""
        try:
            path = self.download(
                self.repository, file.path, repo_type="dataset", revision=self.revision, local_dir=folder
            )
        except self.network_errors as error:
            raise NanogptError(
                f"{file.path} of {self.name} could not be fetched: {error}. What is complete is kept: run it again."
            ) from error
        return Path(path)


Repository = LocalRepository | HubRepository


class RepositoryInputs(Inputs):
    """Files of a hub, in order. While one is read, the next one is fetched: at most two lie on the disk.

    Args:
        hub: where they are.
        entry: what is wanted; its `val` may name files of its own, which come last.
        shards: take only so many of the others.
        folder: for the files while they are needed.
        progress: hears what is waited for.
    """

    def __init__(self, hub: Repository, entry: Entry, shards: int, folder: Path, progress: Progress = QUIET) -> None:
        self.hub, self.entry, self.shards, self.folder, self.progress = hub, entry, shards, folder, progress
        self.remote = hub.remote
        self._coming: dict[int, Future[Path]] = {}

    @cached_property
    def files(self) -> list[RepositoryFile]:
        """What the hub lists. NanogptError if that is too little."""
        found = self.hub.files(self.entry.pattern)
        if len(found) < self.shards:
            raise NanogptError(
                f"{self.hub.name} has {len(found)} files {self.entry.pattern}, {self.shards} were expected. "
                f"To take fewer: --shards {len(found) or 1}."
            )
        own = self.entry.val.get("pattern")
        val = self.hub.files(own) if own else []
        if own and not val:
            raise NanogptError(f"{self.hub.name} has no file {own}, which should hold the validation split.")
        return found[: self.shards] + val

    @cached_property
    def labels(self) -> list[str]:  # type: ignore[override]  # read when first asked for
        return [file.path for file in self.files]

    @cached_property
    def sizes(self) -> list[int]:  # type: ignore[override]
        return [file.bytes for file in self.files]

    def identity(self) -> Any:
        """The revision stands for the files; a copy is known by its listing. Asking takes no network."""
        listing = [] if self.hub.remote else [[file.path, file.bytes, file.sha256] for file in self.files]
        return [self.entry.hub, self.entry.revision, self.shards, listing]

    @contextmanager
    def open(self, index: int) -> Iterator[Path]:
        """The path of file `index`, checked. Deleted afterwards if it is a copy and was read to its end."""
        self._start(index)
        path = self._wait(index)
        if index + 1 < len(self.files):
            self._start(index + 1)
        yield path
        if self.hub.remote:
            path.unlink()

    def _start(self, index: int) -> None:
        if index in self._coming:
            return
        future: Future[Path] = Future()
        self._coming[index] = future

        def work() -> None:
            try:
                future.set_result(self._fetch(self.files[index]))
            except Exception as error:  # raised where the file is opened
                future.set_exception(error)

        # not a pool: its threads are waited for at exit, and Ctrl-C should not wait for gigabytes
        threading.Thread(target=work, daemon=True).start()

    def _wait(self, index: int) -> Path:
        file, future = self.files[index], self._coming.pop(index)
        while True:
            try:
                return future.result(timeout=PATIENCE)
            except TimeoutError:
                done = sum(part.stat().st_size for part in self.folder.rglob("*.incomplete"))
                self.progress.say(f"fetching {file.path}: {done / 1e6:,.0f} of {file.bytes / 1e6:,.0f} MB")

    def _fetch(self, file: RepositoryFile) -> Path:
        path = self.hub.fetch(file, self.folder)
        size = path.stat().st_size if path.is_file() else 0
        found = None if file.sha256 is None or size != file.bytes else sha256_of(path)
        if size == file.bytes and found in (None, file.sha256):
            return path
        fault = f"has {size:,} bytes, {file.bytes:,}" if found is None else f"has the sha256 {found}, {file.sha256}"
        if self.hub.remote:
            path.unlink(missing_ok=True)
        raise NanogptError(f"{file.path} of {self.hub.name} {fault} were expected. Run it again to fetch it anew.")
