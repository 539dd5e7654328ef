"""What plans and tables look like."""

from pathlib import Path

import pytest

from nanogpt_cli.cli import show


@pytest.mark.parametrize("width", [60, 80])
def test_a_path_that_does_not_fit_is_broken_and_not_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr(show, "_console", lambda stderr: Console(width=width, stderr=stderr))
    path = Path("/home/somebody") / ("a-long-folder-name" * 5) / "data"
    show.rows([("data set", f"{path}", f"{path}")], stderr=False)
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    assert sum(printed.count(letter) for letter in "/f") == 2 * sum(str(path).count(letter) for letter in "/f")
