"""The files that a data set is made from: the user's own, found by path, folder or pattern."""

import hashlib
import io
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from nanogpt_cli.data import catalogue
from nanogpt_cli.data.download import PinnedFile, cached, sha256_of
from nanogpt_cli.data.text.documents import file_kind
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.files import open_own, temporary_beside
from nanogpt_cli.progress import QUIET, Progress

IN_FOLDERS = ("txt", "jsonl", "parquet")  # what a folder is searched for; other kinds are data as often as text


class Inputs(ABC):
    """Files in a fixed order, each there while it is open."""

    labels: list[str]  # a name for each, for messages
    sizes: list[int]  # bytes of each
    remote = False  # whether a failure may leave a download that is worth keeping

    @abstractmethod
    def open(self, index: int) -> AbstractContextManager[Path]:
        """The path of file `index`."""

    @abstractmethod
    def identity(self) -> Any:
        """Plain types that change whenever the content does, and perhaps when it does not; cheap."""

    def content(self) -> str | None:
        """A hash of the content alone; None where `identity` does not change without it."""
        return None


class LocalFiles(Inputs):
    """Files that lie on this machine and stay there."""

    def __init__(self, paths: list[Path], labels: list[str] | None = None, progress: Progress = QUIET) -> None:
        self.paths, self.progress = paths, progress
        self.labels = labels or [str(path) for path in paths]
        self.sizes = [path.stat().st_size for path in paths]

    @contextmanager
    def open(self, index: int) -> Iterator[Path]:
        yield self.paths[index]

    def identity(self) -> Any:
        return [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.paths]

    def content(self) -> str:
        """A hash of the files' own hashes; names and times do not count."""
        digest, done = hashlib.sha256(), 0
        for path, size in zip(self.paths, self.sizes, strict=True):
            self.progress.at("hashing the text", done, sum(self.sizes))
            digest.update(bytes.fromhex(sha256_of(path)))
            done += size
        return digest.hexdigest()


class PinnedInput(Inputs):
    """One file of the catalogue, fetched into the user's cache when it is opened."""

    def __init__(self, file: PinnedFile, progress: Progress) -> None:
        self.file, self.progress = file, progress
        self.labels, self.sizes = [file.name], [file.bytes]

    @contextmanager
    def open(self, index: int) -> Iterator[Path]:
        yield cached(self.file, self.progress)

    def identity(self) -> str:
        return self.file.sha256


class Spooled(LocalFiles):
    """Files that are temporary: their content is all that is known of them."""

    def identity(self) -> str:
        return self.content()


@contextmanager
def spooled(stream: BinaryIO, folder: Path) -> Iterator[LocalFiles]:
    """What comes from `stream`, kept in a file beside `folder` while it is needed: text is read twice."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(folder) as path:
        with io.BufferedWriter(open_own(path)) as file:
            shutil.copyfileobj(stream, file, 1 << 20)
        yield Spooled([path], ["stdin"])


def find_files(words: list[str], progress: Progress = QUIET) -> list[Path]:
    """The files that paths, folders and patterns name: in the order given, sorted within each, none twice.

    A folder gives every txt, jsonl and parquet file below it, compressed ones too, but nothing hidden; `progress` hears
    what is left out.

    Raises:
        UserError: a word that matches nothing.
    """
    found: dict[Path, Path] = {}
    for word in words:
        path = Path(word)
        if word.startswith("~") and not path.exists():
            with suppress(RuntimeError):  # no such user: then it is a name like any other
                path = path.expanduser()
        if path.is_dir():
            below = [file for file in path.rglob("*") if file.is_file()]
            below = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
            matches = [file for file in below if file_kind(file) in IN_FOLDERS]
            others = Counter(file.suffix or file.name for file in below if file_kind(file) not in IN_FOLDERS)
            named = ", ".join(f"{count:,} {ending}" for ending, count in others.most_common(5))
            pattern = f"A pattern takes other files: '{path}/**/*{next(iter(others), '.md')}'"
            nothing = f"no file in this folder is {', '.join(IN_FOLDERS)}, plain or compressed. {pattern}."
            if others and matches:
                progress.say(f"{path}: left out: {named}. {pattern}")
        elif path.exists():
            matches, nothing = [path], ""
        else:
            base = Path(path.anchor)
            matches = [file for file in base.glob(str(path.relative_to(base))) if file.is_file()]
            nothing = f"no such file or folder.{did_you_mean(word, catalogue.names())}"
        if not matches:
            raise UserError(f"{word}: {nothing}")
        for match in sorted(matches, key=lambda file: file.parts):
            found.setdefault(match.resolve(), match)
    return list(found.values())
