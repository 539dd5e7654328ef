"""The gate for what others wrote: bounds of size, depth and numbers, and one message that names file and key."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli import foreign
from nanogpt_cli.errors import UserError

DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEEP, "nested too deeply"),
        ("[" * 150 + "]" * 150, "nested too deeply"),
        ('{"a": {"b": 1e400}}', "a.b is inf"),
        ('{"a": [NaN]}', "a is nan"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ('{"a": 9223372036854775808}', "a is too large a number"),
        ("[1]", "an object is needed"),
        ("", "Expecting value"),
        (b"\xff\xfe\x00", "decode"),
    ],
)
def test_json_out_of_bounds_is_refused_by_name(tmp_path: Path, text: Any, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=reason) as caught:
        foreign.read_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        ("a = 1e400", "a is inf"),
        ("a = " + "9" * 5000, "digits"),
        (".".join(["a"] * 30_000) + " = 1", "a key of more than 100 parts"),
        ("[" + ".".join(["a"] * 30_000) + "]", "a key of more than 100 parts"),
        ("x" * (foreign.SMALL + 1), "at most"),
    ],
)
def test_toml_out_of_bounds_is_refused_at_once(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=reason) as caught:
        foreign.read_toml(path)
    assert time.process_time() - began < 5
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("nul\0")):
        with pytest.raises(UserError, match="cannot be read"):
            foreign.read_bytes(path)
    with pytest.raises(UserError, match="no such file"):
        foreign.read_bytes(tmp_path / "none")


def test_a_file_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x = 1\r\n")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert foreign.read_toml(tmp_path / "b") == {"x": 1}


@pytest.mark.parametrize(
    ("value", "kind"),
    [("5", int), (True, int), (None, int), (1.0, int), (5, str), ([], dict), (1, bool), ("x", float)],
)
def test_a_field_of_another_kind_is_named(value: Any, kind: type) -> None:
    with pytest.raises(UserError, match=r"meta\.toml: tokens is .*needed"):
        foreign.field({"tokens": value}, "tokens", kind, "meta.toml")


def test_fields_that_fit() -> None:
    assert foreign.field({"a": 1}, "a", float, "x") == 1.0
    assert foreign.count({"a": 7}, "a", "x", high=7) == 7
    for table in ({"a": 8}, {"a": 0}, 5, None):
        with pytest.raises(UserError, match="x: a is"):
            foreign.count(table, "a", "x", high=7)


def test_a_message_is_short_and_harmless() -> None:
    assert foreign.brief("a\x1b[2J\nb") == "a\\x1b[2J b"
    assert len(foreign.brief("x" * 10**6)) < 210
