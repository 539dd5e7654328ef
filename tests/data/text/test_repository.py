"""Large data sets from small copies of a hub: splits, shards, damage, and a network that dies half-way."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanogpt_cli.data.catalogue import Entry
from nanogpt_cli.data.text import encode, writer
from nanogpt_cli.data.text.documents import Documents, ReadOptions
from nanogpt_cli.data.text.prepare import prepare_named
from nanogpt_cli.data.text.repository import LocalRepository, RepositoryFile, RepositoryInputs
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.data.tokens.files import META, WORK
from nanogpt_cli.errors import NanogptError, UserError
from tests.data.conftest import entry_of, tokenizer_of
from tests.heard import Heard

ROWS = 30  # of every file
FILES = 4
ENTRY = Entry(
    name="tiny",
    about="a test",
    tokenizer="bytes",
    hub="someone/tiny",
    revision="0123456789abcdef",
    pattern="data/train-*.parquet",
    shards=FILES,
    val={"rule": "rows", "seed": 2357, "fraction": 0.1, "rows": ROWS * FILES},
    shard_val=0.2,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encode, "CHUNK", 500)
    monkeypatch.setattr(writer, "SAVE_SECONDS", -1.0)


def document(file: int, row: int) -> str:
    return f"document {row} of file {file} " * (1 + row % 3)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder with the layout of the repository."""
    folder = tmp_path / "hub"
    for name, file in [*((f"train-{n:05}-of-00004", n) for n in range(FILES)), ("validation-00000", 99)]:
        path = folder / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [document(file, row) for row in range(ROWS)]
        pq.write_table(pa.table({"text": texts, "id": range(ROWS)}), path, row_group_size=10)
    return folder


def shard(hub: Path, number: int) -> Path:
    return hub / "data" / f"train-{number:05}-of-00004.parquet"


def texts(folder: Path, split: str) -> list[str]:
    ids = np.fromfile(folder / f"{split}.bin", "<u2")
    return tokenizer_of(open_data_set(folder, verify=True)).decode(ids).split("<|endoftext|>")[:-1]


# --- which documents go where


def test_karpathys_split_over_all_files(hub: Path) -> None:
    done = prepare_named(ENTRY, source=str(hub))
    everything = [document(file, row) for file in range(FILES) for row in range(ROWS)]
    chosen = set(np.random.default_rng(2357).permutation(ROWS * FILES)[:12].tolist())
    assert texts(done.folder, "val") == [text for row, text in enumerate(everything) if row in chosen]
    assert texts(done.folder, "train") == [text for row, text in enumerate(everything) if row not in chosen]
    source = {"name": "tiny", "hub": "someone/tiny", "revision": "0123456789abcdef", "of": FILES, "files": FILES}
    paths = [f"data/train-{n:05}-of-00004.parquet" for n in range(FILES)]
    assert done.meta["source"].items() >= {**source, "paths": paths}.items()


def test_val_is_the_same_for_any_number_of_shards(hub: Path) -> None:
    some = [prepare_named(ENTRY, name=f"a{n}", source=f"file:{hub}", shards=n) for n in (1, 2, 3)]
    val = [texts(done.folder, "val") for done in some]
    assert val[0] == val[1] == val[2]
    assert set(val[0]) < {document(0, row) for row in range(ROWS)}
    assert len(texts(some[1].folder, "train")) == 2 * ROWS - len(val[0])
    assert "of the first file" in some[0].meta["split_rule"]
    assert some[1].meta["source"]["files"] == 2


def test_val_from_its_own_file(hub: Path) -> None:
    entry = Entry(**{**vars(ENTRY), "val": {"rule": "files", "pattern": "data/validation-*.parquet"}, "shard_val": 0.0})
    for count in (1, None):
        done = prepare_named(entry, name=f"a{count}", source=str(hub), shards=count)
        assert texts(done.folder, "val") == [document(99, row) for row in range(ROWS)]
        assert len(texts(done.folder, "train")) == ROWS * (count or FILES)


def test_val_is_the_head_of_the_stream(hub: Path) -> None:
    entry = Entry(**{**vars(ENTRY), "val": {"rule": "head", "tokens": 777}, "shard_val": 0.0})
    two, four = (prepare_named(entry, name=f"a{n}", source=str(hub), shards=n).folder for n in (2, 4))
    head = np.fromfile(four / "val.bin", "<u2")
    assert len(head) == 777
    assert (np.fromfile(two / "val.bin", "<u2") == head).all()
    stream = "".join(document(f, r) + "<|endoftext|>" for f in range(FILES) for r in range(ROWS))
    tokenizer = tokenizer_of(open_data_set(four))
    assert tokenizer.decode([*head, *np.fromfile(four / "train.bin", "<u2")]) == stream


def test_counts_are_compared_only_for_the_whole(hub: Path) -> None:
    entry = Entry(**{**vars(ENTRY), "expect": {"train": 1, "val": 2}})
    assert len(prepare_named(entry, name="all", source=str(hub)).meta["warnings"]) == 2
    assert prepare_named(entry, name="part", source=str(hub), shards=2).meta["warnings"] == []


# --- what is not as it should be


def test_mistakes(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--source nowhere: no such folder"):
        prepare_named(ENTRY, source="nowhere")
    with pytest.raises(UserError, match="too large to be read twice"):
        prepare_named(ENTRY, source=str(hub), tokenizer="char")
    with pytest.raises(UserError, match="--shards and --source are for larger data sets"):
        prepare_named(entry_of("shakespeare"), shards=1)
    shard(hub, 3).unlink()
    with pytest.raises(NanogptError, match=r"has 3 files .*, 4 were expected.*--shards 3"):
        prepare_named(ENTRY, source=str(hub))
    assert not (tmp_path / "data").exists()
    assert len(texts(prepare_named(ENTRY, source=str(hub), shards=3).folder, "train")) > 2 * ROWS


def test_a_broken_shard_is_named_and_the_work_goes_on_once_it_is_whole(hub: Path, tmp_path: Path) -> None:
    whole = prepare_named(ENTRY, name="whole", source=str(hub))
    content = shard(hub, 2).read_bytes()
    shard(hub, 2).write_bytes(content[:-100] + bytes(100))
    with pytest.raises(UserError, match=r"data/train-00002-of-00004\.parquet is damaged"):
        prepare_named(ENTRY, source=str(hub))
    assert not (tmp_path / "data" / "tiny" / META).exists()
    shard(hub, 2).write_bytes(content)
    assert prepare_named(ENTRY, source=str(hub)).meta["splits"] == whole.meta["splits"]


def test_a_shard_without_the_text_column(hub: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), shard(hub, 1))
    with pytest.raises(UserError, match=r"train-00001-of-00004\.parquet: no text in 'text'; its columns are body"):
        prepare_named(ENTRY, source=str(hub))


def test_hashes_in_a_copy_are_checked(hub: Path) -> None:
    def write_sums() -> None:
        lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  data/{p.name}" for p in (hub / "data").iterdir()]
        (hub / "SHA256SUMS").write_text("\n".join(lines) + "\n")

    write_sums()
    prepare_named(ENTRY, name="good", source=str(hub))
    data = bytearray(shard(hub, 1).read_bytes())
    data[50] ^= 1
    shard(hub, 1).write_bytes(data)
    with pytest.raises(NanogptError, match=r"train-00001-of-00004\.parquet of .*hub has the sha256 [0-9a-f]{64}"):
        prepare_named(ENTRY, source=str(hub))


def test_a_shard_that_shrank_between_listing_and_reading(hub: Path, tmp_path: Path) -> None:
    class Shrinking(LocalRepository):
        def fetch(self, file: RepositoryFile, folder: Path) -> Path:
            path = super().fetch(file, folder)
            if "00001" in file.path:
                path.write_bytes(path.read_bytes()[:-1])
            return path

    inputs = RepositoryInputs(Shrinking(str(hub)), ENTRY, FILES, tmp_path / "downloads")
    with inputs.open(0) as path:
        assert path == shard(hub, 0)
    with pytest.raises(NanogptError, match=r"train-00001.* has [\d,]+ bytes, [\d,]+ were expected"), inputs.open(1):
        pass


def test_a_shard_that_shrank_between_two_runs_starts_afresh(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_named(ENTRY, name="whole", source=str(hub))
    content = shard(hub, 3).read_bytes()
    shard(hub, 3).write_bytes(content[:-1])
    with pytest.raises(UserError, match="00003"):
        prepare_named(ENTRY, source=str(hub))
    pq.write_table(pa.table({"text": ["short"]}), shard(hub, 3))
    pq.write_table(pa.table({"text": ["first"]}), shard(hub, 0))
    done = prepare_named(ENTRY, source=str(hub), shards=4)
    assert texts(done.folder, "train")[0] in ("first", document(1, 0))
    assert "document 0 of file 0 " not in [*texts(done.folder, "train"), *texts(done.folder, "val")]


# --- a hub that is far away


class FarRepository(LocalRepository):
    """Files have to be fetched, and the network ends after some of them."""

    remote = True

    def __init__(self, folder: Path, *, dies_after: int = 10**9) -> None:
        super().__init__(str(folder))
        self.left = dies_after
        self.fetched: list[str] = []
        self.most = 0

    def fetch(self, file: RepositoryFile, folder: Path) -> Path:
        if self.left == 0:
            raise NanogptError(f"{file.path}: connection reset")
        self.left -= 1
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / file.path, target)
        self.fetched.append(file.path[-21:-17])
        self.most = max(self.most, len(list(target.parent.iterdir())))
        return target


@pytest.fixture
def far(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make `prepare_named` talk to a FarRepository."""
    made = []

    def use(**options: Any) -> Any:
        made.append(FarRepository(hub, **options))
        monkeypatch.setattr("nanogpt_cli.data.text.prepare.HubRepository", lambda *_: made[-1])
        return made[-1]

    return use


def test_two_files_at_most_lie_on_the_disk(hub: Path, far: Callable[..., Any]) -> None:
    whole = prepare_named(ENTRY, name="whole", source=str(hub))
    one = far()
    done = prepare_named(ENTRY)
    assert done.meta["splits"] == whole.meta["splits"]
    assert one.most == 2
    assert one.fetched == ["0000", "0001", "0002", "0003"]
    assert sorted(path.name for path in done.folder.iterdir()) == [META, "train.bin", "val.bin"]


@pytest.mark.parametrize("dies_after", range(FILES))
def test_a_network_that_dies(hub: Path, far: Callable[..., Any], dies_after: int) -> None:
    whole = prepare_named(ENTRY, name="whole", source=str(hub))
    far(dies_after=dies_after)
    with pytest.raises(NanogptError, match="connection reset"):
        prepare_named(ENTRY)
    folder = Path("data/tiny")
    with pytest.raises(UserError, match="incomplete"):
        open_data_set(folder)
    again = far()
    assert prepare_named(ENTRY).meta["splits"] == whole.meta["splits"]
    assert again.fetched == [f"{n:04}" for n in range(max(0, dies_after - 1), FILES)][-len(again.fetched) :]
    assert len(again.fetched) <= FILES - max(0, dies_after - 1)


def test_a_slow_download_is_told(hub: Path, far: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one: FarRepository = far()
    fetch = one.fetch

    def slowly(file: RepositoryFile, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.incomplete").write_bytes(bytes(3_000_000))
        time.sleep(0.3)
        return fetch(file, folder)

    monkeypatch.setattr(one, "fetch", slowly)
    monkeypatch.setattr("nanogpt_cli.data.text.repository.PATIENCE", 0.1)
    heard = Heard()
    prepare_named(ENTRY, shards=1, progress=heard)
    assert heard.said[0].startswith("fetching data/train-00000-of-00004.parquet: 3 of 0 MB")


def test_a_complete_data_set_needs_no_network(far: Callable[..., Any]) -> None:
    far()
    prepare_named(ENTRY)
    one = far(dies_after=0)
    one.files = lambda pattern: pytest.fail("asked")
    assert prepare_named(ENTRY).already


# --- the hub's own protocol, spoken by a server of the test


class Server(http.server.ThreadingHTTPServer):
    """Listing and files of `folder`; after `breaks` answers with content the connection is cut in the middle."""

    def __init__(self, folder: Path, repository: str, revision: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.repository, self.revision = folder, repository, revision
        self.break_at: int | None = None
        self.ranges: list[int] = []
        self.wrong_hash = False


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        listing = f"/api/datasets/{server.repository}/tree/{server.revision}/"
        if path.startswith(listing):
            return self.answer(json.dumps([self.entry(p) for p in sorted(server.folder.glob("plain_text/*"))]).encode())
        file = server.folder / path.removeprefix(f"/datasets/{server.repository}/resolve/{server.revision}/")
        if not file.is_file():
            return self.send_error(404)
        return self.file(file.read_bytes())

    def entry(self, path: Path) -> dict[str, Any]:
        digest = "0" * 64 if self.server.wrong_hash else hashlib.sha256(path.read_bytes()).hexdigest()
        name = path.relative_to(self.server.folder).as_posix()
        return {"type": "file", "path": name, "size": path.stat().st_size, "lfs": {"oid": digest}}

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def file(self, data: bytes) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.revision)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.ranges.append(start)
        end = self.server.break_at if self.server.break_at and not start else len(data)
        self.wfile.write(data[start:end])
        self.wfile.flush()
        if end != len(data):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """OpenWebText as its repository is laid out, in three small files out of eighty."""
    entry = entry_of("openwebtext")
    folder = tmp_path / "site"
    (folder / "plain_text").mkdir(parents=True)
    for number in range(3):
        rng = np.random.default_rng(number)
        texts = [" ".join(map(str, rng.integers(0, 10**6, 200))) for _ in range(200)]
        pq.write_table(pa.table({"text": texts}), folder / "plain_text" / f"train-{number:05}-of-00080.parquet")
    server = Server(folder, entry.hub or "", entry.revision)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def command(server: Server, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    address = f"http://127.0.0.1:{server.server_port}"
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **environment}
    line = [sys.executable, "-m", "nanogpt_cli", "prepare", "openwebtext", "--tokenizer", "bytes", *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False)


def test_from_the_hub_itself(server: Server) -> None:
    done = command(server, "--shards", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["documents"] == 400
    assert result["source"]["files"] == 2
    assert "of the first file" in result["split_rule"]
    expected = [text for text, _ in Documents(server.folder / "plain_text/train-00000-of-00080.parquet", ReadOptions())]
    assert set(texts(Path("data/openwebtext"), "val")) < set(expected)


def test_a_download_that_is_cut_goes_on_where_it_stopped(server: Server) -> None:
    # the library writes 10 MB at a time: what is shorter it fetches again
    text = "".join(map(str, np.random.default_rng(0).integers(0, 10**6, 10_000)))
    path = server.folder / "plain_text/train-00000-of-00080.parquet"
    pq.write_table(
        pa.table({"text": [f"{n} {text}" for n in range(220)]}), path, compression="none", use_dictionary=False
    )
    server.break_at = 11_000_000
    done = command(server, "--shards", "1")
    server.break_at = None
    if done.returncode:  # the library gave up: the next run goes on
        done = command(server, "--shards", "1")
    assert done.returncode == 0, done.stderr
    assert any(start > 10_000_000 for start in server.ranges), server.ranges


def test_a_download_with_the_wrong_hash_is_not_kept(server: Server) -> None:
    server.wrong_hash = True
    done = command(server, "--shards", "1")
    assert done.returncode == 1
    assert "has the sha256" in done.stderr
    assert not list(Path("data/openwebtext", WORK).rglob("*.parquet"))


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_the_hub_it_fails_at_once_and_leaves_nothing(server: Server, environment: dict[str, str]) -> None:
    done = command(server, **environment)
    assert done.returncode == 1
    assert "cannot be listed" in done.stderr
    assert "--source FOLDER" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("data").exists()


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("huggingface_hub", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(NanogptError, match=f"pip install {module}"):
            prepare_named(entry_of("tinystories"))
    assert not Path("data").exists()
