"""mfu: a preset or a run, in words and as JSON, with the numbers that belong together."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from nanogpt_cli.cli import main
from nanogpt_cli.config.layers import combine, flag_layer
from nanogpt_cli.training import bench as measure


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_settings: Callable[..., dict[str, Any]],
) -> Path:
    """A run that was never trained, in the current folder; measuring takes no longer than it must."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    flags = {name: str(value) for name, value in tiny_settings(gradient_accumulation_steps=3).items()}
    (folder / "config.toml").write_text(tomli_w.dumps(combine(flag_layer(flags)).config.to_toml()), encoding="utf-8")
    return folder


def document(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert main.run(["mfu", *line, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_holds_what_its_schema_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "tiny")
    assert found.keys() == {
        *("subject", "device", "dtype", "compile", "deterministic", "peak_tflops", "peak_source", "measured", "sizing")
    }
    (one,) = found["measured"]
    assert (one["batch_size"], one["micro_steps"], one["tokens_per_step"]) == (4, 3, 4 * 3 * 16)
    assert one["step_ms"] == pytest.approx(3 * one["micro_ms"] + one["stages_ms"]["optimizer"])
    assert one["tokens_per_s"] == pytest.approx(one["tokens_per_step"] / one["step_ms"] * 1000)
    palm, causal = found["sizing"]["flops_per_token"]["palm"], found["sizing"]["flops_per_token"]["causal"]
    assert causal < palm
    assert one["flops_per_s"] == pytest.approx(one["tokens_per_s"] * palm)
    assert one["mfu"] == pytest.approx(one["flops_per_s"] / found["peak_tflops"] / 1e12)
    assert (found["peak_tflops"], found["peak_source"]) == (1.0, "given")
    assert all(one["stages_ms"][stage] > 0 for stage in ("data", "forward", "backward", "optimizer"))


def test_words_name_formula_and_peak(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["mfu", "runs/tiny", "--peak-tflops=2"]) == 0
    captured = capsys.readouterr()
    assert "of 2 TFLOP/s, given" in captured.out
    assert "6N + 12LHQT" in captured.out
    assert "causal" in captured.out
    for part in ("parameters", "checkpoint", "memory at batch size 4, estimated"):
        assert f"\n{part}\n" in captured.out
    assert "run runs/tiny on cpu" in captured.err


def test_a_measured_peak_is_called_so_and_remembered(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOGPT_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        found = document(capsys, "tiny", "--peak-tflops=auto")
        assert found["peak_source"] in ("measured", "measured earlier")
        assert found["peak_tflops"] > 0


def test_a_preset_needs_no_data_set(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "nanogpt-cpu", "--batch-size=1", "--block-size=8", "--peak-tflops=1")
    assert found["subject"] == "preset nanogpt_cpu"
    assert found["measured"][0]["stages_ms"]["data"] is None
    assert found["sizing"]["parameters"]


def test_sweep_doubles_the_batch_until_memory_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "largest_batch", lambda *_: 5)
    found = document(capsys, "tiny", "--sweep")
    assert [one["batch_size"] for one in found["measured"]] == [1, 2, 4]
    assert main.run(["mfu", "tiny", "--sweep"]) == 0
    assert "batch size" in capsys.readouterr().out


def test_profile_writes_a_trace(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["mfu", "tiny", "--profile", "trace"]) == 0
    trace = json.loads((tmp_path / "trace" / "trace.json").read_text(encoding="utf-8"))
    assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])
    assert "trace/trace.json" in capsys.readouterr().err


def test_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names() -> set[Path]:
        return {path for path in run.parents[1].rglob("*") if "cache" not in path.parts}

    before = names()
    assert main.run(["mfu", "tiny"]) == 0
    assert names() == before
    assert tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def test_an_unknown_name_is_answered_with_the_nearest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["mfu", "tinny"]) == 2
    assert "neither a preset nor a run. Did you mean tiny?" in capsys.readouterr().err
    assert main.run(["mfu", "gtp2"]) == 2
    assert "Did you mean gpt2?" in capsys.readouterr().err


def test_a_fixed_setting_of_a_run_may_be_tried_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (document(capsys, "tiny", f"--block-size={n}")["sizing"]["flops_per_token"]["palm"] for n in (8, 16))
    assert small < large
