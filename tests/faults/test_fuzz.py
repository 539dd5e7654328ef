"""Anything a user can type or own: never a traceback, never exit code 1 for what was typed, never a changed run.

FUZZ_EXAMPLES=3000 pytest tests/faults/test_fuzz.py searches longer, and elsewhere each time.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.cli.main import COMMANDS, run
from nanogpt_cli.config.schema import SECTIONS
from nanogpt_cli.config.schema import settings as known_settings
from tests.faults.harness import nanogpt, search
from tests.faults.lives import Lab

SEARCH = search(60)
# what a shell can pass on: no NUL, and bytes that are no UTF-8 as Python shows them
TYPED = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]) | st.just("\udcff"), max_size=12)
TEXT = st.text(max_size=6)
NUMBERS = st.integers() | st.floats() | st.integers(-3, 300)


@pytest.fixture(scope="module")
def place(shared_lab: Lab) -> Path:
    """A folder with a data set, and with runs of characters and of bytes."""
    folder = shared_lab.folder.with_name("fuzz")
    shutil.copytree(shared_lab.folder / "data" / "my", folder / "data" / "my")
    shutil.copytree(shared_lab.whole, folder / "runs" / "whole")
    shutil.copy(shared_lab.folder / "my.txt", folder)
    assert nanogpt(folder, "prepare my.txt --name raw --tokenizer bytes").code == 0
    line = shared_lab.line("raw").replace("--dataset my", "--dataset raw")
    assert nanogpt(folder, line).code == 0
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("NANOGPT_CACHE", str(place / ".cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


def content(folder: Path) -> dict[str, str]:
    """What the runs and data sets hold."""
    paths = [path for name in ("runs", "data") for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.name != ".lock"}


def told(arguments: list[str], capsys: Any) -> int:
    """The exit code of a command line, which must be one for what was typed."""
    code = run(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in err + out, (arguments, err)
    assert code in (0, 2), (arguments, code, err)
    assert code == 0 or len(err) > 10, (arguments, err)
    return code


def value_of(name: str) -> st.SearchStrategy[Any]:
    """Values that a setting may have, or almost."""
    known = known_settings()[name]
    fitting: st.SearchStrategy[Any] = NUMBERS if known.kind in (int, float) else st.booleans()
    if known.choices:
        fitting = st.sampled_from(known.choices) | fitting
    return fitting | TYPED | st.just(known.default)


SETTINGS = st.sampled_from(sorted(known_settings())).flatmap(lambda name: st.tuples(st.just(name), value_of(name)))
TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# every plan reads these data, however strange the rest is
DRY = ["--dry-run", "--data-dir", "data/my", "--peak-tflops", "1", "--run", "runs/new"]


@SEARCH
@given(text=st.text(max_size=200) | st.binary(max_size=200))
def test_config_files_of_anything(here: Path, capsys: Any, text: str | bytes) -> None:
    (here / "any.toml").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    told(["train", "--config", "any.toml", *DRY], capsys)


@SEARCH
@given(
    given_settings=st.lists(SETTINGS, max_size=6), extra=st.dictionaries(st.text(max_size=6), TOML_VALUES, max_size=2)
)
def test_config_files_of_settings(
    here: Path, capsys: Any, given_settings: list[tuple[str, Any]], extra: dict[str, Any]
) -> None:
    tables: dict[str, Any] = dict(extra)
    for name, value in given_settings:
        table = tables.setdefault(known_settings()[name].section, {})
        if isinstance(table, dict):
            table[name] = "text" if isinstance(value, str) and "\udcff" in value else value
    try:
        text = tomli_w.dumps({key: value for key, value in tables.items() if value is not None})
    except (TypeError, AttributeError):
        return
    (here / "settings.toml").write_text(text, encoding="utf-8")
    before = content(here)
    told(["train", "--config", "settings.toml", *DRY], capsys)
    assert content(here) == before


@SEARCH
@given(given_settings=st.lists(SETTINGS, max_size=5), resumed=st.booleans())
def test_flags_of_settings(here: Path, capsys: Any, given_settings: list[tuple[str, Any]], resumed: bool) -> None:
    flags = [f"{known_settings()[name].flag}={value}" for name, value in given_settings]
    line = ["resume", "runs/whole", "--dry-run"] if resumed else ["train", *DRY]
    before = content(here)
    told([*line, *flags, *([] if resumed else ["--data-dir", "data/my"])], capsys)
    assert content(here) == before


WORDS = st.sampled_from(
    [
        *(name for name in COMMANDS if name not in ("train", "resume", "prepare", "mfu")),
        *("runs/whole", "whole", "raw", "my", "gpt3", "data/my", ".", "..", "/", "", "-", "--", "---", "-h", "--help"),
        *(
            "--json",
            "--seed",
            "--seed=1",
            "--temperature",
            "--top-k=0",
            "--top-p=1e9",
            "--split=val",
            "--data",
            "--out",
        ),
        *("--max-new-tokens=3", "--num-samples=2", "--checkpoint", "last", "ckpt.pt", "--prompt", "--batch-size=0"),
        *(
            "show",
            "gpt2_xl",
            "--over=time",
            "curves.png",
            "--out",
            "out",
            "--device",
            "cuda:99",
            "--stop=a",
            "--no-json",
        ),
    ]
)


SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size", "gradient_accumulation_steps")
COUNTS = ("max_iters", "eval_iters")
ELSEWHERE = ("dataset", "data_dir", "device", "compile", "gpus", "wandb", "tensorboard", "token_dtype")


def extreme(name: str) -> st.SearchStrategy[Any]:
    """Values that are allowed, at their limits; sizes stay small, since a large model is slow and no mistake."""
    known = known_settings()[name]
    if known.choices or known.kind is bool:
        return st.sampled_from(known.choices or (True, False))
    if name in SIZES:
        return st.integers(1, 40)
    if name in COUNTS:
        return st.integers(1, 4)
    low = known.ge if known.ge is not None else 0
    if known.kind is int:
        return st.sampled_from([low, low + 1, 2**31, 2**63 - 1])
    tiny = [5e-324, 1e-300, 1e-45, 1e-8]
    return st.sampled_from(
        [*([low] if known.gt is None else []), *tiny, *([1 - 1e-9] if known.lt else [1.0, 1e38, 1e300])]
    )


TRAINED = sorted(name for name in known_settings() if name not in ELSEWHERE and known_settings()[name].kind is not str)
TRAINED += ["activation", "position", "norm", "optimizer", "schedule", "sampling", "dtype"]


@settings(SEARCH, max_examples=SEARCH.max_examples // 3)
@given(names=st.lists(st.sampled_from(TRAINED), max_size=4, unique=True), data=st.data())
def test_training_at_the_limits(here: Path, capsys: Any, names: list[str], data: st.DataObject) -> None:
    """Every value that is allowed can be trained with: to the end, or until the numbers go bad."""
    shutil.rmtree(here / "runs" / "odd", ignore_errors=True)
    flags = [f"{known_settings()[name].flag}={data.draw(extreme(name))}" for name in names]
    few = ["--max-iters=2", "--eval-iters=1", "--batch-size=2", "--n-layer=1", "--n-head=2", "--n-embd=8"]
    line = ["train", "--data-dir=data/my", "--run=runs/odd", "--device=cpu", "--peak-tflops=1", "--block-size=8"]
    code = run([*line, *(flag for flag in few if flag.partition("=")[0] not in str(flags)), *flags])
    err = capsys.readouterr().err
    assert "Traceback" not in err, (flags, err)
    assert code in (0, 2, 3), (flags, code, err)
    shutil.rmtree(here / "runs" / "odd", ignore_errors=True)


FREE = [name for name in TRAINED if known_settings()[name].section != "model"]


@settings(SEARCH, max_examples=SEARCH.max_examples // 6)
@given(names=st.lists(st.sampled_from([*FREE, "dropout", "block_size"]), max_size=3, unique=True), data=st.data())
def test_fine_tunes_go_on(here: Path, capsys: Any, names: list[str], data: st.DataObject) -> None:
    """From weights whose architecture no flag tells; before the first save, and after it."""
    shutil.rmtree(here / "runs" / "odd", ignore_errors=True)
    flags = [f"{known_settings()[name].flag}={data.draw(extreme(name))}" for name in names]
    few = ["--max-iters=2", "--eval-iters=1", "--batch-size=2"]
    line = ["train", "--init-from=runs/whole", "--data-dir=data/my", "--run=runs/odd", "--device=cpu"]
    words = [*line, *(flag for flag in few if flag.partition("=")[0] not in str(flags)), *flags, "--peak-tflops=1"]
    code = run(words)
    err = capsys.readouterr().err
    if data.draw(st.booleans()):
        for path in (here / "runs" / "odd").glob("*.pt"):
            path.unlink()
    again = run([*words, "--or-resume"] if data.draw(st.booleans()) else ["resume", "runs/odd"])
    err += capsys.readouterr().err
    assert "Traceback" not in err, (flags, err)
    assert code in (0, 2, 3), (flags, code, err)
    assert code == again or code == 2, (flags, code, again, err)
    shutil.rmtree(here / "runs" / "odd", ignore_errors=True)


@SEARCH
@given(words=st.lists(WORDS | TYPED, max_size=7))
def test_words_in_any_order(here: Path, capsys: Any, words: list[str]) -> None:
    before = content(here)
    told([word for word in words if word not in ("train", "resume", "prepare", "mfu")], capsys)
    assert content(here) == before


@SEARCH
@given(
    words=st.lists(WORDS | TYPED, max_size=4), command=st.sampled_from(["train", "resume", "sample", "eval", "export"])
)
def test_words_behind_a_command(here: Path, capsys: Any, words: list[str], command: str) -> None:
    before = content(here)
    dry = {"train": DRY, "resume": ["--dry-run"]}.get(command, [])
    told([command, *words, *dry], capsys)
    assert content(here) == before


@SEARCH
@given(data=st.data())
def test_token_files(here: Path, capsys: Any, data: st.DataObject) -> None:
    """Damaged in one place, or bytes of any kind, with metadata or without."""
    folder = here / "data" / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(here / "data" / data.draw(st.sampled_from(["my", "raw"])), folder)
    for name in data.draw(st.lists(st.sampled_from(["train.bin", "val.bin", "meta.toml"]), min_size=1, max_size=3)):
        path = folder / name
        old = path.read_bytes() if path.exists() else b""
        kind = data.draw(st.sampled_from(["delete", "bytes", "cut", "flip", "swap"]))
        if kind == "delete":
            path.unlink(missing_ok=True)
        elif kind == "bytes":
            path.write_bytes(data.draw(st.binary(max_size=80)) * data.draw(st.sampled_from([1, 40])))
        elif kind == "cut":
            path.write_bytes(old[: data.draw(st.integers(0, max(0, len(old))))])
        elif kind == "flip" and old:
            place = data.draw(st.integers(0, len(old) - 1))
            path.write_bytes(old[:place] + bytes([old[place] ^ data.draw(st.integers(1, 255))]) + old[place + 1 :])
        elif kind == "swap" and (folder / "train.bin").exists():
            path.write_bytes((folder / "train.bin").read_bytes())
    extra = data.draw(
        st.sampled_from([[], ["--token-dtype", "uint32"], ["--tokenizer", "bytes"], ["--tokenizer=char"]])
    )
    told(["train", *DRY, "--data-dir", "data/odd", "--block-size", "16", *extra], capsys)
    told(["eval", "runs/whole", "--data-dir", "data/odd"], capsys)
    shutil.rmtree(folder)


@SEARCH
@given(prompts=st.lists(TYPED, max_size=3), model=st.sampled_from(["whole", "raw"]), stop=st.none() | TYPED)
def test_prompts(here: Path, capsys: Any, prompts: list[str], model: str, stop: str | None) -> None:
    before = content(here)
    line = ["sample", model, "--max-new-tokens", "3", *(f"--prompt={prompt}" for prompt in prompts)]
    told(line if stop is None else [*line, f"--stop={stop}"], capsys)
    assert content(here) == before


@SEARCH
@given(text=st.binary(max_size=60), model=st.sampled_from(["whole", "raw"]))
def test_prompt_files(here: Path, capsys: Any, text: bytes, model: str) -> None:
    (here / "prompt").write_bytes(text)
    told(["sample", model, "--max-new-tokens", "3", "--prompt-file", "prompt"], capsys)


@settings(SEARCH, max_examples=SEARCH.max_examples // 2)
@given(text=st.binary(max_size=300), words=st.lists(WORDS | TYPED, max_size=2))
def test_text_to_prepare(here: Path, capsys: Any, text: bytes, words: list[str]) -> None:
    (here / "some.txt").write_bytes(text * 20)
    before = content(here)
    told(["prepare", "some.txt", "--name", "some", "--force", *words], capsys)
    shutil.rmtree(here / "data" / "some", ignore_errors=True)
    after = content(here)
    assert {path: after[path] for path in before} == before


def test_sections_and_commands_are_all_tried() -> None:
    """The lists above follow the program."""
    assert {known_settings()[name].section for name in known_settings()} == set(SECTIONS)
