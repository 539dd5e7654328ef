"""A nanoGPT config is shown as TOML and never executed."""

import tomllib
from pathlib import Path

import pytest

from nanogpt_cli.config.layers import Layer, combine, config_layer
from nanogpt_cli.errors import UserError

# in the form of nanoGPT's own files, with everything that can stand in one
OLD = '''
"""a docstring"""
import time
out_dir = 'out-x'
eval_interval = 5 # often
always_save_checkpoint = False
wandb_log = True
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
init_from = 'gpt2-xl'
batch_size = 1
gradient_accumulation_steps = 5 * 8
max_iters = 2**4
learning_rate = 3e-5
decay_lr = False
weight_decay = -1e-1
compile = False
print("hello")
open("executed", "w").close()
'''


def shown_toml(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        config_layer(file)
    message = str(caught.value)
    assert "never executed" in message
    assert f"--config {file.stem}.toml" in message
    return message.split("saved as", 1)[1].split(":\n\n", 1)[1].split("Then type:")[0]


def test_assignments_become_toml_and_the_rest_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "old.py"
    file.write_text(OLD)
    toml = shown_toml(file)
    assert not (tmp_path / "executed").exists()
    config = combine(Layer("old.toml", tomllib.loads(toml))).config
    assert config.train.gradient_accumulation_steps == 40
    assert config.train.init_from == "gpt2-xl"
    assert config.optim.learning_rate == 3e-5
    assert config.optim.schedule == "constant"
    assert config.system.compile == "off"
    assert config.log.wandb
    assert config.model.activation == "gelu"
    assert "# out_dir: A run's folder is --run DIR for train" in toml
    assert "# weight_decay: -0.1 does not fit: a number of at least 0 is needed" in toml
    assert "# line 3: no simple assignment, left out" in toml  # import
    assert toml.count("no simple assignment") == 3  # import, the run name, 2**4


@pytest.mark.parametrize("text", ["x = (", "\0", "x = " + "(" * 5000, "a = 1/0\n", "seed = 10**10**10\n"])
def test_odd_python_is_a_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(text)
    with pytest.raises(UserError):
        config_layer(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        config_layer(tmp_path / "none.py")
