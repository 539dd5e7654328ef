"""What people hand over: read by field, or refused with what to do; nothing is silently taken as something else."""

import gzip
import io
import json
import os
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nanogpt_cli.data.text import documents
from nanogpt_cli.data.text.documents import Documents, ReadOptions, pieces
from nanogpt_cli.data.text.prepare import prepare_paths
from nanogpt_cli.data.text.splits import split_rule
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.errors import UserError
from tests.heard import Heard

TEXTS = ["one, two", 'three "quoted"\nand a second line', "四五六"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))


def read(path: Path, **options: object) -> list[str]:
    """The documents of a file."""
    found, text = [], ""
    for piece in Documents(path, ReadOptions(**options)):  # type: ignore[arg-type]
        text += piece.text
        if piece.ends:
            found.append(text)
            text = ""
    return found


# --- by field


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_columns(ending: str, delimiter: str, line_end: str) -> None:
    import csv

    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator=line_end).writerows(
        [["id", "text"], *([str(n), text] for n, text in enumerate(TEXTS))]
    )
    Path(f"a.{ending}").write_text(out.getvalue(), encoding="utf-8", newline="")
    Path(f"a.{ending}.gz").write_bytes(gzip.compress(out.getvalue().encode()))
    assert read(Path(f"a.{ending}")) == read(Path(f"a.{ending}.gz")) == TEXTS
    with pytest.raises(
        UserError, match=r"no text in 'body'; its columns, by its first line, are id, text.*--text-field"
    ):
        read(Path(f"a.{ending}"), text_field="body")
    Path(f"b.{ending}").write_text(f"id{delimiter}text\n1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"line 2: 1 fields, 2 expected"):
        read(Path(f"b.{ending}"))
    Path("c.csv").write_text('text\n"unended', encoding="utf-8")
    with pytest.raises(UserError, match=r"c\.csv, line 2: no csv.*--format txt"):
        read(Path("c.csv"))


def test_a_list_in_json() -> None:
    for content in (TEXTS, [{"text": text} for text in TEXTS]):
        Path("a.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        assert read(Path("a.json")) == TEXTS
    Path("a.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    assert read(Path("a.json")) == TEXTS
    Path("a.json").write_text('[{"body": 1}]', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json, entry 1: no text in 'text'; its fields are body"):
        read(Path("a.json"))
    Path("a.json").write_text("[1", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: no JSON"):
        read(Path("a.json"))


def test_null_is_an_empty_document_everywhere() -> None:
    Path("a.jsonl").write_text('{"text": null}\n{"text": "x"}\n', encoding="utf-8")
    assert read(Path("a.jsonl")) == ["", "x"]


def test_many_fields_are_not_all_shown() -> None:
    Path("a.jsonl").write_text(json.dumps({f"field{n}" * 20: 1 for n in range(200_000)}), encoding="utf-8")
    with pytest.raises(UserError, match="and 199,990 more") as caught:
        read(Path("a.jsonl"))
    assert len(str(caught.value)) < 700


# --- refused


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(100))
    return out.getvalue()


def docx() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("word/document.xml", "<w>hello</w>")
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", tar(), "a tar archive. Unpack it"),
        ("a.tar.gz", gzip.compress(tar()), "a tar archive. Unpack it"),
        ("a.txt.gz", gzip.compress(tar()), "a tar archive. Unpack it"),
        ("a.zip", docx(), "a zip archive, or a document"),
        ("a.docx", docx(), "a zip archive, or a document"),
        ("a.txt", docx(), "a zip archive, or a document"),
        ("a.pdf", b"%PDF-1.7\n...", "a PDF.*pdftotext"),
        ("a.npy", npy(), "a numpy array.*train.bin"),
        ("a.txt", LFS, "a Git LFS pointer.*git lfs pull"),
        ("a.jsonl", LFS, "a Git LFS pointer.*git lfs pull"),
        ("a.html", b"\n <!DOCTYPE html><p>x", "a web page.*--format txt"),
        ("a.txt", gzip.compress(b"hello"), r"compressed by gzip. Let its name end in \.gz"),
        ("a.txt", "plain text".encode("utf-16-le"), "UTF-16 without a mark.*--encoding utf-16-le"),
        ("a.txt", "plain text".encode("utf-16-be"), "UTF-16 without a mark.*--encoding utf-16-be"),
        ("a.idx", b"MMIDIDX\x00\x00", "an index of Megatron's"),
        ("a.txt", b"PAR1xx", "a parquet file.*--format parquet"),
    ],
)
def test_what_is_no_text(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare_paths([name], name="x")
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.bin": LFS, "val.bin": LFS}, r"train\.bin is a Git LFS pointer.*git lfs pull"),
        ({"shard0.npy": npy()}, r"has no train\.bin, but arrays of numpy.*tofile"),
        ({"text_document.bin": b"1234", "text_document.idx": b"MMIDIDX"}, "an index of Megatron"),
    ],
)
def test_token_files_that_are_none(files: dict[str, bytes], message: str) -> None:
    Path("d").mkdir()
    for name, content in files.items():
        Path("d", name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_data_set(Path("d"))


def test_a_web_page_that_is_meant() -> None:
    Path("a.html").write_text("<html>x</html>", encoding="utf-8")
    assert read(Path("a.html"), format="txt") == ["<html>x</html>"]


def test_files_that_a_folder_leaves_out_are_named() -> None:
    Path("f").mkdir()
    for name in ("a.txt", "b.md", "c.md", "d.py", ".hidden.md"):
        Path("f", name).write_text("some text " * 20, encoding="utf-8")
    heard = Heard()
    prepare_paths(["f"], progress=heard)
    assert heard.said[0] == "f: left out: 2 .md, 1 .py. A pattern takes other files: 'f/**/*.md'"
    Path("g").mkdir()
    Path("g", "a.pgn").write_text("1. e4", encoding="utf-8")
    with pytest.raises(UserError, match=r"g: no file in this folder is .*'g/\*\*/\*\.pgn'"):
        prepare_paths(["g"])


@pytest.mark.parametrize("encoding", ["undefined", "nonsense", "hex"])
def test_encodings_that_are_none(encoding: str) -> None:
    with pytest.raises(UserError, match=f"--encoding {encoding}"):
        ReadOptions(encoding=encoding)


def test_a_name_with_a_tilde_is_a_name() -> None:
    Path("~notes.txt").write_text("some text " * 20, encoding="utf-8")
    assert prepare_paths(["~notes.txt"], name="x").meta["statistics"]["characters"] == 200
    with pytest.raises(UserError, match=r"~nobody-here/a\.txt: no such file"):
        prepare_paths(["~nobody-here/a.txt"], name="y")


def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9"))
    odd.mkdir()
    monkeypatch.chdir(odd)
    Path("a.txt").write_text("some text " * 20, encoding="utf-8")
    assert not prepare_paths(["a.txt"]).already
    assert prepare_paths(["a.txt"]).already
    assert not prepare_paths([str(odd / "a.txt")], name="b").already
    open_data_set(Path("data/b"), verify=True)


# --- taken, and said


def test_line_ends_are_the_same_in_every_format_and_said() -> None:
    Path("a.txt").write_bytes(b"a\r\nb\rc\n" * 20)
    Path("a.jsonl").write_text(json.dumps({"text": "a\r\nb\rc\n" * 20}), encoding="utf-8")
    for name in ("a.txt", "a.jsonl"):
        assert read(Path(name)) == ["a\nb\nc\n" * 20]
        assert prepare_paths([name], name=name[2:]).meta["line_ends"] == "40 CRLF or CR became LF"
    tokenizer = open_data_set(Path("data/txt")).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a\r\nb\rc\n").tolist() == tokenizer.encode("a\nb\nc\n").tolist()


def test_bytes_take_bytes() -> None:
    content = bytes(range(256)).replace(b"\r", b"") * 3
    Path("a.bin").write_bytes(b"text first " + content)
    done = prepare_paths(["a.bin"], tokenizer="bytes")
    ids = [int(i) for split in ("train", "val") for i in np.fromfile(done.folder / f"{split}.bin", "<u2")]
    assert bytes(ids[:-1]) == b"text first " + content
    assert done.meta["statistics"]["text_bytes"] == len(content) + 11
    assert any("3 NUL characters" in warning for warning in done.meta["warnings"])


def test_ends_of_text_that_are_written_out_are_pointed_at() -> None:
    Path("a.txt").write_text("a story<|endoftext|>" * 30, encoding="utf-8")
    done = prepare_paths(["a.txt"], tokenizer="bytes")
    assert "written out 30 times" in done.meta["warnings"][0]
    assert "--separator '<|endoftext|>'" in done.meta["warnings"][0]
    apart = prepare_paths(["a.txt"], tokenizer="bytes", name="b", read_options=ReadOptions(separator="<|endoftext|>"))
    assert not any("written out" in warning for warning in apart.meta["warnings"])
    assert apart.meta["statistics"]["documents"] == 30


def test_val_of_another_script_is_warned_about() -> None:
    Path("a.txt").write_text("abc def " * 900 + "".join(map(chr, range(0x4E00, 0x4E00 + 300))), encoding="utf-8")
    (warning,) = prepare_paths(["a.txt"], tokenizer="char").meta["warnings"]
    assert "of val are tokens that never stand in train" in warning


def test_documents_of_val_that_stand_in_train_are_counted() -> None:
    rows = [f"document {n % 80}" for n in range(100)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    (warning,) = prepare_paths(["a.jsonl"], tokenizer="bytes").meta["warnings"]
    assert warning.startswith("9 documents of val stand in train too")
    apart = prepare_paths(["a.jsonl"], tokenizer="bytes", name="b", split=split_rule("documents", 0.3))
    assert apart.meta["warnings"] == []  # the rule sends the same document to the same side


def test_val_in_a_file_of_its_own() -> None:
    Path("train.txt").write_text("abc " * 50, encoding="utf-8")
    Path("val.txt").write_text("cab " * 20, encoding="utf-8")
    done = prepare_paths(["train.txt"], name="x", val="val.txt")
    tokenizer = open_data_set(done.folder, verify=True).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(np.fromfile(done.folder / "val.bin", "<u2")).strip() == ("cab " * 20).strip()
    assert done.meta["arguments"] == ["train.txt", "--val", "val.txt", "--name", "x"]
    with pytest.raises(UserError, match=r"--val \./train\.txt: train\.txt cannot be both"):
        prepare_paths(["train.txt"], name="y", val="./train.txt")


@pytest.mark.parametrize("tokenizer", ["bytes", "char", "bpe:300"])
def test_val_begins_at_a_character_and_at_the_same_one_for_every_tokenizer(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanogpt_cli.data.text.make.SMALL_BYTES", 0)  # a long text
    text = "道可道，非常道。a" * 37
    Path("a.txt").write_text(text, encoding="utf-8")
    done = prepare_paths(["a.txt"], tokenizer=tokenizer)
    reader = open_data_set(done.folder).tokenizer
    assert reader is not None
    raw = [np.fromfile(done.folder / f"{split}.bin", "<u2") for split in ("train", "val")]
    train = reader.decode_bytes(raw[0])
    cut = len(text.encode()) - (len(text.encode()) - int(len(text.encode()) * 0.9))
    assert train == text.encode()[:cut].decode("utf-8", "ignore").encode()
    assert reader.decode(raw[1]).removesuffix("<|endoftext|>") == text[len(train.decode()) :]


def test_long_documents_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is copied once: a count of characters copied, not a clock."""
    monkeypatch.setattr(documents, "PIECE", 100)
    monkeypatch.setattr(documents, "WINDOW", 10)
    copied = 0

    class Counted(str):
        def __getitem__(self, key: object) -> str:
            nonlocal copied
            found = str.__getitem__(self, key)  # type: ignore[index]
            copied += len(found)
            return Counted(found)

    monkeypatch.setattr(documents, "SAFE_CUT", re.compile("never"))
    text = Counted("x" * 20_000)
    assert "".join(piece.text for piece in pieces([text])) == text
    assert copied < 3 * len(text)
