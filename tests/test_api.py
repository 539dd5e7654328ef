"""The same work from Python."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanogpt_cli
from nanogpt_cli.errors import UserError
from tests.runner import Runner


@pytest.fixture
def run(tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]]) -> Path:
    return nanogpt_cli.train(run=tmp_path / "runs" / "a", **tiny_settings(max_iters=4)).path


def test_train_resume_load_generate(run: Path) -> None:
    assert nanogpt_cli.resume(run, max_iters=6).path == run
    model = nanogpt_cli.load(run)
    texts = model.generate("To be", num_samples=2, max_new_tokens=20)
    assert [len(text) for text in texts] == [20, 20]
    assert texts == model.generate("To be", num_samples=2, max_new_tokens=20)
    assert texts[0] == model.generate("To be", max_new_tokens=20)[0]


def test_loss_of_a_text_is_the_mean_over_its_tokens(run: Path) -> None:
    model = nanogpt_cli.load(run)
    text = "To be, or not to be, that is the question"
    assert model.loaded.tokenizer is not None
    ids = torch.tensor([model.loaded.tokenizer.encode(text).tolist()])
    expected = 0.0
    with torch.no_grad():
        for first in range(0, ids.shape[1] - 1, 16):
            window = ids[:, first : first + 17]
            logits = model.network(window[:, :-1])
            expected += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
    assert model.loss(text) == pytest.approx(expected / (ids.shape[1] - 1), abs=1e-5)


def test_mistakes_are_the_commands(run: Path) -> None:
    with pytest.raises(UserError, match="Did you mean max_iters"):
        nanogpt_cli.train(max_iter=3)
    with pytest.raises(UserError, match="a whole number"):
        nanogpt_cli.train(max_iters=3.5)
    with pytest.raises(UserError, match="two tokens"):
        nanogpt_cli.load(run).loss("T")
    with pytest.raises(UserError, match="there is a run already"):
        nanogpt_cli.train(run=run, dataset="tiny", data_dir=str(run.parent.parent / "data" / "tiny"))


MISTAKES = [
    ({"num_samples": 0}, "num_samples is 0"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 2.0}, "top_p is 2.0"),
    ({"seed": -1}, "seed is -1"),
    ({"stop": ""}, "stop is ''"),
    ({"stop": ("x", "")}, "stop is ''"),
]


def test_numbers_out_of_range_are_refused_as_on_the_command_line(run: Path) -> None:
    model = nanogpt_cli.load(run)
    for given, message in MISTAKES:
        with pytest.raises(UserError, match=message):
            model.generate("To be", **given)  # type: ignore[arg-type]


def test_one_stop_text_needs_no_tuple(run: Path) -> None:
    model = nanogpt_cli.load(run)
    [text] = model.generate("To be", max_new_tokens=60)
    stop = text[20:22]
    assert model.generate("To be", max_new_tokens=60, stop=stop) == [text[: text.index(stop)]]


def test_devices_are_those_of_the_command(run: Path) -> None:
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert next(nanogpt_cli.load(run, device="auto").network.parameters()).device.type == expected
    with pytest.raises(UserError, match="auto, cpu, cuda, cuda:N or mps is needed"):
        nanogpt_cli.load(run, device="tpu")
    with pytest.raises(UserError, match="--device cuda:99"):
        nanogpt_cli.load(run, device="cuda:99")


def test_the_process_is_left_as_it_was(tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]]) -> None:
    def switches() -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
            dict(os.environ),
        )

    torch.use_deterministic_algorithms(False)  # a command that ran in this process has set it for good
    before, threads = switches(), torch.get_num_threads()
    run = nanogpt_cli.train(run=tmp_path / "a", **tiny_settings(max_iters=1))
    torch.set_num_threads(threads + 1)
    nanogpt_cli.resume(run, max_iters=2)  # with the threads the run had
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    with pytest.raises(UserError):
        nanogpt_cli.resume(run, max_iters=1, seed=2)
    assert switches() == before
    zeros, place = torch.zeros(3), torch.tensor([1])
    zeros.put_(place, torch.ones(1), accumulate=False)


def test_a_run_has_the_name_that_the_command_would_give(
    tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {**tiny_settings(max_iters=1), "bias": True}
    assert nanogpt_cli.train(**few).path == Path("runs/tiny")
    assert nanogpt_cli.train(**few).path == Path("runs/tiny-2")
    assert nanogpt_cli.train("shakespeare-char-cpu", **few).path == Path("runs/shakespeare_char_cpu-tiny")


def test_processes_are_for_the_command(run: Path) -> None:
    with pytest.raises(UserError, match="gpus = 2: from Python a run has one process"):
        nanogpt_cli.train(gpus=2)
    with pytest.raises(UserError, match="gpus = 2"):
        nanogpt_cli.resume(run, gpus=2)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, nanogpt_cli; assert nanogpt_cli.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_a_run_logged_comes_as_columns(runs: Runner) -> None:
    runs.train("a", max_iters=8, eval_interval=4)
    found = nanogpt_cli.metrics(runs.root / "a")
    assert found["step"] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert {len(column) for column in found.values()} == {10}
    assert found["val_loss"].count(None) == 8
    assert nanogpt_cli.Run(runs.root / "a").metrics() == found


def test_progress_shows_unless_it_is_not_wanted(
    tmp_path: Path, tiny_settings: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = nanogpt_cli.train(run=tmp_path / "a", **tiny_settings(max_iters=2))
    shown = capsys.readouterr()
    assert "step 2/2" in shown.err
    assert "step 2/2" in (run.path / "logs" / "train.log").read_text(encoding="utf-8")
    nanogpt_cli.resume(run, max_iters=3, view=nanogpt_cli.View())
    assert shown.out + "".join(capsys.readouterr()) == ""


def test_a_figure_of_runs(runs: Runner) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        runs.train(name, max_iters=4, eval_interval=2)
    figure = nanogpt_cli.plot(runs.root / "a", nanogpt_cli.Run(runs.root / "b"), over="tokens")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats a token)", "learning rate", "tokens/s"]
    assert len(figure.axes[0].lines) == 4
    with pytest.raises(UserError, match="no such run"):
        nanogpt_cli.plot("nowhere")


def test_what_there_is_can_be_listed_and_a_model_is_named_in_a_line(runs: Runner) -> None:
    assert set(nanogpt_cli.__all__) <= set(dir(nanogpt_cli))
    runs.train("a")
    assert len(repr(nanogpt_cli.load(runs.root / "a"))) < 200
    run = nanogpt_cli.Run(Path("runs/a"))
    assert (repr(run), str(run), os.fspath(run)) == ("Run('runs/a')", "runs/a", "runs/a")
