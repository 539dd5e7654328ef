"""Opening data sets: ours, nanoGPT's, shards; and what is said about folders that are none."""

import pickle
import struct
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.data.tokenizers import TiktokenTokenizer
from nanogpt_cli.data.tokens import data_set as token_files
from nanogpt_cli.data.tokens import files as tokens_module
from nanogpt_cli.data.tokens.data_set import check_fits, difference, open_data_set
from nanogpt_cli.data.tokens.files import TokenFile, Tokens
from nanogpt_cli.data.tokens.formats import load_plain_pickle
from nanogpt_cli.errors import UserError
from tests.data.conftest import make_data_set, tokenizer_of

# --- windows of a stream --------------------------------------------------------------------------------------------


def sharded(folder: Path, ids: npt.ArrayLike, cuts: Sequence[int], dtype: str = "<u2", header: int = 0) -> Tokens:
    files = []
    for number, part in enumerate(np.split(np.asarray(ids, dtype), cuts)):
        path = folder / f"{number}.bin"
        path.write_bytes(b"\xff" * header + part.tobytes())
        files.append(TokenFile(path, len(part), header))
    return Tokens(files, np.dtype(dtype).name)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_shards_read_like_one_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 200))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))  # empty shards too
    dtype, header = data.draw(st.sampled_from(["<u2", "<u4"])), data.draw(st.sampled_from([0, 1024]))
    ids = np.random.default_rng(count).integers(0, 65536, count)
    tokens = sharded(tmp_path_factory.mktemp("shards"), ids, cuts, dtype, header)
    length = data.draw(st.integers(1, count))
    offsets = np.array(data.draw(st.lists(st.integers(0, count - length), max_size=5)), np.int64)
    read = tokens.read(offsets, length)
    assert read.dtype == np.int64
    assert read.tolist() == [ids[offset : offset + length].tolist() for offset in offsets]
    assert tokens.count == count
    place = data.draw(st.integers(0, count - 1))
    path, inside = tokens.locate(place)
    assert np.fromfile(path, dtype, offset=header)[inside] == ids[place]


def test_reading_outside_is_refused(tmp_path: Path) -> None:
    tokens = sharded(tmp_path, range(100), [50])
    assert tokens.read(np.array([91]), 9).tolist() == [list(range(91, 100))]
    for offset in (92, -1):
        with pytest.raises(ValueError, match=r"outside 0 \.\. 100"):
            tokens.read(np.array([offset]), 9)


def test_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "OPEN_FILES", 3)
    tokens = sharded(tmp_path, range(100), range(10, 100, 10))
    offsets = np.random.default_rng(0).integers(0, 95, 200)
    assert (tokens.read(offsets, 5) == offsets[:, None] + np.arange(5)).all()
    if sys.platform == "linux":
        handles = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        assert sum(handle.is_relative_to(tmp_path.resolve()) for handle in handles) == 3


def one_read(tokens: Tokens, offset: int) -> list[list[int]]:
    return [row.tolist() for row in tokens.read(np.array([offset]), 3)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_may_read_too(tmp_path: Path, method: str) -> None:
    tokens = sharded(tmp_path, range(1000), [400])
    one_read(tokens, 0)
    with ProcessPoolExecutor(2, mp_context=get_context(method)) as pool:
        found = list(pool.map(one_read, [tokens] * 50, range(0, 500, 10)))
    assert found == [[[o, o + 1, o + 2]] for o in range(0, 500, 10)]


def test_threads_may_share_a_split(tmp_path: Path) -> None:
    tokens, wrong = sharded(tmp_path, range(5000), [400]), []

    def read(seed: int) -> None:
        offsets = np.random.default_rng(seed).integers(0, 4900, 3000)
        if not (tokens.read(offsets, 20) == offsets[:, None] + np.arange(20)).all():
            wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- ours -----------------------------------------------------------------------------------------------------------


def test_our_own_folder(data_set: Callable[..., Path]) -> None:
    folder = data_set(np.arange(1000) % 65, tokenizer={"kind": "char", "alphabet": "abc"}, vocab_size=3, folder="abc")
    with pytest.raises(UserError, match=r"train.bin holds id 3 at token 3.*3 ids.*char"):
        open_data_set(folder)
    folder = data_set(np.arange(1000) % 3, [0, 1, 2], tokenizer={"kind": "char", "alphabet": "abc"}, folder="abc")
    opened = open_data_set(folder)
    assert (opened.name, opened.train.count, opened.val.count, opened.vocab_size) == ("abc", 1000, 3, 3)
    assert tokenizer_of(opened).decode([2, 0]) == "ca"
    assert opened.train.highest_id == 2
    assert opened.notes == []


def test_a_vocabulary_of_the_users_own_needs_four_lines(tmp_path: Path) -> None:
    # ids of a tokenizer we do not know: no hash, no highest id, no tokenizer
    for split in ("train", "val"):
        (np.arange(3000, dtype="<u2") % 1500).tofile(tmp_path / f"{split}.bin")
    (tmp_path / "meta.toml").write_text(
        'format = 1\ndtype = "uint16"\nvocab_size = 1500\nsplits = {train.tokens = 3000, val.tokens = 3000}\n'
    )
    opened = open_data_set(tmp_path)
    assert (opened.vocab_size, opened.tokenizer, opened.train.highest_id) == (1500, None, 1499)
    assert "meta.toml" in opened.vocab_source


def test_gpt2_from_scratch_is_padded_to_50304(data_set: Callable[..., Path]) -> None:
    table = {"kind": "gpt2", "size": 50257, "eot": 50256}
    opened = open_data_set(data_set([0, 50256, 5], vocab_size=50257, tokenizer=table))
    assert (opened.vocab_size, tokenizer_of(opened).size) == (50304, 50257)
    assert "padded" in opened.vocab_source


def test_one_bad_id_late_in_the_file_is_found_at_the_start(data_set: Callable[..., Path]) -> None:
    ids = np.arange(10_000) % 65
    ids[9_700] = 200
    folder = data_set(ids)
    with pytest.raises(UserError, match=r"train\.bin holds id 200 at token 9,700.*65 ids.*Prepare"):
        open_data_set(folder)
    with pytest.raises(UserError, match=r"val\.bin holds id 65 at token 65"):
        open_data_set(data_set(range(65), range(100)))


def test_the_models_own_table_is_checked_too(data_set: Callable[..., Path]) -> None:
    opened = open_data_set(data_set(np.arange(1000) % 65, np.arange(100) % 60))
    check_fits(opened, 16, 65)
    with pytest.raises(UserError, match=r"train\.bin holds id 64 at token 64.*64 ids.*--vocab-size 65"):
        check_fits(opened, 16, 64)


@pytest.mark.parametrize(("train", "val", "named"), [(8, 100, "train"), (16, 100, "train"), (100, 16, "val")])
def test_splits_too_short_for_a_row(data_set: Callable[..., Path], train: int, val: int, named: str) -> None:
    opened = open_data_set(data_set(range(train), np.arange(val) % 65, vocab_size=100))
    short = min(train, val)
    with pytest.raises(
        UserError, match=rf"{named}\.bin.* {short} tokens.*at least 17.*--block-size {short - 1} or less"
    ):
        check_fits(opened, 16)


def test_seventeen_tokens_are_enough_for_sixteen(data_set: Callable[..., Path]) -> None:
    check_fits(open_data_set(data_set(range(17), range(17))), 16)


@pytest.mark.parametrize("count", [0, 1])
def test_a_split_of_nothing(data_set: Callable[..., Path], count: int) -> None:
    opened = open_data_set(data_set(range(count), range(20)))
    with pytest.raises(UserError, match=f"{count} tokens.*Use more text.$"):
        check_fits(opened, 1)


def test_no_folder_says_prepare(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data/poems: it does not exist.*nanogpt prepare PATH --name poems"):
        open_data_set(tmp_path / "data" / "poems")
    with pytest.raises(UserError, match=r"nanogpt prepare openwebtext$"):
        open_data_set(tmp_path / "data" / "openwebtext")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no train\.bin.*nanogpt prepare PATH --name empty"):
        open_data_set(tmp_path / "empty")


def test_an_unfinished_prepare_is_no_data_set(data_set: Callable[..., Path]) -> None:
    folder = data_set(range(50))
    (folder / "meta.toml").unlink()
    (folder / ".prepare").mkdir()
    with pytest.raises(UserError, match=r"incomplete.*nanogpt prepare PATH --name mine"):
        open_data_set(folder)
    for split in ("train", "val"):
        (folder / f"{split}.bin").unlink()
    with pytest.raises(UserError, match=r"incomplete.*nanogpt prepare PATH --name mine"):
        open_data_set(folder)


def test_one_split_missing(data_set: Callable[..., Path]) -> None:
    folder = data_set(range(50))
    (folder / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin is missing.*incomplete.*nanogpt prepare PATH --name mine"):
        open_data_set(folder)
    (folder / "meta.toml").unlink()
    with pytest.raises(UserError, match=r"holds train\.bin but no val split"):
        open_data_set(folder)


@pytest.mark.parametrize("change", [b"", b"\x01", b"\x01\x00\x02\x00"])
def test_a_size_that_differs_from_meta_toml(data_set: Callable[..., Path], change: bytes) -> None:
    folder = data_set(range(50))
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2] + change if change != b"" else b"")
    with pytest.raises(
        UserError, match=r"train\.bin has .* bytes, but meta\.toml says 50 tokens, 100 bytes.*prepare PATH --name mine"
    ):
        open_data_set(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"format": None}, "format"),
        ({"dtype": "int64"}, "dtype 'int64'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": "65"}, "vocab_size"),
        ({"splits": []}, "splits"),
        ({"splits": {"train": {"tokens": 50}}}, "val"),
        ({"splits": {"train": {"tokens": "many"}}}, "tokens"),
        ({"tokenizer": {"kind": "char"}}, "tokenizer"),
        ({"tokenizer": 5}, "tokenizer"),
        ({"name": 5}, "name"),
    ],
)
def test_damaged_metadata_is_named(data_set: Callable[..., Path], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        open_data_set(data_set(range(50), **changes))


@pytest.mark.parametrize("text", [b"", b"not toml [", b"\xff\xfe", b"format = 1"])
def test_metadata_that_is_none(data_set: Callable[..., Path], text: bytes) -> None:
    folder = data_set(range(50))
    (folder / "meta.toml").write_bytes(text)
    with pytest.raises(UserError, match=r"meta\.toml"):
        open_data_set(folder)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200), st.sampled_from(["meta.toml", "meta.pkl", "train.bin", "val.bin"]), st.booleans())
def test_no_content_of_any_file_is_more_than_a_message(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, keep_meta: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for split in ("train", "val"):
        (np.arange(100, dtype="<u2") % 65).tofile(folder / f"{split}.bin")
    if keep_meta:
        (folder / "meta.pkl").write_bytes(pickle.dumps(nanogpt_meta("abc")))
    (folder / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = str(folder)
    try:
        open_data_set(folder)
    except UserError as error:
        message = str(error)
    assert str(folder) in message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5)
ANYTHING = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=2)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_value_in_meta_toml_is_more_than_a_message(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = make_data_set(
        tmp_path_factory.mktemp("fuzz"), range(60), tokenizer={"kind": "bytes"}, vocab_size=257, source={"url": "x"}
    )
    meta = tomllib.loads((folder / "meta.toml").read_text())
    table = data.draw(st.sampled_from([meta, meta["splits"], meta["splits"]["train"], meta["tokenizer"]]))
    key = data.draw(st.sampled_from(sorted(table)))
    value = data.draw(ANYTHING)
    table.pop(key) if value is None else table.update({key: value})
    (folder / "meta.toml").write_text(tomli_w.dumps(without_none(meta)))
    message = "meta.toml"
    try:
        open_data_set(folder)
    except UserError as error:
        message = str(error)
    assert "meta.toml" in message or "tokenizer" in message


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [entry for entry in value if entry is not None] if isinstance(value, list) else value


def test_flags_that_contradict_the_metadata(data_set: Callable[..., Path]) -> None:
    folder = data_set(range(50))
    open_data_set(folder, token_dtype="uint16")
    with pytest.raises(UserError, match=r"--token-dtype uint32.*says uint16.*Leave"):
        open_data_set(folder, token_dtype="uint32")
    with pytest.raises(UserError, match=r"--tokenizer gpt2.*Leave"):
        open_data_set(folder, tokenizer="gpt2")
    with pytest.raises(UserError, match=r"--token-dtype int8: use uint16 or uint32"):
        open_data_set(folder, token_dtype="int8")


# --- nanoGPT's folders ----------------------------------------------------------------------------------------------


def nanogpt_meta(alphabet: Sequence[str]) -> dict[str, Any]:
    return {
        "vocab_size": len(alphabet),
        "itos": dict(enumerate(alphabet)),
        "stoi": {character: number for number, character in enumerate(alphabet)},
    }


def nanogpt_folder(
    folder: Path,
    train: npt.ArrayLike,
    val: npt.ArrayLike = range(60),
    meta: dict[str, Any] | bytes | None = None,
    dtype: str = "<u2",
) -> Path:
    folder.mkdir(exist_ok=True)
    np.asarray(train, dtype).tofile(folder / "train.bin")
    np.asarray(val, dtype).tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta))
    return folder


ALPHABET = "".join(
    sorted(set("\n !$&',-.3:;?ABCabcdefghijklmnopqrstuvwxyz" + "".join(map(chr, range(0x4E00, 0x4E20)))))
)


def test_a_nanogpt_character_folder(tmp_path: Path) -> None:
    opened = open_data_set(nanogpt_folder(tmp_path / "chars", np.arange(500) % 60, meta=nanogpt_meta(ALPHABET)))
    assert (opened.name, opened.vocab_size, opened.vocab_source) == ("chars", len(ALPHABET), "meta.pkl")
    assert tokenizer_of(opened).decode(range(len(ALPHABET))) == ALPHABET
    assert any("meta.pkl" in note for note in opened.notes)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    alphabet = [chr(0x4E00 + i) for i in range(3000)]
    folder = nanogpt_folder(tmp_path / "x", range(60), meta=pickle.dumps(nanogpt_meta(alphabet), protocol=protocol))
    assert load_plain_pickle(folder / "meta.pkl") == nanogpt_meta(alphabet)
    assert open_data_set(folder).vocab_size == 3000


def test_a_nanogpt_folder_without_metadata_is_gpt2_and_the_plan_says_so(tmp_path: Path) -> None:
    opened = open_data_set(nanogpt_folder(tmp_path / "owt", [15496, 995, 50256]))
    assert (opened.vocab_size, tokenizer_of(opened).kind, tokenizer_of(opened).eot) == (50304, "gpt2", 50256)
    assert any("uint16" in note and "GPT-2" in note for note in opened.notes)


def test_meta_pkl_with_a_size_alone(tmp_path: Path) -> None:
    opened = open_data_set(nanogpt_folder(tmp_path / "x", range(200), meta={"vocab_size": 1500}))
    assert (opened.vocab_size, opened.tokenizer) == (1500, None)
    assert any("samples are ids" in note for note in opened.notes)


def test_ids_above_meta_pkl(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.bin holds id 74 at token 74.*meta\.pkl"):
        open_data_set(nanogpt_folder(tmp_path / "x", range(100), meta=nanogpt_meta(ALPHABET)))


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_crafted_pickle_never_runs(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    meta = {"vocab_size": 65, "itos": Payload(touched)}
    folder = nanogpt_folder(tmp_path / "x", range(60), meta=pickle.dumps(meta, protocol=protocol))
    with pytest.raises(UserError, match=r"meta\.pkl was not read.*nothing in the file was run"):
        open_data_set(folder)
    assert not touched.exists()


DEEP = b"\x80\x04}" + b"\x8c\x01a}" * 50_000 + b"s" * 50_000 + b"."


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({"vocab_size": 65.0}),
        pickle.dumps({"vocab_size": (65,)}),
        pickle.dumps({"vocab_size": np.int64(65)}),
        pickle.dumps({"vocab_size": 0}),
        pickle.dumps({"vocab_size": "65"}),
        pickle.dumps({"vocab_size": True}),
        pickle.dumps({"vocab_size": {}}),
        pickle.dumps({}),
        pickle.dumps({"vocab_size": 3, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}),
        pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 1, "b": 0}}),
        pickle.dumps({"vocab_size": 2, "itos": {0: "a", 2: "b"}, "stoi": {"a": 0, "b": 2}}),
        pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: "b"}}),
        pickle.dumps({"vocab_size": 2, "itos": "ab", "stoi": "ab"}),
        pickle.dumps({"vocab_size": 10**15, "itos": {0: "a"}, "stoi": {"a": 0}}),
        b"\x80\x04}r\xff\xff\xff\x7fK\x01.",  # a memo index that would take gigabytes in Python's own unpickler
        b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        DEEP,
        pickle.dumps(nanogpt_meta(ALPHABET))[:-30],
    ],
)
def test_pickles_that_describe_no_vocabulary(tmp_path: Path, meta: bytes) -> None:
    with pytest.raises(UserError, match=r"meta\.pkl"):
        open_data_set(nanogpt_folder(tmp_path / "x", range(60), meta=meta))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_a_damaged_pickle_is_a_message(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    whole = pickle.dumps(nanogpt_meta("abcdefg"))
    path = tmp_path_factory.mktemp("pickle") / "meta.pkl"
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    message = "meta.pkl was not read"
    try:
        load_plain_pickle(path)
    except UserError as error:
        message = str(error)
    assert "meta.pkl was not read" in message


def test_an_alphabet_in_an_order_of_its_own(tmp_path: Path) -> None:
    opened = open_data_set(nanogpt_folder(tmp_path / "x", [0, 1, 2], [0], meta=nanogpt_meta("cab")))
    assert (opened.tokenizer, opened.vocab_size) == (None, 3)
    assert any("samples are ids" in note for note in opened.notes)


# --- files that say nothing about themselves ------------------------------------------------------------------------


def test_32_bit_ids_are_not_read_as_16_bit(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "big", range(70000, 71000), range(70000, 70100), dtype="<u4")
    with pytest.raises(UserError, match=r"look like 32-bit.*--token-dtype uint32"):
        open_data_set(folder)
    opened = open_data_set(folder, token_dtype="uint32")
    assert (opened.train.count, opened.train.highest_id, opened.vocab_size, opened.tokenizer) == (
        1000,
        70999,
        71000,
        None,
    )
    assert "highest id" in opened.vocab_source
    assert opened.train.read(np.array([3]), 2).tolist() == [[70003, 70004]]


@pytest.mark.parametrize("top", [2, 30, 65, 5000, 50257, 100_277, 200_019])
def test_32_bit_ids_of_any_vocabulary_are_noticed(tmp_path: Path, top: int) -> None:
    rng = np.random.default_rng(top)
    folder = nanogpt_folder(tmp_path / "x", rng.integers(0, top, 5000), rng.integers(0, top, 500), dtype="<u4")
    with pytest.raises(UserError, match="look like 32-bit"):
        open_data_set(folder)


@pytest.mark.parametrize("top", [1, 2, 4, 5, 16, 30, 65, 256, 5000, 50257])
@pytest.mark.parametrize("count", [17, 18, 1000])
def test_16_bit_ids_of_any_vocabulary_are_not_suspected(tmp_path: Path, top: int, count: int) -> None:
    ids = np.random.default_rng(top).integers(0, top, count)
    assert open_data_set(nanogpt_folder(tmp_path / "x", ids, ids)).train.count == count


def test_ids_above_gpt2_need_an_answer(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "x", [5, 60_000, 7, 100, 9])
    with pytest.raises(UserError, match=r"train\.bin holds id 60,000 at token 1.*50,257.*--tokenizer.*--token-dtype"):
        open_data_set(folder)
    assert open_data_set(folder, token_dtype="uint16").vocab_size == 60_001


def test_the_tokenizer_can_be_told(tmp_path: Path) -> None:
    folder = nanogpt_folder(tmp_path / "x", np.arange(300) % 257)
    opened = open_data_set(folder, tokenizer="bytes")
    assert (tokenizer_of(opened).kind, opened.vocab_size) == ("bytes", 257)
    with pytest.raises(UserError, match="alphabet"):
        open_data_set(folder, tokenizer="char")
    with pytest.raises(UserError, match="id 257 at token 257"):
        open_data_set(nanogpt_folder(tmp_path / "x", range(300)), tokenizer="bytes")


def test_the_tokenizer_tells_the_width_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = TiktokenTokenizer("cl100k_base", 100_277, 100_257)
    monkeypatch.setattr(token_files, "get_tokenizer", lambda kind: large)
    opened = open_data_set(
        nanogpt_folder(tmp_path / "x", [100_276, 5, 7], [100_257], dtype="<u4"), tokenizer="cl100k_base"
    )
    assert (opened.train.count, opened.vocab_size, opened.tokenizer) == (3, 100_277, large)


@pytest.mark.parametrize(("size", "dtype"), [(101, None), (102, "uint32")])
def test_sizes_that_are_no_whole_number_of_ids(tmp_path: Path, size: int, dtype: str | None) -> None:
    folder = nanogpt_folder(tmp_path / "x", range(60))
    (folder / "val.bin").write_bytes(bytes(range(size)))
    (folder / "train.bin").write_bytes(bytes(range(100)))
    with pytest.raises(UserError, match=rf"val\.bin has {size} bytes.*no whole number"):
        open_data_set(folder, token_dtype=dtype)


# --- shards of llm.c and modded-nanogpt -----------------------------------------------------------------------------


def shard(
    path: Path,
    ids: Sequence[int] | npt.NDArray[Any],
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
    dtype: str = "<u2",
) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())


def test_fineweb_shards_are_one_stream(tmp_path: Path) -> None:
    folder = tmp_path / "fineweb10B"
    for number in (2, 1, 10):
        shard(folder / f"fineweb_train_{number:06}.bin", np.arange(100) + 1000 * number)
    shard(folder / "fineweb_val_000000.bin", range(300, 350))
    (folder / "README.md").write_text("text")
    opened = open_data_set(folder)
    assert (opened.train.count, opened.val.count, opened.vocab_size) == (300, 50, 50304)
    assert opened.train.read(np.array([98]), 4).tolist() == [[1098, 1099, 2000, 2001]]
    assert opened.train.highest_id == 10_099
    assert tokenizer_of(opened).kind == "gpt2"
    assert any("4 shards" in note for note in opened.notes)
    assert opened.train.locate(200) == (folder / "fineweb_train_000010.bin", 0)


def test_llama3_shards(tmp_path: Path) -> None:
    for split in ("train", "val"):
        shard(tmp_path / f"tiny_shakespeare_{split}.bin", [128_000, 5], 20240801, 7, dtype="<u4")
    opened = open_data_set(tmp_path)
    assert (opened.train.dtype, opened.vocab_size, opened.tokenizer) == (np.dtype("<u4"), 128_256, None)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: shard(p, range(100), count=101), "truncated"),
        (lambda p: shard(p, range(100), count=-1), "truncated"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated"),
        (lambda p: p.write_bytes(p.read_bytes()[:1000]), "no header"),
        (lambda p: shard(p, range(100), version=2), "no header"),
        (lambda p: shard(p, range(100), magic=20240522), "multiple-choice"),
        (lambda p: shard(p, range(100), 20240801, 7, dtype="<u4"), "several formats"),
        (lambda p: p.write_bytes(b""), "no header"),
        (lambda p: shard(p, [5, 50_300]), "holds id 50,300 at token 1"),
    ],
)
def test_damaged_shards_are_named(tmp_path: Path, damage: Callable[[Path], Any], named: str) -> None:
    for name in ("a_train_1.bin", "a_train_2.bin", "a_val_0.bin"):
        shard(tmp_path / name, range(100))
    damage(tmp_path / "a_train_2.bin")
    with pytest.raises(UserError, match=named):
        open_data_set(tmp_path)


# --- which data it is -----------------------------------------------------------------------------------------------


def test_a_fingerprint_is_plain_and_survives_moving_and_resharding(
    tmp_path: Path, data_set: Callable[..., Path]
) -> None:
    ids = np.random.default_rng(0).integers(0, 65, 200_000)
    ours = open_data_set(data_set(ids, np.arange(100) % 65)).fingerprint()
    moved = open_data_set(data_set(ids, np.arange(100) % 65, folder="moved")).fingerprint()
    assert difference(ours, moved) is None
    assert all(isinstance(value, str | int) for split in ("train", "val") for value in ours[split].values())
    for number, part in enumerate(np.split(ids, [70_001, 70_001, 150_000])):
        shard(tmp_path / "shards" / f"train_{number}.bin", part)
    shard(tmp_path / "shards" / "val_0.bin", np.arange(100) % 65)
    assert difference(ours, open_data_set(tmp_path / "shards").fingerprint()) is None


def test_a_swapped_data_set_is_noticed(data_set: Callable[..., Path]) -> None:
    ids = np.random.default_rng(0).integers(0, 65, 200_000)
    saved = open_data_set(data_set(ids)).fingerprint()
    assert "200,000" in str(difference(saved, open_data_set(data_set(ids[:-1])).fingerprint()))
    for place in (0, 777, 100_003, 199_999):  # one id of 200,000 is noticed by our SHA-256
        other = ids.copy()
        other[place] ^= 1
        changed = open_data_set(data_set(other)).fingerprint()
        assert "not the same" in str(difference(saved, changed))
    assert "val split" in str(difference(saved, open_data_set(data_set(ids, np.arange(100) % 64)).fingerprint()))


def test_other_tokens_without_a_hash_are_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = open_data_set(nanogpt_folder(tmp_path / "a", rng.integers(0, 50257, 500_000))).fingerprint()
    b = open_data_set(nanogpt_folder(tmp_path / "b", rng.integers(0, 50257, 500_000))).fingerprint()
    assert "not the same" in str(difference(a, b))


def test_header_layout_is_that_of_llm_c() -> None:
    assert struct.pack("<3i", 20240520, 1, 7)[:4] == np.array([55432, 308], "<u2").tobytes()
