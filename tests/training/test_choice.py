"""--minutes and --depth: what is chosen, what stands, what is refused, and that a run of them is like any other."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanogpt_cli.cli.main import run
from nanogpt_cli.config.dial import KEYS, told_before
from nanogpt_cli.config.family import CHARACTERS, WORDS, Text, best_tokens, block_weights, family_layer, law_of
from nanogpt_cli.config.layers import combine
from nanogpt_cli.errors import UserError
from nanogpt_cli.model.sizes import flops_per_token
from nanogpt_cli.training import choice
from nanogpt_cli.training.bench import Measurement
from tests.conftest import TEXT, write_data_set
from tests.runner import same_weights

SHAKESPEARE = Text(1_003_854, 111_540, 65)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Sets how many FLOPs a second the machine does; returns the depths that are timed from then on."""

    def of_speed(flops_per_s: float) -> list[int]:
        timed: list[int] = []

        def measure(config: Any, compute: Any, *, batch_size: int, peak: Any, seconds: float) -> Measurement:
            timed.append(config.model.n_layer)
            ms = 1000 * batch_size * config.model.block_size * flops_per_token(config.model) / flops_per_s
            return Measurement(batch_size, 1, 1, ms, 0.0, ms, 1.0, 1.0, None, None, {"optimizer": 0.0})

        monkeypatch.setattr(choice, "measure", measure)
        return timed

    return of_speed


@pytest.fixture
def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """The settings of a dry run on a text that is long enough to be read for a while."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # this process is not the command's own
    write_data_set(tmp_path / "data" / "long", 200 * TEXT)

    def settings(*flags: str) -> dict[str, Any]:
        line = ["train", "--dataset", "long", "--dry-run", "--json", "--device", "cpu", "--peak-tflops", "1", *flags]
        assert run(line) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)["settings"]
        return document

    return settings


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12, 32])
@pytest.mark.parametrize("tokens", [1.0, 1e6, 1e8, 1e11])
@pytest.mark.parametrize("text", [SHAKESPEARE, Text(3000, 60, 65), Text(10**10, 10**8, 50257)])
def test_every_depth_is_a_recipe(depth: int, tokens: float, text: Text) -> None:
    config = combine(family_layer(depth, tokens, text, ranks=3, given={})).config
    assert config.model.n_embd == 64 * config.model.n_layer == 64 * depth
    assert config.train.batch_size % 3 == 0
    assert config.model.block_size < text.val_tokens
    whole = config.train.batch_size * config.model.block_size
    assert abs(config.train.max_iters * whole - max(tokens, whole)) <= whole / 2
    assert -(-config.train.max_iters // config.train.eval_interval) <= 8


@pytest.mark.parametrize("law", [CHARACTERS, WORDS])
def test_larger_longer_and_more_text_are_better(law: Any) -> None:
    base = law.expected(1e6, 1e7, 10**7)
    assert law.expected(2e6, 1e7, 10**7) < base
    assert law.expected(1e6, 2e7, 10**8) < base < law.expected(1e6, 1e7, 10**6)
    assert law.floor < law.expected(1e6, 1e15, 10**6)  # a text that is read for ever teaches no more


def test_a_deeper_model_reads_more_and_a_short_text_is_not_read_for_ever() -> None:
    weights = [block_weights(depth, {}) for depth in (1, 2, 4, 8)]
    tokens = [best_tokens(n, Text(10**12, 10**9, 50257)) for n in weights]
    assert tokens == sorted(set(tokens))
    short = Text(100_000, 10_000, 50257)
    assert [best_tokens(n, short) < 10 * short.tokens for n in weights] == [False, True, True, True]
    assert law_of(SHAKESPEARE) is CHARACTERS


def test_more_time_and_a_faster_machine_take_a_deeper_model(
    machine: Callable[[float], list[int]], planned: Callable[..., dict[str, Any]]
) -> None:
    machine(1e10)
    short, long = planned("--minutes", "1"), planned("--hours", "1")
    machine(1e12)
    fast = planned("--minutes", "1")
    assert short["model"]["n_layer"] < long["model"]["n_layer"]
    assert short["model"]["n_layer"] < fast["model"]["n_layer"]


def test_the_updates_fill_the_time(
    machine: Callable[[float], list[int]], planned: Callable[..., dict[str, Any]]
) -> None:
    timed = machine(5e9)
    found = planned("--minutes", "10")
    derived, model = found["derived"], found["model"]
    assert timed[-1] == model["n_layer"]
    seconds = found["train"]["max_iters"] * derived["step_ms"] / 1000
    assert 540 < seconds < 597
    assert derived["minutes"] == 10
    assert 0 < derived["expected_loss"] < 4
    assert "+-" in derived["reasons"]["expected_loss"]


def test_what_the_user_sets_stands(
    machine: Callable[[float], list[int]], planned: Callable[..., dict[str, Any]]
) -> None:
    machine(1e10)
    flags = "--n-embd=96", "--batch-size=7", "--block-size=24", "--dropout=0.3", "--muon-lr=0.01", "--no-final-eval"
    found = planned("--minutes", "1", *flags)
    assert found["model"] | {"n_embd": 96, "block_size": 24, "dropout": 0.3} == found["model"]
    assert found["train"]["batch_size"] == 7
    assert found["optim"]["muon_lr"] == 0.01
    assert planned("--depth", "2", "--optimizer", "adamw")["optim"]["learning_rate"] == pytest.approx(3e-3)
    assert planned("--depth", "2", "--n-embd", "100")["model"]["n_head"] in (1, 2, 5)
    assert planned("--depth", "2", "--gpus", "5")["train"]["batch_size"] % 5 == 0
    assert planned("--depth", "2", "--vocab-size", "64")["model"]["vocab_size"] == 64


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--minutes 1 --depth 2", "--minutes and --depth exclude each other"),
        ("--minutes 1 --hours 2", "--minutes and --hours exclude each other"),
        ("--minutes 0", "--minutes is 0"),
        ("--minutes nan", "--minutes is nan"),
        ("--hours -1", "--hours is -1"),
        ("--hours 1e9", r"--hours is 1e\+09"),
        ("--depth 0", "--depth is 0: a whole number from 1 to 32"),
        ("--minutes 1 --preset gpt2", "leave out --preset gpt2, or --minutes 1"),
        ("--minutes 1 --max-iters 5", "leave out --max-iters. A run that ends by the clock: --max-minutes"),
        ("--depth 2 --init-from x", "--depth 2 decides.*leave out --init-from"),
        ("--minutes 1 --config some.toml", "leave out max_iters of some.toml"),
        ("--depth 1 --save-config some.toml", "some.toml: it exists already"),
        ("--depth 1 --save-config gone/a.toml --dry-run --dataset tiny", "gone/a.toml: cannot be written"),
    ],
)
def test_refusals(
    line: str, words: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text("[train]\nmax_iters = 3\n")
    before = sorted(tmp_path.rglob("*"))
    assert run(["train", *line.split(" ")]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_time(
    machine: Callable[[float], list[int]], tiny_data: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    machine(1e6)
    line = ["train", "--dataset", "tiny", "--device", "cpu", "--peak-tflops", "1", "--minutes"]
    assert run([*line, "0.5"]) == 2
    assert "0.5 minutes are time for" in capsys.readouterr().err
    assert run([*line, "0.05"]) == 2
    assert "0.05 minutes are over before anything" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_of_the_dial_is_made_of_plain_settings(
    machine: Callable[[float], list[int]], tiny_data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Its saved settings repeat it bit for bit; --or-resume goes on with other minutes and times nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # this process is not the command's own
    timed = machine(3e7)
    common = ["--dataset", "tiny", "--device", "cpu", "--peak-tflops", "1", "--n-embd", "16", "--no-sample"]
    line = ["train", *common, "--minutes", "2", "--run", "runs/a", "--or-resume"]
    assert run([*line, "--save-config", "mine.toml"]) == 0
    heard = capsys.readouterr().err
    assert "nanogpt train --config mine.toml" in heard
    assert "2 minutes were asked for" in heard
    made = tomllib.loads(Path("runs/a/config.toml").read_text())
    assert not {"minutes", "depth"} & {name for section in made if section != "derived" for name in made[section]}
    assert made["derived"]["minutes"] == 2
    assert run(["train", "--config", "mine.toml", "--run", "runs/b"]) == 0
    assert same_weights(Path("runs/a/ckpt.pt"), Path("runs/b/ckpt.pt"))
    timed.clear()
    capsys.readouterr()
    assert run([*line[:-4], "5", *line[-3:]]) == 0
    assert timed == []
    assert "is finished" in capsys.readouterr().err
    assert run(["resume", "runs/a", "--max-iters", str(made["train"]["max_iters"] + 3)]) == 0
    goes_on = tomllib.loads(Path("runs/a/config.toml").read_text())["derived"]
    assert {key: goes_on[key] for key in KEYS if key in made["derived"]} == {
        key: made["derived"][key] for key in KEYS if key in made["derived"]
    }
    assert goes_on["minutes"] == 2
    heard = capsys.readouterr().err
    assert "asked for" not in heard
    fork = ["--run", "runs/fork", "--checkpoint", "ckpt.pt", "--max-iters", str(made["train"]["max_iters"] + 6)]
    assert run(["resume", "runs/a", *fork]) == 0
    assert not re.search("^(minutes|expected loss) ", heard + capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("derived", [None, 3, {}, {"minutes": "x", "reasons": {}}, {"minutes": 1, "reasons": 2}])
def test_what_others_write_into_derived_is_not_told(derived: Any) -> None:
    assert told_before({"derived": derived}) == {}


def test_from_python(tiny_data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    import nanogpt_cli

    monkeypatch.chdir(tmp_path)
    trained = nanogpt_cli.train(
        depth=1, dataset="tiny", n_embd=16, device="cpu", peak_tflops=1, view=nanogpt_cli.View(), block_size=16
    )
    config = tomllib.loads((trained.path / "config.toml").read_text())
    assert config["model"]["n_layer"] == 1
    assert config["train"]["max_iters"] == config["derived"].get("lr_decay_iters")
    with pytest.raises(UserError, match="exclude each other"):
        nanogpt_cli.train(depth=1, minutes=1.0)
