"""The same work in a notebook, run headless: one display that grows, columns, a figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, which the extra dev brings")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel, which the extra dev brings")
pytest.importorskip("matplotlib")


def test_a_notebook(tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]]) -> None:
    given = tiny_settings(max_iters=8, eval_interval=4)
    sources = [
        f"import nanogpt_cli\nrun = nanogpt_cli.train(run='runs/a', **{given!r})",
        "run",
        "{name: len(column) for name, column in run.metrics().items()}",
        "nanogpt_cli.plot(run)",
        "nanogpt_cli.load(run).generate('To be', max_new_tokens=5)",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, run, columns, figure, text = (cell.outputs for cell in cells)
    assert [output.output_type for output in trained] == ["display_data"], "one display, and nothing on the streams"
    for form in ("text/plain", "text/html"):
        assert "8 / 8" in trained[0].data[form]
        assert "a on cpu" in trained[0].data[form]
    assert run[0].data["text/plain"] == "Run('runs/a')"
    assert "'val_loss': 10" in columns[0].data["text/plain"]
    assert figure[0].data["image/png"].startswith("iVBOR")
    assert "To be" not in text[0].data["text/plain"]
    assert "step 8/8" in (tmp_path / "runs/a/logs/train.log").read_text(encoding="utf-8")
