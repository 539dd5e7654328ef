"""`nanogpt mfu`: how fast a recipe or a run trains on this machine, and how large it is."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json, complete_presets, complete_runs, flag, unwritable_named, with_settings
from nanogpt_cli.config.layers import Layer, combine, flag_layer
from nanogpt_cli.config.presets import preset_layer, preset_names
from nanogpt_cli.config.schema import Config
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.foreign import read_toml

if TYPE_CHECKING:
    from nanogpt_cli.data.tokens.data_set import DataSet
    from nanogpt_cli.machine.device import Compute
    from nanogpt_cli.training.bench import Measurement

SETTINGS = ("batch_size", "block_size", "optimizer", "device", "dtype", "compile", "deterministic", "peak_tflops")
FULL_TABLE = 50304  # GPT-2's vocabulary, padded: what a data set of the catalogue has if it is not read by characters
CHARACTERS = 65  # of Shakespeare

Peak = tuple[float, str] | None  # FLOP/s of one device, and how that is known


@with_settings(only=SETTINGS)
def mfu(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PRESET | RUN",
            help="What to measure.",
            autocompletion=lambda: [*complete_presets(), *complete_runs()],
        ),
    ],
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure batch sizes 1, 2, 4... until memory ends.")] = False,
    profile: Annotated[Path | None, flag("DIR", "Write a trace of a few updates to DIR/trace.json.")] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Measure the speed of training, as a share of what the device can do.

    A name is a preset first, then a run in runs/. FLOPs are counted by PaLM's formula, 6N + 12LHQT a token. Nothing is
    read but the data set, if it is there, and nothing is written.
    """
    title, given = _find(what, flag_layer(flags))
    config, data_set = _with_vocabulary(given)
    from nanogpt_cli.machine.memory import explain_out_of_memory
    from nanogpt_cli.training import bench
    from nanogpt_cli.training.plan import compute_for, find_peak

    compute = compute_for(config)
    compute.prepare()
    peak = find_peak(config, compute)
    known = peak and peak[0]
    show.say(f"{title} on {compute.describe()}, {compute.dtype_name}, compile {'on' if compute.compile else 'off'}")
    batch_size = config.train.batch_size
    if flags["batch_size"] is None and compute.device.type != "cuda":  # what this machine may hold of the recipe's
        fitting = bench.largest_batch(config, compute)
        if fitting < batch_size:
            show.say(f"batch size {fitting} instead of {batch_size}: more may not fit into memory")
            batch_size = fitting
    if sweep:
        found = list(bench.sweep(config, compute, peak=known))
    else:
        with explain_out_of_memory(f"A smaller batch needs less: --batch-size {max(1, batch_size // 2)}, or --sweep"):
            found = [
                bench.measure(
                    config, compute, batch_size=batch_size, peak=known, seconds=bench.SECONDS, data_set=data_set
                )
            ]
    if profile is not None:
        with unwritable_named(profile, "Choose another folder: --profile DIR."):
            path = bench.profile(config, compute, batch_size=batch_size, folder=profile)
        show.say(f"trace: {path} (open it in ui.perfetto.dev)")
    sizing = _sizing(config, compute, found[-1].batch_size)
    if json:
        about: dict[str, Any] = {"subject": title, "device": compute.describe(), "dtype": compute.dtype_name}
        about |= {"compile": compute.compile, "deterministic": compute.deterministic}
        about |= {"peak_tflops": peak and peak[0] / 1e12, "peak_source": peak and peak[1]}
        show.document(about | {"measured": [{**asdict(one), "mfu": one.mfu} for one in found], "sizing": sizing})
        return
    if len(found) > 1:
        columns = ["batch size", "ms a micro-step", "ms an update", "tokens/s", "TFLOP/s", "MFU", "memory GiB"]
        show.table(columns, map(_row, found), left=0)
    else:
        show.groups([("speed", _speed(found[0], peak))], stderr=False)
    show.groups(_sizing_groups(sizing), stderr=False)


def _find(what: str, changes: Layer) -> tuple[str, Config]:
    """A preset by name, else a run by path or name, in words, and its settings; UserError names the nearest of both."""
    from nanogpt_cli.runs.directory import RUNS, RunDirectory, list_runs
    from nanogpt_cli.weights.resolve import find_run, look_up

    presets = preset_names()
    if what.replace("-", "_") in presets and not RunDirectory(Path(what)).config.exists():
        layer = preset_layer(what)
        return layer.origin, combine(layer, changes).config
    if look_up(what) is None and not Path(what).exists():
        runs = [run.name for run in list_runs()]
        near = did_you_mean(what, [*presets, *runs])
        there = f"presets: {', '.join(presets)}; runs in {RUNS}/: {', '.join(runs) or 'none'}"
        raise UserError(f"{what}: neither a preset nor a run.{near} There are {there}.")
    run = find_run(what)
    config = combine(Layer(str(run.config), read_toml(run.config)), changes).config
    if run.checkpoint.exists():
        from nanogpt_cli.runs.checkpoint import load_checkpoint

        architecture = load_checkpoint(run.checkpoint)["config"]["model"]
        config = config.replace("model", **{**architecture, "block_size": config.model.block_size})
    return f"run {run.path}", config


def _with_vocabulary(config: Config) -> "tuple[Config, DataSet | None]":
    """The settings with the size of the vocabulary, and the data set if it is here."""
    from nanogpt_cli.cli.progress import ProgressBar
    from nanogpt_cli.config.derived import data_folder
    from nanogpt_cli.data import catalogue
    from nanogpt_cli.data.tokens.data_set import open_data_set

    folder, data, data_set = data_folder(config), config.data, None
    if folder.is_dir():
        with ProgressBar() as progress:
            data_set = open_data_set(folder, token_dtype=data.token_dtype, tokenizer=data.tokenizer, progress=progress)
    if config.model.vocab_size is None:
        if data_set is not None:
            rows = data_set.vocab_size
        else:
            entry = catalogue.find(data.dataset)
            rows = CHARACTERS if entry is not None and entry.tokenizer == "char" else FULL_TABLE
            show.say(f"{data.dataset} is not prepared here: taking a vocabulary of {rows:,}")
        config = config.replace("model", vocab_size=rows)
    return config, data_set


def _row(one: "Measurement") -> list[str]:
    numbers = [f"{one.batch_size}", f"{one.micro_ms:,.1f}", f"{one.step_ms:,.1f}", f"{one.tokens_per_s:,.0f}"]
    return [*numbers, f"{one.flops_per_s / 1e12:.3g}", show.number(one.mfu, ".1%"), show.number(one.memory_gib, ".2f")]


def _speed(one: "Measurement", peak: Peak) -> list[tuple[str, str, str]]:
    from nanogpt_cli.view.plain import peak as in_words

    of_peak = f"of {in_words(peak[0] / 1e12)}, {peak[1]}" if peak else "no peak known; --peak-tflops sets it"
    parts = f"{one.micro_steps} x {one.micro_ms:,.1f} ms (spread {one.spread:.0%}) + optimizer"
    rows = [
        ("update", f"{one.step_ms:,.1f} ms", parts),
        ("tokens/s", f"{one.tokens_per_s:,.0f}", f"{one.tokens_per_step:,} tokens an update"),
        ("speed", in_words(one.flops_per_s / 1e12), "6N + 12LHQT FLOPs a token"),
        ("MFU", show.number(one.mfu, ".1%"), of_peak),
        ("memory", show.number(one.memory_gib, ".2f", " GiB"), "peak of this process"),
    ]
    for name, value in one.stages_ms.items():
        share = "the data set is not here" if value is None else f"{value / one.step_ms:.0%} of an update"
        ahead = ", read ahead" if name == "data" and value is not None else ""
        rows.append((name, show.number(value, ",.1f", " ms"), share + ahead))
    return rows


def _sizing(config: Config, compute: "Compute", batch_size: int) -> dict[str, Any]:
    """Parameters, FLOPs a token, and bytes of a checkpoint and of memory, by part."""
    from nanogpt_cli.config.derived import Split
    from nanogpt_cli.model.sizes import checkpoint_bytes, flops_per_token, parameter_table
    from nanogpt_cli.training.plan import memory_needed

    a = config.model
    return {
        "parameters": parameter_table(a),
        "flops_per_token": {"palm": flops_per_token(a), "causal": flops_per_token(a, causal=True)},
        "checkpoint_bytes": checkpoint_bytes(a, config.optim.optimizer),
        "memory_bytes": memory_needed(config, compute, Split(batch_size, 1, 1)),
        "batch_size": batch_size,
    }


def _sizing_groups(sizing: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    def rows(key: str, unit: float, form: str, suffix: str) -> list[tuple[str, str, str]]:
        total = sum(sizing[key].values())
        parts = [(k, f"{v / unit:{form}}{suffix}", f"{v / total:.1%}") for k, v in sizing[key].items()]
        return [*parts, ("in all", f"{total / unit:{form}}{suffix}", "")]

    palm, causal = (f"{sizing['flops_per_token'][kind] / 1e6:,.1f} M" for kind in ("palm", "causal"))
    counted = ("PaLM", palm, "6N + 12LHQT, what MFU counts")
    memory = f"memory at batch size {sizing['batch_size']}, estimated"
    return [
        ("parameters", rows("parameters", 1, ",.0f", "")),
        ("FLOPs a token", [counted, ("causal", causal, "6N + 6LHQT, only what a causal mask leaves")]),
        ("checkpoint", rows("checkpoint_bytes", 2**20, ",.1f", " MiB")),
        (memory, rows("memory_bytes", 2**20, ",.1f", " MiB")),
    ]
