"""`nanogpt watch`: an address or a file on stdout, mistakes answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.cli.main import run as nanogpt
from nanogpt_cli.view.watch import Server
from tests.view.made import make_run


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    for name in ("one-run", "two-run"):
        make_run(Path("runs") / name)
    return tmp_path


def test_the_page_is_one_file(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nanogpt(["watch", "--save", "all.html"]) == 0
    assert capsys.readouterr().out == "all.html\n"
    page = Path("all.html").read_text()
    assert "one-run" in page
    assert "two-run" in page
    assert nanogpt(["watch", "two_run", "--save", "all.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "all.html", "runs": ["runs/two-run"]}
    assert "one-run" not in Path("all.html").read_text()


def test_the_address_is_printed_and_ctrl_c_ends_it(
    two_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    assert nanogpt(["watch", "--port", "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("http://127.0.0.1:")
    assert "Ctrl-C" in shown.err
    assert nanogpt(["watch", "one-run", "--port", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"] == ["runs/one-run"]
    assert document["url"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["watch", "one-rum"], "Did you mean one-run?"),
        (["watch", "--save", "gone/all.html"], "gone/all.html: cannot be written"),
        (["watch", "--port", "70000"], "less than or equal to 65535"),
    ],
)
def test_mistakes_are_answered(
    two_runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert nanogpt(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
