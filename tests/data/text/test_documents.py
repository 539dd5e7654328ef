"""Files of every kind become the same documents, in pieces that change no token, and damage is named."""

import gzip
import json
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from nanogpt_cli.data.text import documents
from nanogpt_cli.data.text.documents import Documents, Piece, ReadOptions, file_kind, pieces
from nanogpt_cli.data.tokenizers import TiktokenTokenizer
from nanogpt_cli.errors import NanogptError, UserError

TEXTS = ["first document\nof two lines", "", "zweites: äöü 字 😀", "third"]
SCRAPS = [" ", "  ", "\n", "\n\n", "\t", "a", "word", "é", "字", "。", "1", "1234", "'s", "!", "}\n", "\u3000", "\x1f"]
SCRAPS += ["\x85", "\xa0", "😀", "_", "-", "\r", "/", "\u0301", "²", "\u2028"]
TEXT = st.lists(st.sampled_from(SCRAPS), max_size=60).map("".join)


def read(path: Path, **reading: Any) -> list[str]:
    """The documents of a file, whole."""
    found, open_text = [], ""
    for text, ends in Documents(path, ReadOptions(**reading)):
        open_text += text
        if ends:
            found.append(open_text)
            open_text = ""
    assert open_text == ""
    return found


def write_parquet(path: Path, texts: list[Any], column: str = "text", **options: Any) -> Path:
    table = pa.table({"id": pa.array(range(len(texts))), column: texts})
    pq.write_table(table, path, row_group_size=2, **options)
    return path


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 12)
    monkeypatch.setattr(documents, "WINDOW", 9)


# --- kinds of files


def test_jsonl_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a.jsonl", [{"text": t, "id": 1} for t in TEXTS])) == TEXTS
    assert read(write_parquet(tmp_path / "a.parquet", TEXTS)) == TEXTS


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_compressed_files_are_what_they_hold(tmp_path: Path, kind: str, ending: str) -> None:
    plain = tmp_path / f"a.{kind}"
    if kind == "txt":
        plain.write_text("|".join(TEXTS), encoding="utf-8")
    else:
        write_jsonl(plain, [{"text": t} for t in TEXTS]) if kind == "jsonl" else write_parquet(plain, TEXTS)
    packed = tmp_path / f"a.{kind}{ending}"
    packed.write_bytes(
        gzip.compress(plain.read_bytes()) if ending == ".gz" else pa.compress(plain.read_bytes(), "zstd", asbytes=True)
    )
    assert file_kind(packed) == kind
    assert read(packed, separator="|") == read(plain, separator="|") == TEXTS


def test_a_text_file_is_one_document_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n a\n\nb \n", encoding="utf-8")
    assert read(path) == ["\n\n a\n\nb \n"]


def test_any_other_name_is_text(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# text", encoding="utf-8")
    assert file_kind(path) is None
    assert read(path) == ["# text"]
    assert read(write_jsonl(tmp_path / "rows", [{"text": "a"}]), format="jsonl") == ["a"]


def test_a_separator_parts_documents_and_takes_the_line_breaks_around_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n<|endoftext|>\nthree\n\n<|endoftext|>\n<|endoftext|>\nfour", encoding="utf-8")
    assert read(path, separator="<|endoftext|>") == ["one\ntwo", "three", "", "four"]


def test_the_text_field_has_a_name(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a.jsonl", [{"story": "x"}]), text_field="story") == ["x"]
    assert read(write_parquet(tmp_path / "a.parquet", ["x"], column="story"), text_field="story") == ["x"]


def test_nulls_in_parquet_are_empty_documents(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path / "a.parquet", ["a", None, "b"])) == ["a", "", "b"]


def test_blank_lines_of_jsonl_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n   \n{"text": "b"}')
    assert read(path) == ["a", "b"]


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    reader = Documents(write_parquet(tmp_path / "a.parquet", ["x"] * 1000), ReadOptions())
    shares = [reader.share for _ in reader]
    assert shares[0] < 0.5
    assert shares == sorted(shares)
    assert reader.share == 1.0


# --- bytes to text


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_byte_order_marks_and_line_ends(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(mark + "é\r\nb\rc\n\ufeffd\r\n".encode())
    assert read(path) == ["é\nb\nc\n\ufeffd\n"]
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "a\\r\\nb"}\r\n')
    assert read(tmp_path / "a.jsonl") == ["a\nb"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "gb18030", "shift_jis"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    text = "道可道\r\n非常道" if encoding in ("utf-16", "utf-16-le", "utf-32", "gb18030") else "caf\xe9"
    text = "日本語" if encoding == "shift_jis" else text
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert read(tmp_path / "a.txt", encoding=encoding) == [text.replace("\r\n", "\n")]


def test_line_ends_and_characters_over_block_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é字😀\r\n\r\r\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    for block in (1, 2, 3, 5, 7):
        monkeypatch.setattr(documents, "BLOCK", block)
        assert read(tmp_path / "a.txt") == [text.replace("\r\n", "\n").replace("\r", "\n")]


@pytest.mark.parametrize("block", [1, 3, 64, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bad_bytes_are_named_with_their_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, mark: bytes
) -> None:
    monkeypatch.setattr(documents, "BLOCK", block)
    (tmp_path / "a.txt").write_bytes(mark + "é".encode() * 20 + b"caf\xe9 x")
    with pytest.raises(UserError, match=rf"a\.txt: 0xe9 at byte {43 + len(mark)} is no utf-8.*--encoding latin-1"):
        read(tmp_path / "a.txt")
    assert read(tmp_path / "a.txt", replace_bad_bytes=True) == ["é" * 20 + "caf\ufffd x"]


def test_a_character_cut_off_at_the_end_is_a_bad_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("字".encode()[:2])
    with pytest.raises(UserError, match="0xe5 0xad at byte 0 is no utf-8"):
        read(tmp_path / "a.txt")


def test_an_encoding_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")
    for name in ("utf-9", "hex"):
        with pytest.raises(UserError, match=f"--encoding {name}: Python knows no such"):
            read(tmp_path / "a.txt", encoding=name)


def test_lone_surrogates_in_json_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n', encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == ["a\ufffdb 😀"]


# --- what is not as it should be


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[" * 100_000, "line 2: no JSON"),
        ('["text"]', "line 2: no text in 'text'; it is a list"),
        ('{"body": "x", "id": 3}', "line 2: no text in 'text'; its fields are body, id.*--text-field"),
        ('{"text": 5}', "line 2: no text in 'text'"),
        ('{"text": [null]}', "line 2: no text in 'text'; text holds a list there"),
    ],
)
def test_bad_lines_of_jsonl(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_line_too_long_for_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LINE_LIMIT", 1000)
    monkeypatch.setattr(documents, "BLOCK", 100)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 2000}])
    with pytest.raises(UserError, match="a line is longer than 1,000 characters"):
        read(tmp_path / "a.jsonl")


def test_parquet_without_the_text_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no text in 'text'; its columns are id, body.*--text-field"):
        read(write_parquet(tmp_path / "a.parquet", ["x"], column="body"))
    with pytest.raises(UserError, match="the column id holds int64"):
        read(tmp_path / "a.parquet", text_field="id")


@pytest.mark.parametrize("keep", [0, 10, 0.5, -4])
def test_a_parquet_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["some text " * 50] * 100)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(UserError, match=r"a\.parquet is damaged, cut short or no parquet file"):
        read(path)


def test_a_parquet_file_with_a_damaged_page(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"{n} text " * 50 for n in range(100)], compression="gzip")
    data = bytearray(path.read_bytes())
    data[1000:3000] = bytes(2000)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet is damaged"):
        read(path)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_cut_short(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.txt{ending}"
    noise = np.random.default_rng(0).integers(32, 127, 10_000).astype(np.uint8).tobytes()
    data = gzip.compress(noise) if ending == ".gz" else pa.compress(noise, "zstd", asbytes=True)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=rf"a\.txt\{ending} is damaged, cut short"):
        read(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(UserError, match="is damaged, cut short"):
        read(path)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NanogptError, match=r"a\.parquet needs the package pyarrow. Install it: pip install pyarrow"):
        read(path)


# --- pieces


@given(text=TEXT, separator=st.sampled_from([None, "\n\n", "<|>", " "]), size=st.integers(1, 50))
@example(text="\n\n", separator="\n\n", size=1)
@settings(max_examples=300)
def test_pieces_do_not_depend_on_blocks(text: str, separator: str | None, size: int) -> None:
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", 12)
        patch.setattr(documents, "WINDOW", 9)
        found = list(pieces(blocks, separator))
        assert found == list(pieces([text], separator))
        assert all(len(piece.text) <= 21 for piece in found)
    joined = "".join(piece.text + ("\0" if piece.ends else "") for piece in found)
    if separator is None:
        assert joined == text + "\0"
    else:
        expected = [part.strip("\n") for part in text.split(separator)]
        assert joined.split("\0")[:-1] == (expected if expected[-1] else expected[:-1])


PATTERNS = ["gpt2", "cl100k_base", "o200k_base"]


@pytest.fixture(scope="module")
def encodings(gpt2: TiktokenTokenizer) -> dict[str, Any]:
    """The patterns of three generations of tokenizers, all with GPT-2's merges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: gpt2.encoding._mergeable_ranks)
        made = {name: tiktoken.Encoding(**openai_public.ENCODING_CONSTRUCTORS[name]()) for name in PATTERNS[1:]}
    return {"gpt2": gpt2.encoding, **made}


@pytest.mark.parametrize("name", PATTERNS)
@given(text=TEXT)
@example(text="x = {\n\n}\n" * 5)
@example(text="one two  three\n\nfour \n five\t\tsix " * 3)
@settings(max_examples=300)
def test_ids_of_pieces_are_the_ids_of_the_whole(encodings: dict[str, Any], name: str, text: str) -> None:
    encoding = encodings[name]
    for place in range(len(text)):
        if documents.SAFE_CUT.match(text, place):
            cut = encoding.encode_ordinary(text[:place]) + encoding.encode_ordinary(text[place:])
            assert cut == encoding.encode_ordinary(text), (text[:place], text[place:])


def test_long_text_is_cut_at_safe_places_only(small_pieces: None) -> None:
    text = "the quick brown fox jumps over the lazy dog\n" * 5
    found = list(pieces([text]))
    assert len(found) > 5
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(piece.text[0] in " \n" for piece in found[1:])


def test_text_without_any_place_to_cut_is_cut_all_the_same(small_pieces: None) -> None:
    assert list(pieces(["x" * 50])) == [Piece("x" * 21, False), Piece("x" * 21, False), Piece("x" * 8, True)]


def test_a_very_long_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    with lzma.open(path, "wb", preset=0) as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
    plain = tmp_path / "a.txt"
    with lzma.open(path) as source, plain.open("wb") as target:
        while block := source.read(1 << 20):
            target.write(block)
    longest = total = 0
    for text, _ in Documents(plain, ReadOptions()):
        longest, total = max(longest, len(text)), total + len(text)
    assert total == 64 << 20
    assert longest <= documents.PIECE + documents.WINDOW
