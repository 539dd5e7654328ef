"""Files that are damaged, swapped, foreign or hostile: found, named, and what can still be used is used."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.checkpoint import load_checkpoint, load_training_state
from tests.faults.harness import nanogpt
from tests.faults.lives import Lab, metrics, plain, strays

Damage = Callable[[Path], object]
ON = "resume runs/cut --max-iters 14"


def overwritten(name: str, content: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(content)


def cut_in_half(name: str) -> Damage:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def flipped(name: str) -> Damage:
    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[len(content) // 2] ^= 1
        (run / name).write_bytes(content)

    return damage


def swapped(one: str, other: str) -> Damage:
    def damage(run: Path) -> None:
        (run / one).rename(run / "swap")
        (run / other).rename(run / one)
        (run / "swap").rename(run / other)

    return damage


def copied(run_of: str, name: str) -> Damage:
    return lambda run: shutil.copy(run.parent / run_of / name, run / name)


def lost(*names: str) -> Damage:
    return lambda run: [(run / name).unlink() for name in names]


def both(*damages: Damage) -> Damage:
    return lambda run: [damage(run) for damage in damages]


@pytest.fixture
def cut(lab: Lab) -> Path:
    """A finished run of 12 steps, its last checkpoint the best, the one before it of step 9."""
    run = lab.folder / "runs" / "cut"
    shutil.copytree(lab.folder / "runs" / "resumed", run)
    return run


@pytest.fixture(scope="module")
def extended(shared_lab: Lab) -> Path:
    """The same run, undamaged, two steps later."""
    run = shared_lab.folder / "runs" / "extended"
    shutil.copytree(shared_lab.folder / "runs" / "resumed", run)
    assert nanogpt(shared_lab.folder, "resume runs/extended --max-iters 14").code == 0
    return run


@pytest.fixture(scope="module")
def others(shared_lab: Lab) -> None:
    """Runs of another architecture and of another seed."""
    for name, old, new in (("wide", "--n-embd=16", "--n-embd=32"), ("other", "--seed=3", "--seed=4")):
        assert nanogpt(shared_lab.folder, shared_lab.line(name).replace(old, new)).code == 0


def same_end(run: Path, reference: Path) -> None:
    """Both runs ended alike: weights, moments, progress, best weights, metrics."""
    for name in ("ckpt.pt", "best.pt"):
        assert plain(load_checkpoint(run / name)) == plain(load_checkpoint(reference / name)), name
    assert metrics(run) == metrics(reference)


UNUSABLE = {
    "cut in half": (cut_in_half("ckpt.pt"), "damaged"),
    "empty": (overwritten("ckpt.pt", b""), "is empty"),
    "one bit": (flipped("ckpt.pt"), "checksum"),
    "text": (overwritten("ckpt.pt", b"hello"), "no checkpoint"),
    "the best weights": (swapped("ckpt.pt", "best.pt"), "weights alone"),
    "of another architecture": (copied("wide", "ckpt.pt"), "its n_embd is 32, that of config.toml 16"),
    "of another seed": (copied("other", "ckpt.pt"), "its seed is 4, that of config.toml 3"),
    "lost": (lost("ckpt.pt"), "no such checkpoint file"),
}


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(("damage", "words"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_checkpoint_that_cannot_be_used(lab: Lab, cut: Path, extended: Path, damage: Damage, words: str) -> None:
    """The one before it is used; both steps are named, and nothing is thrown away."""
    damage(cut)
    result = nanogpt(lab.folder, ON)
    assert result.code == 0, result
    assert "runs/cut/ckpt.pt" in result.err
    assert words in result.err
    assert "Going on from step 9 in ckpt-previous.pt; the run had reached step 12" in result.err
    same_end(cut, extended)
    assert (cut / "ckpt-damaged.pt").exists() == (words != "no such checkpoint file")
    assert strays(lab.folder) == []


def test_two_checkpoints_swapped(lab: Lab, cut: Path, extended: Path) -> None:
    swapped("ckpt.pt", "ckpt-previous.pt")(cut)
    assert nanogpt(lab.folder, ON).code == 0
    same_end(cut, extended)


HOPELESS = {
    "both damaged": both(cut_in_half("ckpt.pt"), flipped("ckpt-previous.pt")),
    "both lost": lost("ckpt.pt", "ckpt-previous.pt"),
}


@pytest.mark.parametrize("damage", HOPELESS.values(), ids=HOPELESS.keys())
def test_no_checkpoint_left(lab: Lab, cut: Path, damage: Damage) -> None:
    """What is left is named with the command that uses it; the run is not begun anew over it."""
    damage(cut)
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    result = nanogpt(lab.folder, ON)
    assert result.code == 2, result
    assert "ckpt.pt" in result.err
    assert "ckpt-previous.pt" in result.err
    command = "resume runs/cut --checkpoint ckpt-000012.pt --run"
    assert command in result.err
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before
    assert nanogpt(lab.folder, f"{command} runs/cut2 --max-iters 14").code == 0
    shutil.rmtree(lab.folder / "runs" / "cut2")
    lost("ckpt-000006.pt", "ckpt-000012.pt")(cut)
    assert "nanogpt train --init-from runs/cut/best.pt" in nanogpt(lab.folder, ON).err


def test_the_best_weights_are_written_again(lab: Lab, cut: Path, extended: Path) -> None:
    """ckpt.pt is the best itself."""
    cut_in_half("best.pt")(cut)
    for command in ("sample", "eval"):
        told = nanogpt(lab.folder, f"{command} runs/cut")
        assert told.code == 2, told
        assert "runs/cut/best.pt: the file is damaged" in told.err
        assert "--checkpoint ckpt.pt" in told.err
    assert nanogpt(lab.folder, "sample runs/cut --checkpoint ckpt.pt --max-new-tokens 5").code == 0
    assert nanogpt(lab.folder, ON).code == 0
    same_end(cut, extended)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("damage", [flipped("best.pt"), lost("best.pt"), copied("wide", "best.pt")])
def test_the_best_weights_are_lost(lab: Lab, cut: Path, damage: Damage) -> None:
    """ckpt.pt is of a later step: it says so, and the next evaluation begins anew instead of never beating a ghost."""
    assert nanogpt(lab.folder, f"{ON} --eval-interval 14 --learning-rate 1 --min-lr 1").code == 0
    later = load_training_state(cut / "ckpt.pt")["progress"]
    assert later["best_step"] == 12, "the rate was to spoil the weights"
    damage(cut)
    result = nanogpt(lab.folder, "resume runs/cut --max-iters 16")
    assert result.code == 0, result
    assert "The best weights of this run are lost" in result.err
    assert load_checkpoint(cut / "best.pt")["step"] == 16


SETTINGS = {
    "cut in half": cut_in_half("config.toml"),
    "no TOML": overwritten("config.toml", b"\x00\xff"),
    "empty": overwritten("config.toml", b""),
    "cut between sections": lambda run: (run / "config.toml").write_text(
        (run / "config.toml").read_text().partition("[train]")[0]
    ),
    "lost": lost("config.toml"),
}


@pytest.mark.parametrize("damage", SETTINGS.values(), ids=SETTINGS.keys())
def test_damaged_settings(lab: Lab, cut: Path, extended: Path, damage: Damage) -> None:
    damage(cut)
    result = nanogpt(lab.folder, ON)
    assert result.code == 0, result
    assert "runs/cut/config.toml" in result.err
    assert "The settings of ckpt.pt are used instead" in result.err
    same_end(cut, extended)
    assert nanogpt(lab.folder, "runs").code == 0


@pytest.mark.usefixtures("others")
def test_settings_of_another_run(lab: Lab, cut: Path) -> None:
    copied("wide", "config.toml")(cut)
    result = nanogpt(lab.folder, ON)
    assert result.code == 2, result
    assert "runs/cut/ckpt.pt: not of this run: its n_embd is 16, that of config.toml 32" in result.err


HARMLESS = {
    "tokenizer.toml": cut_in_half("tokenizer.toml"),
    "environment.toml": overwritten("logs/environment.toml", b"\xff"),
    "the lock": overwritten(".lock", b'{"host": '),
    "no logs": lambda run: shutil.rmtree(run / "logs"),
}


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS.keys())
def test_damage_that_costs_nothing(lab: Lab, cut: Path, extended: Path, damage: Damage) -> None:
    damage(cut)
    for line in ("runs", "sample runs/cut --max-new-tokens 5", "eval runs/cut", ON):
        result = nanogpt(lab.folder, line)
        assert result.code == 0, result
    assert plain(load_checkpoint(cut / "ckpt.pt")) == plain(load_checkpoint(extended / "ckpt.pt"))


def test_half_a_line_of_metrics(lab: Lab, cut: Path, extended: Path) -> None:
    path = cut / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, '{"step": 13, "loss": 2.1', "\x00\x00\n", "[1, 2]\n", lines[3]]))
    assert nanogpt(lab.folder, "runs").code == 0
    assert nanogpt(lab.folder, ON).code == 0
    same_end(cut, extended)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("damage", [cut_in_half, flipped, lambda name: overwritten(name, b""), lost])
def test_damaged_data(lab: Lab, cut: Path, damage: Callable[[str], Damage], name: str) -> None:
    data = lab.folder / "data" / "my"
    kept = (data / name).read_bytes()
    damage(name)(data)
    try:
        for line in (ON, lab.line("new")):
            result = nanogpt(lab.folder, line)
            assert result.code == 2, result
            assert f"data/my/{name}" in result.err
            assert "nanogpt prepare" in result.err
        assert not (lab.folder / "runs" / "new").exists()
    finally:
        (data / name).write_bytes(kept)


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile_files(path: Path) -> dict[str, bytes]:
    """Checkpoints in every form that torch.load knows, each with code in it."""
    zipped, legacy, content = io.BytesIO(), io.BytesIO(), {"format": 1, "model": {}, "step": Hostile(path)}
    torch.save(content, zipped)
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    return {"zip": zipped.getvalue(), "legacy": legacy.getvalue(), "pickle": pickle.dumps(content)}


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_crafted_pickle_never_runs(lab: Lab, cut: Path, form: str) -> None:
    trap = lab.folder / "pwned"
    pickle.loads(hostile_files(trap)[form] if form == "pickle" else pickle.dumps(Hostile(trap)))
    trap.rmdir()  # the trap works
    content = hostile_files(trap)[form]
    for name in ("ckpt.pt", "best.pt"):
        (cut / name).write_bytes(content)
    (lab.folder / "hostile.pt").write_bytes(content)
    for line, code in (
        ("sample runs/cut", 2),
        ("eval runs/cut", 2),
        ("export runs/cut out", 2),
        (ON, 0),
        ("sample hostile.pt", 2),
        (f"{lab.line('new')} --init-from hostile.pt", 2),
        ("resume hostile.pt --run runs/new", 2),
    ):
        result = nanogpt(lab.folder, line)
        assert result.code == code, result
        assert "Traceback" not in result.err
        assert not trap.exists(), line
    assert (cut / "ckpt-damaged.pt").read_bytes() == content


def test_a_crafted_meta_pkl_never_runs(lab: Lab) -> None:
    folder, trap = lab.folder / "data" / "theirs", lab.folder / "pwned"
    shutil.copytree(lab.folder / "data" / "my", folder)
    (folder / "meta.toml").unlink()
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Hostile(trap), "stoi": {}, "itos": {}}))
    result = nanogpt(lab.folder, lab.line("new").replace("--dataset my", "--dataset theirs"))
    shutil.rmtree(folder)
    assert result.code == 2, result
    assert "meta.pkl" in result.err
    assert not trap.exists()


# what follows looks for surprises in this process: hundreds of damaged files

SEARCH = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SEARCH
@given(data=st.data())
def test_any_damage_is_found_or_harmless(shared_lab: Lab, tmp_path: Path, data: st.DataObject) -> None:
    """A file that still loads says what it said before: no flipped, cut, doubled or shifted byte goes unnoticed."""
    source = shared_lab.folder / "runs" / "resumed" / data.draw(st.sampled_from(["ckpt.pt", "best.pt"]))
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "zero"]))
        if kind == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[max(1, place) :]
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=40))
        elif kind == "drop":
            del content[place : place + data.draw(st.integers(1, 40))]
        else:
            content[place : place + 64] = bytes(len(content[place : place + 64]))
        content = content or bytearray(b"x")
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    try:
        found = load_checkpoint(path)
    except UserError:
        return
    assert plain(found) == plain(load_checkpoint(source))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(torch.zeros(2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(SEARCH, max_examples=40)
@given(data=st.data())
def test_any_content_is_refused_or_used(shared_lab: Lab, data: st.DataObject) -> None:
    """A whole file, well made, with nonsense in it: by an older version, by another program, or by hand."""
    from nanogpt_cli.cli.main import run

    folder = shared_lab.folder / "runs" / "nonsense"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(shared_lab.folder / "runs" / "resumed", folder)
    state = torch.load(folder / "ckpt.pt", weights_only=True)
    for _ in range(data.draw(st.integers(1, 2))):
        table, path = state, []
        while True:
            key = data.draw(st.sampled_from(sorted(table, key=str)))
            path.append(key)
            if not isinstance(table[key], dict) or not table[key] or data.draw(st.booleans()):
                break
            table = table[key]
        if data.draw(st.booleans()):
            table[key] = data.draw(VALUES)
        else:
            del table[key]
        if not state:
            break
    torch.save(state, folder / "ckpt.pt")
    shutil.copy(folder / "ckpt.pt", folder / "best.pt")
    (folder / "ckpt-previous.pt").unlink()
    for line in (
        ["resume", str(folder), "--max-iters", "13"],
        ["sample", str(folder), "--max-new-tokens", "2"],
    ):
        assert run(line) in (0, 2), (line, path)


@SEARCH
@given(members=st.dictionaries(st.sampled_from(["a/data.pkl", "a/version", "a/data/0", "b"]), st.binary(max_size=60)))
def test_any_archive_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    path = tmp_path / "archive.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(UserError, match="archive"):
        load_checkpoint(path)


@SEARCH
@given(lines=st.lists(st.binary(max_size=30) | st.just(json.dumps({"step": 3, "loss": 1.0}).encode()), max_size=6))
def test_any_metrics_file_can_be_resumed(tmp_path: Path, lines: list[bytes]) -> None:
    from nanogpt_cli.runs.metrics import MetricsLog, read_metrics

    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines))
    MetricsLog(path).keep_through(3, 3)
    assert all(line["step"] <= 3 for line in read_metrics(path))
