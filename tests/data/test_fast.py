"""The fast engine: tiktoken's ids for any text, used where it is faster, and dropped where it is not to be trusted."""

import importlib.util
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.data import fast
from nanogpt_cli.data.bpe import PATTERNS, BpeTokenizer, train_bpe
from nanogpt_cli.data.fast import FastEngine, fast_engine
from nanogpt_cli.data.text import encode
from nanogpt_cli.data.text.prepare import prepare_paths
from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer
from nanogpt_cli.errors import NanogptError

INSTALLED = importlib.util.find_spec("gigatoken") is not None
needs_engine = pytest.mark.skipif(not INSTALLED, reason="gigatoken is not installed: pip install nanogpt-cli[fast]")
PLAY = "It's 1 o'clock, and all's well: WE'LL go\tto  bed.\r\n\n Bed, 12345 beds! <|endoftext|> né à l'été\n" * 40
WORDS = [
    "it's",
    "WE'LL",
    " ",
    "  ",
    "\n",
    "\r\n",
    "1234",
    "\u3000",
    "道可道",
    "é",
    "<|endoftext|>",
    "\ud800",
    "x\0",
    "!?",
]
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=30).map("".join)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a few kilobytes is worth the engine's start, and has many chunks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fast, "LEAST", 1)
    monkeypatch.setattr(encode, "CHUNK", 2000)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine counts as the faster one, whatever the machine does beside."""
    seconds = itertools.cycle([1.0, 2.0])
    monkeypatch.setattr(fast, "timeit", lambda *_, **__: next(seconds))


@pytest.fixture(scope="session", params=sorted(PATTERNS))
def own(request: pytest.FixtureRequest) -> Tokenizer:
    return BpeTokenizer(train_bpe([PLAY], 400).tokens, request.param)


def rows(name: str) -> str:
    lines = PLAY.splitlines()
    draw = random.Random(0)
    texts = ["\n".join(draw.choices(lines, k=8)) for _ in range(200)]
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return name


@needs_engine
@settings(deadline=None, max_examples=300)
@given(text=TEXTS)
def test_the_ids_are_tiktokens(own: Tokenizer, text: str) -> None:
    assert FastEngine(own).encode(text).tolist() == own.encode(text).tolist()


@needs_engine
def test_the_ids_of_gpt2_are_tiktokens(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "WIDE", 9.0)  # Chinese too
    engine, draw = FastEngine(gpt2), random.Random(1)
    for _ in range(300):
        text = "".join(draw.choices([*WORDS, *PLAY, *map(chr, range(0x4E00, 0x4E40))], k=draw.randrange(200)))
        ids = engine.encode(text)
        assert ids.tolist() == gpt2.encode(text).tolist()
        assert ids.dtype == np.uint16


@needs_engine
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_data_set_is_the_same_with_and_without(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    check = FastEngine.check

    def counted(self: FastEngine, text: str) -> None:
        used.append(text)
        check(self, text)

    monkeypatch.setattr(FastEngine, "check", counted)
    source = rows("rows.jsonl")
    quick = prepare_paths([source], name="quick", tokenizer="bpe:400", workers=workers)
    assert len(used) > 20  # every chunk is compared
    monkeypatch.setattr(fast, "find_spec", lambda _: None)
    plain = prepare_paths([source], name="plain", tokenizer="bpe:400")
    assert quick.meta["splits"] == plain.meta["splits"]


@needs_engine
@pytest.mark.usefixtures("always")
def test_other_ids_end_the_work_and_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_well, source = FastEngine.encode, rows("rows.jsonl")
    calls: list[int] = []

    def encode_badly(self: FastEngine, text: str) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
        calls.append(len(text))
        return np.asarray(encode_well(self, text)[: None if len(calls) < 100 else -1], np.uint16)

    monkeypatch.setattr("nanogpt_cli.data.text.writer.SAVE_SECONDS", -1.0)
    monkeypatch.setattr(FastEngine, "encode", encode_badly)
    with pytest.raises(NanogptError, match=r"other ids than tiktoken.*Nothing was kept.*pip uninstall gigatoken"):
        prepare_paths([source], name="bad", tokenizer="bpe:400", workers=1)
    assert not Path("data").exists()


@needs_engine
def test_chinese_is_left_to_tiktoken(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FastEngine(own)
    monkeypatch.setattr(engine, "engine", None)
    assert engine.encode("道可道，非常道。").tolist() == own.encode("道可道，非常道。").tolist()


@needs_engine
def test_the_cache_is_dropped_from_time_to_time(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FRESH", 10_000)
    engine = FastEngine(own)
    first = engine.engine
    for _ in range(4):
        assert engine.encode(PLAY).tolist() == own.encode(PLAY).tolist()
    assert engine.engine is not first


@needs_engine
def test_the_slower_one_is_not_used(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [2.0, 1.0]
    monkeypatch.setattr(fast, "timeit", lambda *_, **__: seconds.pop(0))
    assert fast_engine(own, PLAY) is None


def test_it_is_for_byte_pair_encodings_of_enough_text(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_engine(CharTokenizer(PLAY), PLAY) is None
    monkeypatch.setattr(fast, "LEAST", len(PLAY) + 1)
    assert fast_engine(own, PLAY) is None
    monkeypatch.setattr(fast, "LEAST", 1)
    monkeypatch.setattr(fast, "find_spec", lambda _: None)
    assert fast_engine(own, PLAY) is None
