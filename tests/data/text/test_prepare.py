"""From text to a data set: which tokens, which split, and that nothing but a complete one looks complete."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.data import catalogue, tokenizers
from nanogpt_cli.data.text import documents, make, writer
from nanogpt_cli.data.text import encode as workers
from nanogpt_cli.data.text.documents import ReadOptions
from nanogpt_cli.data.text.prepare import default_name, ensure_prepared, prepare_named, prepare_paths
from nanogpt_cli.data.text.splits import SplitRule, split_rule
from nanogpt_cli.data.tokenizers import TiktokenTokenizer
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.progress import Progress
from tests.data.conftest import entry_of, tokenizer_of
from tests.heard import Heard

PLAY = "".join(f"Line {n} of the play, {'so ' * (n % 7)}it is said.\n" for n in range(400))
NOVEL = "道可道，非常道。名可名，非常名。\n無名天地之始；有名萬物之母。\n" * 50


class StoppedError(Exception):
    """Stands for whatever ends a process."""


class StopAfter(Progress):
    """Progress that ends the work after some chunks."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks

    def at(self, what: str, *_: object) -> None:
        self.left -= what == "preparing"
        if self.left < 0:
            raise StoppedError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut so fine that little text has many chunks, every one is saved, and two files are worth processes."""
    monkeypatch.setattr(workers, "CHUNK", 300)
    monkeypatch.setattr(documents, "PIECE", 200)
    monkeypatch.setattr(documents, "WINDOW", 60)
    monkeypatch.setattr(writer, "SAVE_SECONDS", -1.0)


def ids(folder: Path, split: str) -> npt.NDArray[Any]:
    meta = tomllib.loads((folder / "meta.toml").read_text(encoding="utf-8"))
    return np.fromfile(folder / f"{split}.bin", "<u2" if meta["dtype"] == "uint16" else "<u4")


def everything(folder: Path) -> dict[str, bytes]:
    """The files of a data set, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(path: Path, texts: Iterable[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


# --- the originals


@pytest.fixture(scope="module")
def shakespeare(gpt2: TiktokenTokenizer) -> Path:
    """Its text as nanoGPT reads it; fetched where `gpt2` was."""
    from nanogpt_cli.data.download import cached

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NANOGPT_CACHE", raising=False)
        return cached(catalogue.pinned("input.txt"))


@pytest.fixture
def real_cache(shakespeare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOGPT_CACHE", raising=False)


def test_shakespeare_by_characters_is_nanogpts(shakespeare: Path, real_cache: None) -> None:
    done = prepare_named(entry_of("shakespeare-char"))
    text = shakespeare.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    expected = np.array([alphabet.index(c) for c in text[:1000]])
    assert done.meta["warnings"] == []
    assert (len(ids(done.folder, "train")), len(ids(done.folder, "val"))) == (1_003_854, 111_540)
    assert done.meta["vocab_size"] == 65
    assert (ids(done.folder, "train")[:1000] == expected).all()
    data_set = open_data_set(done.folder, verify=True)
    assert tokenizer_of(data_set).decode(ids(done.folder, "val")) == text[1_003_854:]


def test_shakespeare_by_bpe_is_nanogpts(shakespeare: Path, real_cache: None, gpt2: TiktokenTokenizer) -> None:
    done = prepare_named(entry_of("shakespeare"))
    text = shakespeare.read_text(encoding="utf-8")
    assert done.meta["warnings"] == []
    assert (len(ids(done.folder, "train")), len(ids(done.folder, "val"))) == (301_966, 36_059)
    assert ids(done.folder, "val").tolist() == gpt2.encoding.encode_ordinary(text[int(len(text) * 0.9) :])
    assert open_data_set(done.folder, verify=True).vocab_size == 50_304


def test_a_count_that_differs_is_a_warning(real_cache: None) -> None:
    done = prepare_named(replace(entry_of("shakespeare_char"), expect={"train": 5}))
    assert done.meta["warnings"] == ["train has 1,003,854 tokens, 5 were expected"]


# --- own text


def test_short_text_is_read_by_characters(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY, encoding="utf-8")
    heard = Heard()
    done = prepare_paths(["play.txt"], progress=heard)
    assert done.folder == type(done.folder)("data/play")
    assert done.meta["tokenizer"]["kind"] == "char"
    assert "tokenizer: char" in heard.said[0]
    cut = int(len(PLAY) * 0.9)
    data_set = open_data_set(done.folder, verify=True)
    assert tokenizer_of(data_set).decode(ids(done.folder, "train")) == PLAY[:cut]
    assert tokenizer_of(data_set).decode(ids(done.folder, "val")) == PLAY[cut:]
    statistics = {"documents": 1, "empty_documents": 0, "characters": len(PLAY), "text_bytes": len(PLAY)}
    assert done.meta["statistics"] == statistics
    assert ("preparing", 1.0, 1.0) in heard.steps


def test_chinese_by_characters_and_by_bpe(tmp_path: Path, gpt2: TiktokenTokenizer) -> None:
    (tmp_path / "novel.txt").write_text(NOVEL, encoding="utf-8")
    by_characters = prepare_paths(["novel.txt"])
    assert by_characters.meta["vocab_size"] == len(set(NOVEL))
    by_bpe = prepare_paths(["novel.txt"], name="bpe", tokenizer="gpt2")
    for done in (by_characters, by_bpe):
        tokenizer = tokenizer_of(open_data_set(done.folder))
        whole = [*ids(done.folder, "train"), *ids(done.folder, "val")]
        assert tokenizer.decode(whole).removesuffix("<|endoftext|>") == NOVEL
        assert done.meta["statistics"]["text_bytes"] == len(NOVEL.encode())


def test_longer_text_or_more_characters_take_bpe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpt2: TiktokenTokenizer
) -> None:
    (tmp_path / "many.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 10_001))), encoding="utf-8")
    assert prepare_paths(["many.txt"]).meta["tokenizer"]["kind"] == "gpt2"
    (tmp_path / "long.txt").write_text(PLAY, encoding="utf-8")
    monkeypatch.setattr(make, "SMALL_BYTES", len(PLAY) - 1)
    done = prepare_paths(["long.txt"])
    assert done.meta["tokenizer"]["kind"] == "gpt2"
    cut = int(len(PLAY) * 0.9)
    assert ids(done.folder, "train").tolist() == gpt2.encoding.encode_ordinary(PLAY[:cut])
    assert ids(done.folder, "val").tolist() == [*gpt2.encoding.encode_ordinary(PLAY[cut:]), 50256]
    open_data_set(done.folder, verify=True)


def test_val_is_at_most_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "play.txt").write_text(PLAY, encoding="utf-8")
    for number, small in enumerate((10**7, 0)):
        monkeypatch.setattr(make, "SMALL_BYTES", small)
        split = SplitRule("tail", 0.1, 50)
        done = prepare_paths(["play.txt"], name=f"a{number}", tokenizer="bytes", split=split)
        assert done.meta["splits"]["val"]["tokens"] == 50 + 1  # the end of the text comes after its cut
    assert split_rule("position").most == 10_000_000
    assert split_rule("position", 0.3).most is None


def test_small_documents_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all code points for each document would take a millisecond a document."""
    counted: list[str] = []

    def code_points(text: str) -> npt.NDArray[np.uint32]:
        counted.append(text)
        return tokenizers.code_points(text)

    monkeypatch.setattr(workers, "code_points", code_points)
    done = prepare_paths([rows(tmp_path / "many.jsonl", [f"document {n}" for n in range(3000)])], tokenizer="char")
    assert done.meta["statistics"]["documents"] == 3000
    assert len(counted) == 1


def test_every_document_ends(tmp_path: Path, gpt2: TiktokenTokenizer) -> None:
    done = prepare_paths([rows(tmp_path / "two.jsonl", ["one two three", "four"])], tokenizer="gpt2")
    whole = [*ids(done.folder, "train"), *ids(done.folder, "val")]
    assert gpt2.decode(whole) == "one two three<|endoftext|>four<|endoftext|>"
    assert whole.count(50256) == 2
    assert done.meta["eot_rule"] == "id 50256 after every document"


def test_characters_of_several_documents_end_with_a_line_break(tmp_path: Path) -> None:
    done = prepare_paths([rows(tmp_path / "a.jsonl", ["aa", "bb\n", "", "cc"])], tokenizer="char")
    tokenizer = tokenizer_of(open_data_set(done.folder))
    assert tokenizer.decode([*ids(done.folder, "train"), *ids(done.folder, "val")]) == "aa\nbb\ncc\n"
    assert done.meta["statistics"]["empty_documents"] == 1
    assert done.meta["statistics"]["documents"] == 3


def test_files_folders_and_patterns_in_a_fixed_order(tmp_path: Path) -> None:
    for name in (
        "b/2.txt",
        "b/1.txt",
        "b/deep/3.jsonl",
        "b/.hidden/x.txt",
        "b/picture.png",
        "a.txt",
        "z1.txt",
        "z2.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "<b/deep/3>"}' if name.endswith("jsonl") else f"<{name[:-4]}>")
    done = prepare_paths(["z?.txt", "b", "a.txt", str(tmp_path / "b" / "1.txt")], name="all", tokenizer="char")
    tokenizer = tokenizer_of(open_data_set(done.folder))
    whole = tokenizer.decode([*ids(done.folder, "train"), *ids(done.folder, "val")])
    assert whole.split() == ["<z1>", "<z2>", "<b/1>", "<b/2>", "<b/deep/3>", "<a>"]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["nowhere.txt"], {}, r"nowhere\.txt: no such file or folder"),
        (["*.none"], {"name": "x"}, r"\*\.none: no such file or folder"),
        (["empty"], {}, r"no file in this folder is txt, jsonl, parquet.*pattern"),
        (["blank.txt"], {}, "there is no text in it"),
        (["short.txt"], {}, "too little text: 0 tokens for train and 1 for val"),
        (["short.txt", "blank.txt"], {}, "--name NAME"),
        (["short.txt"], {"name": "a/b"}, "--name a/b"),
        (["short.txt"], {"name": ".."}, r"--name \.\."),
        (["shakespeare.txt"], {}, "shakespeare is the name of another data set"),
        (["short.txt", "-"], {"name": "x"}, "- is stdin and stands alone"),
        (["shakespeare", "short.txt"], {"name": "x"}, r"shakespeare is a known data set.* write \./shakespeare"),
        (["short.txt"], {"tokenizer": "gpt3"}, "--tokenizer gpt3: no such tokenizer"),
        (["bad.txt"], {}, "0xff at byte 3 is no utf-8"),
    ],
)
def test_mistakes_change_nothing(tmp_path: Path, words: list[str], options: dict[str, Any], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "shakespeare.txt").write_text("x")
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        prepare_paths(words, **options)
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts] == before


@pytest.mark.parametrize(
    ("word", "name"), [("a/my.txt", "my"), ("my.jsonl.gz", "my"), ("my.v2.txt", "my.v2"), ("my/", "my")]
)
def test_names_come_from_the_path(word: str, name: str) -> None:
    assert default_name([word]) == name


@given(kind=st.sampled_from(["position", "documents"]), fraction=st.one_of(st.floats(), st.just(0.0), st.just(1.0)))
def test_a_fraction_leaves_both_splits_something(kind: str, fraction: float) -> None:
    if 0 < fraction < 1:
        assert split_rule(kind, fraction).fraction == fraction
    else:
        with pytest.raises(UserError, match="--val-fraction"):
            split_rule(kind, fraction)


# --- splits


def split_texts(folder: Path) -> list[set[str]]:
    tokenizer = tokenizer_of(open_data_set(folder))
    return [set(tokenizer.decode(ids(folder, split)).split("\n")) - {""} for split in ("train", "val")]


def test_a_split_by_documents_is_stable(tmp_path: Path) -> None:
    texts = [f"document {n}" for n in range(500)]
    first, second = rows(tmp_path / "1.jsonl", texts[:300]), rows(tmp_path / "2.jsonl", texts[300:])
    split = split_rule("documents", 0.2)
    one = prepare_paths([first], name="one", tokenizer="char", split=split).folder
    both = prepare_paths([second, first], name="both", tokenizer="char", split=split).folder
    train, val = split_texts(both)
    assert not train & val
    assert train | val == set(texts)
    assert 60 < len(val) < 140
    assert split_texts(one)[1] == val & set(texts[:300])
    other = prepare_paths([first], name="other", tokenizer="char", split=split_rule("documents", 0.2, 7)).folder
    assert split_texts(other)[1] != split_texts(one)[1]


def test_karpathys_permutation() -> None:
    split = SplitRule(**entry_of("openwebtext").val)
    chosen = [row for row in range(8_013_769) if split.is_val(0, row, "")]
    assert len(chosen) == 4007
    assert {4327249, 4286500, 2184614, 4793011, 1709068} <= set(chosen)
    assert split.is_val(0, 4327249, "")
    assert not split.is_val(0, 0, "")


def test_another_permutation_is_noticed() -> None:
    with pytest.raises(NanogptError, match=r"numpy .* draws another permutation"):
        SplitRule("rows", fraction=0.1, rows=100, check="00").is_val(0, 3, "")


# --- the same bytes whatever happens


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Three files of documents short and long, an empty one among them."""
    rng = np.random.default_rng(0)
    long = ["".join(rng.choice(list("abc de\n"), size)) for size in (5, 1500, 0, 40, 333, 700, 2, 90)]
    rows(tmp_path / "1.jsonl", long)
    rows(tmp_path / "2.jsonl", [PLAY[:3000], "tiny", PLAY[3000:3500]])
    (tmp_path / "3.txt").write_text(PLAY[4000:9000], encoding="utf-8")
    return ["1.jsonl", "2.jsonl", "3.txt"]


SPLITS = {
    "position": split_rule("position"),
    "documents": split_rule("documents", 0.4),
    "head": SplitRule("head", tokens=700),
    "rows": SplitRule("rows", fraction=0.3, rows=12, seed=1),
    "files": SplitRule("files", first_val_file=2),
}


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_workers(corpus: list[str], small_chunks: None, count: int, gpt2: TiktokenTokenizer) -> None:
    for tokenizer in ("gpt2", "char"):
        one = prepare_paths(corpus, name="one", tokenizer=tokenizer, workers=1, force=True)
        many = prepare_paths(corpus, name="many", tokenizer=tokenizer, workers=count, force=True)
        assert many.meta["splits"] == one.meta["splits"]
        assert many.meta["statistics"] == one.meta["statistics"]


@pytest.mark.parametrize("rule", SPLITS)
@pytest.mark.parametrize("tokenizer", ["bytes", "char"])
def test_any_interruption(corpus: list[str], small_chunks: None, rule: str, tokenizer: str) -> None:
    how: dict[str, Any] = {"tokenizer": tokenizer, "split": SPLITS[rule], "workers": 1}
    heard = Heard()
    whole = prepare_paths(corpus, name="whole", progress=heard, **how)
    assert len(heard.steps) > 15
    stops = 0
    while True:  # one chunk further each time, through the whole work
        try:
            done = prepare_paths(corpus, name="stopped", progress=StopAfter(1), **how)
            break
        except StoppedError:
            stops += 1
            folder = done_folder = whole.folder.parent / "stopped"
            assert not (folder / "meta.toml").exists()
            with pytest.raises(UserError, match="incomplete"):
                open_data_set(done_folder)
    assert stops > 7
    assert done.meta["splits"] == whole.meta["splits"]
    assert done.meta["statistics"] == whole.meta["statistics"]
    assert sorted(everything(done.folder)) == ["meta.toml", "train.bin", "val.bin"]


def test_what_was_not_noted_is_written_again(
    corpus: list[str], small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_paths(corpus, name="whole", tokenizer="bytes", workers=1)
    monkeypatch.setattr(writer, "SAVE_SECONDS", 1e9)
    with pytest.raises(StoppedError):
        prepare_paths(corpus, name="stopped", tokenizer="bytes", workers=1, progress=StopAfter(4))
    assert not (whole.folder.parent / "stopped").exists()  # nothing was noted, so nothing is kept
    monkeypatch.setattr(writer, "SAVE_SECONDS", -1.0)
    with pytest.raises(StoppedError):
        prepare_paths(corpus, name="stopped", tokenizer="bytes", workers=1, progress=StopAfter(4))
    for split in ("train", "val"):
        with (whole.folder.parent / "stopped" / ".prepare" / f"{split}.bin").open("ab") as file:
            file.write(b"half a chunk")
    heard = Heard()
    done = prepare_paths(corpus, name="stopped", tokenizer="bytes", workers=1, progress=heard)
    assert "going on after" in heard.said[0]
    assert done.meta["splits"] == whole.meta["splits"]


def test_another_text_starts_afresh(corpus: list[str], small_chunks: None, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        prepare_paths(corpus, name="a", tokenizer="bytes", workers=1, progress=StopAfter(4))
    (tmp_path / "1.jsonl").write_text('{"text": "something else"}\n', encoding="utf-8")
    heard = Heard()
    done = prepare_paths(corpus, name="a", tokenizer="bytes", workers=1, progress=heard)
    assert "are dropped" in heard.said[0]
    assert bytes(ids(done.folder, "train")[:14].astype(np.uint8)) == b"something else"


@pytest.mark.parametrize("place", range(6))
def test_killed_while_files_are_moved_into_place(
    corpus: list[str], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_paths(corpus, name="whole", tokenizer="bytes")
    old = prepare_paths(corpus, name="a", tokenizer="char")
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            if len(calls) == place:
                raise StoppedError
            calls.append(name)
            return real(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("truncate", "replace", "rename", "unlink"):
            patch.setattr(os, name, counted(name))
        with pytest.raises(StoppedError):
            prepare_paths(corpus, name="a", tokenizer="bytes", force=True)
    try:
        assert tokenizer_of(open_data_set(old.folder, verify=True)).kind == "char"
    except UserError as error:
        assert "incomplete" in str(error)  # noqa: PT017
    done = prepare_paths(corpus, name="a", tokenizer="bytes", force=True)
    assert done.meta["splits"] == whole.meta["splits"]
    open_data_set(done.folder, verify=True)


def test_a_full_disk_keeps_what_is_written(
    corpus: list[str], small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_paths(corpus, name="whole", tokenizer="bytes", workers=1)
    calls: list[int] = []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(NanogptError, match=r"The disk of data/a is full.*run it again"):
            prepare_paths(corpus, name="a", tokenizer="bytes", workers=1)
    heard = Heard()
    done = prepare_paths(corpus, name="a", tokenizer="bytes", workers=1, progress=heard)
    assert "going on after" in heard.said[0]
    assert done.meta["splits"] == whole.meta["splits"]


# --- what is there already


def test_a_complete_data_set_is_left_alone(corpus: list[str]) -> None:
    done = prepare_paths(corpus, name="a", tokenizer="bytes")
    before = {path: path.stat().st_mtime_ns for path in done.folder.iterdir()}
    again = prepare_paths(corpus, name="a", tokenizer="bytes")
    assert again.already
    assert again.meta == done.meta
    assert {path: path.stat().st_mtime_ns for path in done.folder.iterdir()} == before


def test_another_data_set_is_replaced_only_by_force(corpus: list[str], tmp_path: Path) -> None:
    folder = prepare_paths(corpus, name="a", tokenizer="bytes").folder
    before = everything(folder)
    with pytest.raises(UserError, match=r"tokenizer bytes.*--force.*--name"):
        prepare_paths(corpus, name="a", tokenizer="char")
    (tmp_path / "1.jsonl").write_text('{"text": "something else"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"1\.jsonl, 2\.jsonl, 3\.txt has changed since data/a was made"):
        prepare_paths(corpus, name="a", tokenizer="bytes")
    with pytest.raises(UserError, match="made from other text or with other settings"):
        prepare_paths(corpus[:2], name="a", tokenizer="bytes")
    assert everything(folder) == before
    assert not prepare_paths(corpus, name="a", tokenizer="char", force=True).already
    assert tokenizer_of(open_data_set(folder, verify=True)).kind == "char"


def test_token_files_of_others_are_not_overwritten(corpus: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data" / "a"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match="token files that nanogpt did not make"):
        prepare_paths(corpus, name="a")
    assert everything(folder) == {"train.bin": b"1234"}


def test_damaged_metadata_is_no_data_set(corpus: list[str]) -> None:
    folder = prepare_paths(corpus, name="a", tokenizer="bytes").folder
    (folder / "meta.toml").write_bytes(b"request = \xff")
    with pytest.raises(UserError, match="--force"):
        prepare_paths(corpus, name="a", tokenizer="bytes")
    prepare_paths(corpus, name="a", tokenizer="bytes", force=True)
    open_data_set(folder, verify=True)


def test_two_at_once_make_one(corpus: list[str], small_chunks: None) -> None:
    import threading

    results, heard = [], Heard()

    def prepare() -> None:
        results.append(prepare_paths(corpus, name="a", tokenizer="bytes", workers=1, progress=heard))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.already for result in results) == [False, True, True, True]
    open_data_set(results[0].folder, verify=True)


# --- what a run asks for


def test_a_run_prepares_its_text_file(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(PLAY, encoding="utf-8")
    assert ensure_prepared("my.txt") == "my"
    assert open_data_set(tmp_path / "data" / "my").name == "my"
    assert ensure_prepared("my.txt") == ensure_prepared("my") == "my"
    (tmp_path / "my.txt").write_text(PLAY + "more", encoding="utf-8")
    with pytest.raises(UserError, match=r"my\.txt has changed since data/my was made from it") as caught:
        ensure_prepared("my.txt")
    assert ensure_prepared("my") == "my"
    replace, keep = re.findall(r"nanogpt prepare (my\.txt --\S+(?: \S+)?)(?:\.|$)", str(caught.value))
    assert (replace, keep) == ("my.txt --force", "my.txt --name my-2")
    prepare_paths(["my.txt"], name="my-2")
    prepare_paths(["my.txt"], force=True)
    assert ensure_prepared("my.txt") == "my"


def test_a_new_time_stamp_is_no_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.txt").write_text(PLAY, encoding="utf-8")
    made = prepare_paths(["my.txt"])
    before = {path.name: path.stat().st_mtime_ns for path in made.folder.glob("*.bin")}
    os.utime("my.txt", (1, 1))
    assert prepare_paths(["my.txt"]).already
    monkeypatch.setattr("nanogpt_cli.data.text.inputs.sha256_of", lambda _: pytest.fail("read again"))
    assert prepare_paths(["my.txt"]).already
    assert {path.name: path.stat().st_mtime_ns for path in made.folder.glob("*.bin")} == before


def test_a_run_takes_the_text_as_it_was_prepared(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(PLAY, encoding="utf-8")
    prepare_paths(["my.txt"], tokenizer="bytes")
    os.utime("my.txt", (1, 1))
    heard = Heard()
    assert ensure_prepared("my.txt", progress=heard) == "my"
    assert heard.said == ["my.txt is prepared in data/my, by bytes"]
    assert tokenizer_of(open_data_set(tmp_path / "data" / "my")).kind == "bytes"


@pytest.mark.parametrize("damage", ["missing", "empty", "odd", "altered", "meta"])
def test_what_is_broken_is_made_again_by_the_line_that_is_advised(tmp_path: Path, damage: str) -> None:
    """No circle: the advice of the one command is not refused by the other."""
    (tmp_path / "my text.txt").write_text(PLAY, encoding="utf-8")
    how: dict[str, Any] = {"name": "q", "tokenizer": "bytes", "split": split_rule("documents", 0.3)}
    how["read_options"] = ReadOptions(separator="said.")
    made = prepare_paths(["my text.txt"], **how)
    whole = everything(made.folder)
    val = made.folder / "val.bin"
    if damage == "missing":
        val.unlink()
    elif damage == "meta":
        text = (made.folder / "meta.toml").read_text(encoding="utf-8")
        (made.folder / "meta.toml").write_text(text.replace('dtype = "uint16"', 'dtype = "int"'), encoding="utf-8")
    else:
        content = {"empty": b"", "odd": whole["val.bin"][:-1], "altered": bytes(len(whole["val.bin"]))}
        val.write_bytes(content[damage])
    with pytest.raises(UserError) as caught:
        open_data_set(made.folder)
    flags = "--tokenizer bytes --separator said. --split documents --val-fraction 0.3 --name q"
    assert str(caught.value).endswith(f"nanogpt prepare 'my text.txt' {flags}")
    heard = Heard()
    again = prepare_paths(["my text.txt"], progress=heard, **how)
    assert not again.already
    assert "it is made again" in heard.said[0]
    assert everything(made.folder) == whole


def test_metadata_that_cannot_be_read_is_replaced_by_the_line_that_is_advised(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(PLAY, encoding="utf-8")
    folder = prepare_paths(["my.txt"]).folder
    (folder / "meta.toml").write_text("request = ", encoding="utf-8")
    with pytest.raises(UserError, match=r"nanogpt prepare PATH --name my --force$"):
        open_data_set(folder)
    with pytest.raises(UserError, match=r"To replace it: nanogpt prepare my\.txt --force\."):
        prepare_paths(["my.txt"])


def test_a_run_prepares_a_small_data_set(real_cache: None) -> None:
    assert ensure_prepared("shakespeare-char") == "shakespeare_char"
    assert ensure_prepared("shakespeare_char") == "shakespeare_char"


def test_a_run_does_not_fetch_a_large_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ensure_prepared("openwebtext")
    message = str(caught.value)
    for part in (
        "24.2 GB to download; 9.0 billion tokens in 18 GB",
        "nanogpt prepare openwebtext\n",
        "nanogpt prepare openwebtext --shards 1",
        "pip install huggingface_hub pyarrow",
        "--dataset shakespeare",
    ):
        assert part in message
    assert not (tmp_path / "data").exists()


def test_a_run_with_an_unknown_data_set() -> None:
    with pytest.raises(UserError, match=r"shakespear is neither a file nor a known name\. Did you mean shakespeare\?"):
        ensure_prepared("shakespear")


def test_a_run_finishes_what_was_begun_if_it_is_small(real_cache: None, tmp_path: Path) -> None:
    whole = tmp_path / "data" / ensure_prepared("shakespeare_char")
    (whole / ".prepare").mkdir()
    (whole / "meta.toml").rename(whole / ".prepare" / "meta.toml")  # killed before the last rename
    (whole / "val.bin").rename(whole / ".prepare" / "val.bin")
    assert ensure_prepared("shakespeare_char") == "shakespeare_char"
    open_data_set(whole, verify=True)
    (tmp_path / "data" / "fineweb" / ".prepare").mkdir(parents=True)
    assert ensure_prepared("fineweb") == "fineweb"  # opening it says that it is incomplete


def test_token_files_of_others_are_enough_for_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "theirs"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"1234")
    assert ensure_prepared("theirs") == "theirs"


def test_reading_options_reach_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("café---thé---eau".encode("latin-1"))
    done = prepare_paths(["a.txt"], tokenizer="bytes", read_options=ReadOptions(encoding="latin-1", separator="---"))
    whole = tokenizer_of(open_data_set(done.folder)).decode([*ids(done.folder, "train"), *ids(done.folder, "val")])
    assert whole == "café<|endoftext|>thé<|endoftext|>eau<|endoftext|>"


def test_workers_by_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= workers.usual_workers() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert workers.usual_workers() == 16


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=200))
@settings(max_examples=30, deadline=None)
def test_any_text_by_characters(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.txt").write_text(text, encoding="utf-8", newline="")
    done = prepare_paths([str(folder / "a.txt")], folder=folder / "out", tokenizer="char")
    whole = tokenizer_of(open_data_set(done.folder, verify=True)).decode(
        [*ids(done.folder, "train"), *ids(done.folder, "val")]
    )
    assert whole == text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
