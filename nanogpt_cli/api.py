"""The same work from Python, for notebooks and scripts: `import nanogpt_cli` offers what stands here."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanogpt_cli.config.dial import make_dial
from nanogpt_cli.config.layers import Layer, Rank
from nanogpt_cli.config.presets import preset_layer
from nanogpt_cli.config.schema import SystemSettings, settings
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.inference.evaluate import TextTokens, default_batch_size, evaluate_split
from nanogpt_cli.inference.sample import prompt_ids, start_of_text, write_samples
from nanogpt_cli.machine.device import Compute, choose_compute
from nanogpt_cli.model.generate import Sampling
from nanogpt_cli.runs.metrics import columns, read_metrics
from nanogpt_cli.training.request import TrainRequest
from nanogpt_cli.training.resume import ResumeRequest
from nanogpt_cli.training.start import start
from nanogpt_cli.view.curves import Axis
from nanogpt_cli.view.plain import View as View
from nanogpt_cli.weights.load import LoadedModel, load_model
from nanogpt_cli.weights.resolve import find_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = str | os.PathLike[str]


@dataclass(frozen=True)
class Run:
    """A run directory; it goes wherever a path does."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def metrics(self) -> dict[str, list[float | None]]:
        """What was logged, as columns of one length, None where a line has none: `pandas.DataFrame(run.metrics())`."""
        lines = list(read_metrics(find_run(str(self.path)).metrics))
        return columns(lines, list(dict.fromkeys(key for line in lines for key in line)))


@dataclass(frozen=True)
class Model:
    """Weights with their tokenizer, ready to write and to judge text."""

    loaded: LoadedModel

    def __repr__(self) -> str:
        c = self.loaded.model.config
        return f"Model({self.loaded.source}: {c.n_layer} layers, {c.n_head} heads, width {c.n_embd})"

    @property
    def network(self) -> torch.nn.Module:
        """The bare module, in evaluation mode: ids (B, T) int64 -> logits (B, T, V)."""
        return self.loaded.model

    def generate(
        self,
        prompt: str = "",
        *,
        num_samples: int = 1,
        max_new_tokens: int = 500,
        temperature: float = 0.8,
        top_k: int | None = 200,
        top_p: float | None = None,
        seed: int = 1337,
        stop: str | tuple[str, ...] = (),
    ) -> list[str]:
        """Continuations of `prompt`, one text a sample; sample i depends on (seed, i) alone.

        Raises:
            UserError: the prompt has characters that the model does not know, or a number is out of its range.
        """
        if num_samples < 1:
            raise UserError(f"num_samples is {num_samples}: a whole number of at least 1 is needed.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UserError("stop is '': an empty text would end every sample at once.")
        tokenizer = self.loaded.tokenizer
        ids = prompt_ids(prompt, tokenizer, self.loaded.token_limit) if prompt else start_of_text(tokenizer)[0]
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, frozenset())
        return [sample.text for sample in write_samples(self.loaded, ids, num_samples, sampling, stops=stops)]

    def loss(self, text: str) -> float:
        """Mean cross-entropy in nats over all tokens of `text` but the first, in windows of block_size.

        Raises:
            UserError: fewer than two tokens, or characters that the model does not know.
        """
        ids = np.array(prompt_ids(text, self.loaded.tokenizer, self.loaded.token_limit), dtype=np.int64)
        if len(ids) < 2:
            raise UserError("loss needs a text of at least two tokens: the first one is not predicted.")
        model = self.loaded.model
        compute = Compute(model.wte.weight.device, torch.float32, compile=False, deterministic=False, reasons={})
        batch_size = default_batch_size(model)
        return evaluate_split(model, TextTokens(ids), batch_size=batch_size, compute=compute).loss


def load(model: Place, *, checkpoint: str = "best", device: str = "cpu") -> Model:
    """A run, a checkpoint file, a nanoGPT out_dir, a Hugging Face GPT-2 folder, or "gpt2" and its larger siblings.

    Raises:
        UserError: nothing of that name, damaged files, or a device that is not here.
    """
    loaded = load_model(os.fspath(model), checkpoint=checkpoint)
    system = SystemSettings(device=device, compile="off")
    loaded.model.to(choose_compute(system, loaded.model.config, long_run=False).device)
    return Model(loaded)


def train(
    preset: str | None = None,
    *,
    minutes: float | None = None,
    depth: int | None = None,
    run: Place | None = None,
    view: View | None = None,
    **given: Any,
) -> Run:
    """Train a new run in this process; `given` are settings by name, such as max_iters=100.

    In place of a preset `minutes` or `depth` choose what the settings leave open, as --minutes and --depth do.

    How far it is shows as the place allows: one display in a notebook, a panel in a terminal, else lines on standard
    error; `view=nanogpt_cli.View()` shows nothing. While it trains, the process uses deterministic algorithms (on a
    CPU, or if asked for), TF32 on CUDA and the run's number of threads; all of that is as before when it returns or
    raises.

    Raises:
        UserError: settings that do not fit, a run that exists, missing data.
        NonFiniteError, StoppedError, NanogptError: as the command's exit codes 3, 130 and 1.
    """
    layers = (*([preset_layer(preset)] if preset else []), _arguments(given))
    dial = make_dial(layers, minutes=minutes, depth=depth)
    request = TrainRequest(layers, Path(run) if run else None, dial=dial)
    return Run(start(request.plan(), view=view).run.path)


def resume(run: Place, *, view: View | None = None, **changes: Any) -> Run:
    """Continue a run to its max_iters, or to a new one: `resume("runs/x", max_iters=2000)`; shown as by `train`.

    Raises:
        UserError: nothing to continue, or a change that a run cannot take.
    """
    return Run(start(ResumeRequest(os.fspath(run), _arguments(changes)).plan(), view=view).run.path)


def metrics(run: Place) -> dict[str, list[float | None]]:
    """What `run` logged, see `Run.metrics`; UserError if there is no such run."""
    return Run(Path(run)).metrics()


def plot(*runs: Place, over: Axis = "steps") -> "Figure":
    """The curves of runs as a matplotlib figure, which a notebook shows.

    Raises:
        UserError: matplotlib is missing, there is no such run, or one without losses.
    """
    from nanogpt_cli.view.plot import figure

    return figure([find_run(os.fspath(run)) for run in runs], over)


def _arguments(given: dict[str, Any]) -> Layer:
    tables: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name not in settings():
            raise UserError(f"{name}: no such setting.{did_you_mean(name, list(settings()))}")
        if name == "gpus" and value != 1:
            raise UserError(f"gpus = {value}: from Python a run has one process, this one. Type nanogpt train --gpus.")
        tables.setdefault(settings()[name].section, {})[name] = (
            os.fspath(value) if isinstance(value, os.PathLike) else value
        )
    return Layer("argument", tables, Rank.GIVEN)
