"""train and resume as a user types them: names of runs, layers, --or-resume, own text, and what they print where."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.cli import main
from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.foreign import read_toml
from tests.runner import same_weights

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Type a line in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def typed(*line: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run([str(word) for word in line])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return typed


@pytest.fixture
def tiny(tiny_settings: Callable[..., dict[str, Any]]) -> Callable[..., list[str]]:
    """The flags of a tiny run, in nanoGPT's spelling; data from data/tiny of the current folder."""

    def flags(**changes: Any) -> list[str]:
        settings = {**tiny_settings(), **changes}
        del settings["data_dir"]
        return [f"--{name}={value}" for name, value in settings.items() if value is not None]

    return flags


def config_of(run: str) -> Any:
    return combine(Layer(run, read_toml(Path(run) / "config.toml"))).config


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_made_from_a_run_is_called_after_it(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    assert shell("train", "--run=runs/mine", *tiny())[0] == 0
    assert shell("train", "--config=runs/mine/config.toml")[0] == 0
    assert same_weights(Path("runs/mine/ckpt.pt"), Path("runs/mine-2/ckpt.pt"))


@pytest.mark.parametrize("preset", [[], ["--preset=shakespeare_char_cpu"]])
def test_a_fine_tune_is_continued_by_its_own_line(
    shell: Shell, tiny: Callable[..., list[str]], preset: list[str]
) -> None:
    """What the preset says of the architecture has yielded to the weights, and is no other run."""
    assert shell("train", "--run=runs/base", *tiny())[0] == 0
    none = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
    line = ["train", *preset, "--run=runs/fine", "--or-resume", "--init-from=base", *tiny(**none)]
    code, _, err = shell(*line)
    assert code == 0
    assert "runs/base/best.pt (step 8" in err  # the plan names where the weights come from
    for name in ("ckpt.pt", "ckpt-previous.pt", "best.pt"):
        Path("runs/fine", name).unlink()
    code, _, err = shell(*line)
    assert (code, "starting at step 0" in err) == (0, True)
    shutil.rmtree("runs/base")  # what it was started from is not needed any more
    code, _, err = shell(*line, "--max-iters=10")
    assert (code, "step 8 to 10" in err) == (0, True)


def test_dry_run_shows_the_plan_and_makes_nothing(shell: Shell, tiny: Callable[..., list[str]], tmp_path: Path) -> None:
    before = files(tmp_path)
    code, out, _ = shell("train", "--dry-run", *tiny())
    assert code == 0
    assert "runs/tiny" in out
    assert "4 rows x 1 micro-steps x 1 ranks x 16 tokens" in out
    told = json.loads(shell("train", "--dry-run", "--json", *tiny())[1])
    assert (told["run"], told["settings"]["train"]["max_iters"]) == ("runs/tiny", 8)
    assert {"what": "tokens a step", "value": "64", "why": "4 rows x 1 micro-steps x 1 ranks x 16 tokens"} in told[
        "plan"
    ]
    assert files(tmp_path) == before
    assert not Path("runs").exists()


def test_the_plan_says_who_can_read_the_model(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    plan, capped = (
        " ".join("".join(map(str, shell("train", "--dry-run", *tiny(), *more))).split())
        for more in ([], ["--logit-softcap", "15"])
    )
    assert "exports as gpt2" in plan
    assert "no GGUF, which needs a byte pair encoding" in plan
    assert "exports as nanogpt alone logit_softcap = 15.0" in capped


def test_a_run_ends_with_a_sample_on_stdout_and_words_on_stderr(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    code, out, err = shell("train", *tiny())
    assert code == 0
    assert len(out) > 100  # the sample, in characters of the data
    assert set(out) <= set(Path("data/tiny/meta.toml").read_text(encoding="utf-8"))
    assert "runs/tiny is finished: 8 updates" in err
    assert "over all 509 validation tokens" in err
    assert "nanogpt plot runs/tiny\n" in err
    assert "nanogpt resume runs/tiny --max-iters 16 --lr-decay-iters 16\n" in err
    assert max(map(len, err.partition("what to type next")[0].splitlines()[-3:])) <= 80
    assert {"config.toml", "tokenizer.toml", "ckpt.pt", "best.pt", "logs"} <= {
        p.name for p in Path("runs/tiny").iterdir()
    }


NAMES = [
    (["--dataset=tiny"], "runs/tiny"),
    (["--preset=nanogpt_cpu", "--dataset=tiny"], "runs/nanogpt_cpu-tiny"),
    (["--preset=nanogpt-cpu", "--dataset=tiny", "--config=mine.toml"], "runs/mine"),
    (["--dataset=tiny", "--run=elsewhere/x"], "elsewhere/x"),
    (["--data-dir=data/tiny"], "runs/tiny"),
]


@pytest.mark.parametrize(("line", "path"), NAMES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_names_of_runs(shell: Shell, tiny_data: Path, line: list[str], path: str) -> None:
    Path("mine.toml").write_text("[train]\nseed = 3\n", encoding="utf-8")
    code, out, _ = shell("train", "--dry-run", "--peak-tflops=1", *line)
    assert code == 0
    assert f"{path} " in out


def test_a_second_run_takes_a_free_name_and_a_taken_one_is_refused(
    shell: Shell, tiny: Callable[..., list[str]]
) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.toml").write_text("", encoding="utf-8")
    assert "runs/tiny-2 " in shell("train", "--dry-run", *tiny())[1]
    code, out, err = shell("train", "--run", "runs/tiny", *tiny())
    assert (code, out) == (2, "")
    assert "nanogpt resume runs/tiny" in err
    assert "--or-resume" in err
    assert "another --run" in err


def test_layers_do_not_depend_on_their_order(shell: Shell, tiny_data: Path) -> None:
    Path("mine.toml").write_text("[train]\nbatch_size = 7\nseed = 3\n", encoding="utf-8")
    words = ["--batch-size=5", "--config=mine.toml", "--preset=nanogpt_cpu", "--dataset=tiny", "--peak-tflops=1"]
    plans = {shell("train", "--dry-run", *order)[1] for order in (words, words[::-1])}
    assert len(plans) == 1
    assert "5 rows x 1" in plans.pop()


def test_or_resume_starts_continues_and_refuses(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    line = ["train", "--or-resume", *tiny(max_iters=4)]
    assert shell(*line)[0] == 0
    code, out, err = shell(*line)
    assert (code, out) == (0, "")
    assert "runs/tiny is finished: 4 updates" in err
    code, _, err = shell("train", "--or-resume", *tiny(max_iters=6))
    assert code == 0
    assert config_of("runs/tiny").train.max_iters == 6
    assert "runs/tiny is finished: 6 updates" in err
    before = files(Path("runs"))
    code, _, err = shell("train", "--or-resume", *tiny(n_layer=2))
    assert code == 2
    assert "runs/tiny holds another run: n_layer" in err
    assert files(Path("runs")) == before


def test_resume_needs_no_flags_and_says_when_there_is_nothing_to_do(
    shell: Shell, tiny: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("train", *tiny())[0] == 0
    monkeypatch.chdir("/")
    code, out, err = shell("resume", tmp_path / "runs/tiny")
    assert (code, out) == (0, "")
    run = f"{tmp_path}/runs/tiny"
    assert err == f"{run} is finished: 8 updates. To extend it: nanogpt resume {run} --max-iters N\n"
    code, out, err = shell("resume", tmp_path / "runs/tiny", "--max_iters=10", "--learning_rate=2e-3")
    assert code == 0
    assert "note: changed learning_rate: 0.001 -> 0.002" in err
    assert "is finished: 10 updates" in err


def test_resume_refuses_what_belongs_to_the_run(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    assert shell("train", *tiny())[0] == 0
    before = files(Path("runs"))
    for flag, word in [
        ("--n-layer=2", "n_layer = 2"),
        ("--seed=1", "seed = 1"),
        ("--optimizer=muon", "optimizer = muon"),
        ("--vocab-size=999", "vocab_size = 999, but runs/tiny/ckpt.pt was trained with 23"),
        ("--init-from=gpt2", "init_from = gpt2, but runs/tiny/ckpt.pt was trained with none"),
    ]:
        code, _, err = shell("resume", "tiny", flag)
        assert code == 2
        assert word in err
        assert "start a new run" in err
    for words, message in [
        (["tiny", "--checkpoint=ckpt.pt"], "add --run NEW"),
        (["tiny", "--checkpoint=x.pt", "--run=runs/x"], "Files in runs/tiny: best.pt, ckpt-previous.pt, ckpt.pt."),
        (["tiny", "--checkpoint=best.pt", "--run=runs/x"], "nanogpt train --init-from runs/tiny/best.pt"),
        (["runs/tiny/ckpt.pt"], "nanogpt resume runs/tiny --checkpoint ckpt.pt --run NEW"),
        (
            ["runs/tiny/config.toml", "--run=runs/x"],
            "is a file of a run: nanogpt resume runs/tiny continues the run.",
        ),
        (["data/tiny/train.bin", "--run=runs/x"], "truncated, or no checkpoint"),
        (["data/tiny/train.bin"], "truncated, or no checkpoint"),
    ]:
        code, out, err = shell("resume", *words)
        assert (code, out) == (2, "")
        assert message in err
    assert shell("resume", "tiny", "--run=runs/tiny")[0] == 2
    assert files(Path("runs")) == before


def test_a_fork_leaves_the_run_as_it_is(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    assert shell("train", *tiny(keep_every=4))[0] == 0
    before = files(Path("runs/tiny"))
    code, _, err = shell("resume", "tiny", "--checkpoint=ckpt-000004.pt", "--run=runs/fork")
    assert code == 0
    assert "runs/fork is finished: 8 updates" in err
    assert files(Path("runs/tiny")) == before


def test_own_text_is_prepared_first(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    Path("verse.txt").write_text("so much depends upon a red wheel barrow\n" * 50, encoding="utf-8")
    code, out, _ = shell("train", "--dry-run", *tiny(dataset="verse.txt"))
    assert code == 0
    assert "runs/verse " in out
    assert Path("data/verse/meta.toml").exists()


def test_a_large_missing_data_set_is_not_fetched_unasked(shell: Shell) -> None:
    code, out, err = shell("train", "--preset", "gpt2", "--dry-run")
    assert (code, out) == (2, "")
    assert "nanogpt prepare openwebtext" in err
    assert not Path("data").exists()


def test_non_finite_numbers_end_with_3(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    code, out, err = shell("train", *tiny(learning_rate=1e30, grad_clip=0, warmup_iters=0, schedule="constant"))
    assert (code, out) == (3, "")
    assert "error: Stopped: the " in err


def test_without_matplotlib_there_is_no_picture_but_plot_draws_in_the_terminal(
    shell: Shell, tiny: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanogpt_cli.cli.report.find_spec", lambda name: None)
    code, _, err = shell("train", *tiny(max_iters=2))
    assert code == 0
    assert not Path("runs/tiny/logs/loss.svg").exists()
    assert "nanogpt plot runs/tiny\n" in err


def test_a_constant_rate_needs_no_longer_decay(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    err = shell("train", *tiny(max_iters=2, schedule="constant"))[2]
    assert "nanogpt resume runs/tiny --max-iters 4\n" in err


def test_the_end_of_a_run_as_a_document(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    code, out, err = shell("train", "--json", "-q", *tiny())
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["run"], told["step"], told["max_iters"], told["ended_by"]) == ("runs/tiny", 8, 8, None)
    assert told["evaluation"]["tokens"] == 509
    assert len(told["sample"]) > 100
    assert "step 8/8" in Path("runs/tiny/logs/train.log").read_text(encoding="utf-8")
    again = json.loads(shell("resume", "tiny", "--json")[1])
    assert (again["step"], again["evaluation"], again["sample"]) == (8, None, None)


def test_slow_numbers_are_warned_of(shell: Shell, tiny: Callable[..., list[str]]) -> None:
    assert "float16 on a CPU is many times slower" in shell("train", "--dry-run", "--dtype=float16", *tiny())[2]
