"""What was asked for, by the command or from Python, and the way from there to a plan: one way for both."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanogpt_cli.config.derived import data_folder
from nanogpt_cli.config.dial import Dial, Told
from nanogpt_cli.config.family import Text
from nanogpt_cli.config.layers import Layer, Layered, Rank, combine
from nanogpt_cli.config.schema import settings
from nanogpt_cli.data import catalogue
from nanogpt_cli.data.text.prepare import ensure_prepared
from nanogpt_cli.data.tokens.data_set import open_data_set
from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.machine.device import choose_compute
from nanogpt_cli.machine.rank_env import RankEnv
from nanogpt_cli.progress import QUIET, Progress
from nanogpt_cli.runs.directory import RUNS, RunDirectory, new_run_path, refuse_existing
from nanogpt_cli.training.choice import choose
from nanogpt_cli.training.init_from import yields
from nanogpt_cli.training.plan import ALONE, Plan, over_ranks, plan_run
from nanogpt_cli.training.resume import ResumeRequest
from nanogpt_cli.weights.resolve import find_model


@dataclass(frozen=True)
class TrainRequest:
    """A new run.

    Args:
        layers: of settings, the lowest first.
        run: where it is kept; by default a free name in runs/.
        or_resume: continue what is there, if it is the run that the settings describe.
        dial: chooses what the layers leave open, when the run is new.
    """

    layers: tuple[Layer, ...]
    run: Path | None = None
    or_resume: bool = False
    dial: Dial | None = None

    def processes(self) -> int:
        """How many to launch on each machine."""
        return combine(*self.layers).config.system.gpus

    def plan(self, progress: Progress = QUIET, env: RankEnv = ALONE) -> Plan:
        """Check the settings, prepare the data set where that can be done, name the run, and work it out."""
        layered, fetch_s = combine(*self.layers), 0.0
        if self.run is not None and not self.or_resume:
            refuse_existing(self.run)
        if not self.or_resume:  # a run that goes on does not need what it was started from
            # nobody wants to prepare a data set for a run that cannot be
            config = over_ranks(layered.config, env)[0] if self.dial is None else layered.config
            choose_compute(config.system, config.model, local_rank=env.device_index)
            if config.train.init_from is not None:
                find_model(config.train.init_from)
        if layered.config.data.data_dir is None:
            before = time.perf_counter()
            name = ensure_prepared(layered.config.data.dataset, progress=progress)
            if catalogue.find(name):
                fetch_s = round(time.perf_counter() - before, 1)
            layered = replace(layered, config=layered.config.replace("data", dataset=name))
        path = self.run or RUNS / run_name(self.layers, layered)
        if self.or_resume and RunDirectory(path).config.exists():
            return ResumeRequest(str(path), _changes(path, layered)).plan(progress, env)
        if self.run is None and not self.or_resume:
            path = new_run_path(path.parent, path.name)
        told: Told = {}
        if self.dial is not None:
            dial = replace(self.dial, began=self.dial.began + fetch_s)  # a download does not count
            layered, told = self._chosen(dial, layered, env, progress)
            if fetch_s:
                told["fetch_s"] = fetch_s, "to have the data set, not counted"
        return plan_run(layered, path, env=env, told=told, progress=progress)

    def _chosen(self, dial: Dial, layered: Layered, env: RankEnv, progress: Progress) -> tuple[Layered, Told]:
        """The settings with what the dial chooses beneath them."""
        data = layered.config.data
        found = open_data_set(
            data_folder(layered.config), token_dtype=data.token_dtype, tokenizer=data.tokenizer, progress=progress
        )
        text = Text(found.train.count, found.val.count, found.vocab_size)
        layer, told = choose(dial, self.layers, text, env, progress)
        whole = combine(layer, *self.layers)
        return replace(whole, config=replace(whole.config, data=data)), told


Request = TrainRequest | ResumeRequest


def run_name(layers: tuple[Layer, ...], layered: Layered) -> str:
    """The config file's name, else the preset's (with the data set where it is another), else the data set's."""
    data = layered.config.data
    top = next((layer for layer in reversed(layers) if layer.name), None)
    if top is None or top.name is None:
        return Path(data.data_dir or data.dataset).name
    same_data = top.rank != Rank.PRESET or data.dataset == top.tables["data"]["dataset"]
    return top.name if same_data else f"{top.name}-{data.dataset}"


def _changes(path: Path, layered: Layered) -> Layer:
    """`--or-resume` on a run: what the request gives and the run has otherwise; UserError if it is another run."""
    started = combine(Layer(str(path / "config.toml"), read_toml(path / "config.toml"))).config
    # a batch size that was not typed may have been chosen for a GPU's memory
    trains = layered.config.train, started.train
    rows, had = ((t.batch_size * t.gradient_accumulation_steps, t.batch_size * t.eval_iters) for t in trains)
    same_rows = layered.rank("batch_size") < Rank.FILE and rows == had
    changes: dict[str, dict[str, Any]] = {}
    for name in layered.origins:
        section = settings()[name].section
        value, has = (getattr(getattr(config, section), name) for config in (layered.config, started))
        is_ours = same_rows and name in ("batch_size", "gradient_accumulation_steps", "eval_iters")
        is_theirs = started.train.init_from is not None and yields(layered, name)
        if name != "data_dir" and value != has and not is_ours and not is_theirs:
            changes.setdefault(section, {})[name] = value
    others = [name for table in changes.values() for name in table if settings()[name].resume == "fixed"]
    if others:
        raise UserError(
            f"{path} holds another run: {', '.join(others)} differ from its config.toml. "
            "Choose another --run, or give the settings it was started with."
        )
    return Layer("flag", changes, Rank.GIVEN)
