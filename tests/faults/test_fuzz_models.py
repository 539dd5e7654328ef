"""Models, data sets and notes that a stranger made, or that something spoilt: refused by name, at once, or used.

FUZZ_EXAMPLES=3000 pytest tests/faults/test_fuzz_models.py searches longer, and elsewhere each time.
"""

import contextlib
import copy
import json
import os
import shutil
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogpt_cli.cli.main import run
from nanogpt_cli.errors import UserError
from nanogpt_cli.machine.rank_env import RankEnv, read_rank_env
from nanogpt_cli.training.saving import deadline
from tests.faults.harness import nanogpt, search
from tests.faults.lives import KILLED, Lab
from tests.faults.taps import At, Kill
from tests.models import LLAMA, SETTINGS, make_run
from tests.weights.test_nanogpt import in_its_format, trained

SEARCH = search(8)
QUICK = 5.0  # seconds of work that a refusal may take
DRY = ["--dry-run", "--data-dir", "data/my", "--peak-tflops", "1", "--run", "runs/new", "--device", "cpu"]
# what JSON and TOML can say; whole numbers at the borders of what can be built
PLAIN = st.recursive(
    st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 17, 10**6, 10**9, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, -(2**63)])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["gelu", "cuda", "../..", "\x1b[2J", "gpt2", "char"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PICKLED = PLAIN | st.none() | st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=3))
BYTES = st.sampled_from(["cut", "flip", "anything", "empty"])


def spoilt(content: Any, values: st.SearchStrategy[Any], data: st.DataObject) -> Any:
    """A copy of nested tables and lists in which one or two values are others, or gone."""
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 2))):
        table = content
        while True:
            keys = list(table) if isinstance(table, dict) else list(range(len(table)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(table[key], dict | list) and table[key] and data.draw(st.integers(0, 3)):
                table = table[key]
                continue
            if data.draw(st.integers(0, 4)) or isinstance(table, list):
                table[key] = data.draw(values)
            else:
                del table[key]
            break
    return content


def spoil_file(path: Path, data: st.DataObject) -> None:
    """Change a TOML or JSON file in its values, or any file in its bytes."""
    old = path.read_bytes()
    if path.suffix in (".json", ".toml") and data.draw(st.integers(0, 5)):
        try:
            if path.suffix == ".json":
                path.write_text(json.dumps(spoilt(json.loads(old), PLAIN | st.none(), data)))
            else:
                path.write_text(tomli_w.dumps(spoilt(tomllib.loads(old.decode()), PLAIN, data)))
        except (UnicodeEncodeError, ValueError):  # what cannot be written
            return
        return
    place, kind = data.draw(st.integers(0, max(0, min(len(old) - 1, 400)))), data.draw(BYTES)
    flipped = old[:place] + bytes([data.draw(st.integers(0, 255))]) + old[place + 1 :]
    anything = data.draw(st.binary(max_size=60))
    path.write_bytes({"cut": old[:place], "flip": flipped, "anything": anything, "empty": b""}[kind])


@pytest.fixture(scope="module")
def place(shared_lab: Lab) -> Path:
    """A folder with a data set, a run, a nanoGPT checkpoint, two Hugging Face folders and an unfinished data set."""
    folder = shared_lab.folder.with_name("strangers")
    shutil.copytree(shared_lab.folder / "data" / "my", folder / "data" / "my")
    shutil.copytree(shared_lab.whole, folder / "runs" / "whole")
    shutil.copy(shared_lab.folder / "my.txt", folder)
    make_run(folder / "runs" / "llama", SETTINGS.__class__(**{**vars(SETTINGS), **LLAMA}))
    for name in ("whole", "llama"):
        assert nanogpt(folder, f"export runs/{name} kept/{name}").code == 0
    torch.save(in_its_format(*trained(bias=False)), folder / "kept" / "ckpt.pt")
    line = "prepare my.txt --name part --tokenizer char"
    assert nanogpt(folder, line, Kill(At("rename", "part/train.bin"))).code == KILLED
    (folder / "data" / "part").rename(folder / "kept" / "part")
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("NANOGPT_CACHE", str(place / ".cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


def told(line: str | list[str], capsys: Any, codes: tuple[int, ...] = (0, 2)) -> int:
    """The exit code of a command line; a refusal is quick, short, harmless, and no traceback."""
    began = time.process_time()
    code = run(line.split() if isinstance(line, str) else line)
    took = time.process_time() - began
    out, err = capsys.readouterr()
    assert "Traceback" not in err + out, (line, err)
    assert code in codes, (line, code, err)
    assert code == 0 or (took < QUICK and 10 < len(err) < 10_000), (line, took, err)
    assert "\x1b" not in err, (line, err)
    return code


def copied(name: str, to: str) -> Path:
    """A fresh copy of what is kept."""
    target = Path(to)
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    source = Path("kept") / name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)  # type: ignore[operator]
    return target


@SEARCH
@given(data=st.data())
def test_nanogpt_checkpoints(here: Path, capsys: Any, data: st.DataObject) -> None:
    content = torch.load("kept/ckpt.pt", weights_only=True)
    Path("theirs.pt").unlink(missing_ok=True)  # it may still be mapped
    torch.save(spoilt(content, PICKLED, data), "theirs.pt")
    told("eval theirs.pt --data-dir data/my", capsys)
    told(["train", "--init-from", "theirs.pt", *DRY], capsys)
    told(["resume", "theirs.pt", *DRY], capsys)


@SEARCH
@given(data=st.data(), kind=st.sampled_from(["whole", "llama"]))
def test_hugging_face_folders(here: Path, capsys: Any, data: st.DataObject, kind: str) -> None:
    folder = copied(kind, "theirs")
    names = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    for name in data.draw(st.lists(st.sampled_from(["config.json", "config.json", *names]), min_size=1, max_size=2)):
        spoil_file(folder / name, data)
    shutil.rmtree("out", ignore_errors=True)
    told("sample theirs --max-new-tokens 2", capsys)
    told("eval theirs --data-dir data/my", capsys)
    told(["train", "--init-from", "theirs", *DRY], capsys)
    told("export theirs out", capsys)


@SEARCH
@given(data=st.data())
def test_tokenizers_and_settings_of_runs(here: Path, capsys: Any, data: st.DataObject) -> None:
    shutil.rmtree("runs/odd", ignore_errors=True)
    shutil.copytree("runs/whole", "runs/odd")
    names = ["tokenizer.toml", "config.toml", "logs/metrics.jsonl", "logs/environment.toml", ".lock"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)):
        spoil_file(Path("runs/odd") / name, data)
    told("sample runs/odd --max-new-tokens 2", capsys)
    told("runs", capsys)
    told("prepare my.txt --name odd --force --tokenizer runs/odd", capsys)
    told("resume runs/odd --dry-run", capsys)
    told("watch runs/odd --save page.html", capsys)


@SEARCH
@given(data=st.data())
def test_metadata_of_data_sets(here: Path, capsys: Any, data: st.DataObject) -> None:
    shutil.rmtree("data/odd", ignore_errors=True)
    shutil.copytree("data/my", "data/odd")
    spoil_file(Path("data/odd/meta.toml"), data)
    told(["train", *DRY, "--data-dir", "data/odd"], capsys)
    told("eval runs/whole --data odd", capsys)
    told("prepare my.txt --name odd --tokenizer char", capsys)
    told("prepare my.txt --name odd --tokenizer char --force", capsys, codes=(0,))
    told(["train", *DRY, "--data-dir", "data/odd"], capsys, codes=(0,))


@pytest.mark.parametrize(("key", "value"), [("split_rule", 5), ("eot_rule", {}), ("source", []), ("statistics", {})])
def test_metadata_of_another_kind(here: Path, capsys: Any, key: str, value: Any) -> None:
    shutil.rmtree("data/odd", ignore_errors=True)
    shutil.copytree("data/my", "data/odd")
    path = Path("data/odd/meta.toml")
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | {key: value}))
    told("prepare my.txt --name odd --tokenizer char", capsys, codes=(2,))
    told("prepare my.txt --name odd --tokenizer char --force", capsys, codes=(0,))


def test_an_end_of_the_job_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "\u00b2")
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME"):
        deadline(0.0)


@SEARCH
@given(data=st.data(), name=st.sampled_from(["state.json", "meta.toml", "train.bin", "val.bin"]))
def test_notes_of_unfinished_data_sets(here: Path, capsys: Any, data: st.DataObject, name: str) -> None:
    folder = copied("part", "data/part")
    if (path := folder / ".prepare" / name).exists():
        spoil_file(path, data)
    code = told("prepare my.txt --name part --tokenizer char", capsys)
    told("prepare my.txt --name part --tokenizer char --force", capsys, codes=(0,))
    assert (folder / "val.bin").read_bytes() == Path("data/my/val.bin").read_bytes(), code


LAUNCHERS = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")),
    **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
    **dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT", "NANOGPT_LAUNCHER")),
}
WORDS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["0", "1", "2", "8(x2)", "node[1-3]", "-1", "99999999999", "²", "1.0", "{}", "[]", '{"machines": {"count": 2}}']
)


@settings(SEARCH, max_examples=50 * SEARCH.max_examples)
@given(variables=st.dictionaries(st.sampled_from(sorted(LAUNCHERS)), WORDS))
def test_variables_of_launchers(variables: dict[str, str]) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(read_rank_env(variables), RankEnv)


@SEARCH
@given(variables=st.dictionaries(st.sampled_from([*LAUNCHERS, "SLURM_JOB_END_TIME", "COLUMNS", "TERM"]), WORDS))
def test_variables_and_commands_of_one_process(here: Path, capsys: Any, variables: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        told("runs", capsys, codes=(0,))
        told("presets", capsys, codes=(0,))
        with contextlib.suppress(UserError):
            deadline(0.0)


def bomb(path: Path, name: str) -> None:
    """An archive that is a thousand times as large when it is read."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(1 << 6):
            member.write(bytes(1 << 20))


@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/data/0", ""])
def test_what_is_huge_is_refused_at_once(here: Path, capsys: Any, name: str) -> None:
    """Bombs, and a file that is mostly hole."""
    shutil.copytree("runs/whole", "runs/huge")
    path = Path("runs/huge/ckpt.pt")
    path.unlink()  # a second name of a milestone
    if name:
        bomb(path, name)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    try:
        told("sample runs/huge --checkpoint ckpt.pt", capsys, codes=(2,))
        told("runs", capsys, codes=(0,))
        told("resume runs/huge --max-iters 14 --dry-run", capsys)
    finally:
        shutil.rmtree("runs/huge")
