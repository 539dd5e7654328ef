"""From a plan to a trained model: what train and resume have in common, up to the words of farewell."""

import math
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import unwritable_named, warn_of_slow_numbers
from nanogpt_cli.cli.progress import ProgressBar
from nanogpt_cli.config.setting import ON_OFF
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.files import write_toml

if TYPE_CHECKING:
    from nanogpt_cli.config.dial import Dial
    from nanogpt_cli.machine.rank_env import Nodes
    from nanogpt_cli.training.plan import Plan
    from nanogpt_cli.training.request import Request
    from nanogpt_cli.training.start import Outcome
    from nanogpt_cli.weights.load import LoadedModel

Row = tuple[str, str, str]  # label, value, where it comes from
EVALUATION_SHARE = 0.3  # of the peak that a forward pass is expected to reach
USUAL_MFU = 0.25  # of a run on a machine that has not seen one
SAMPLE_TOKENS = 300
MUCH = 0.05  # that a step may differ from what it was expected to take


def train_and_report(
    request: "Request",
    machines: "Nodes",
    *,
    dry_run: bool,
    as_json: bool,
    save_config: Path | None = None,
) -> None:
    """Show the plan, train, report to stderr, and write the sample to stdout, or with `as_json` one document.

    The plan of a dry run is its result; `save_config` is a file for the plan's settings. See `Command` for the others.
    """
    from nanogpt_cli.training.request import TrainRequest
    from nanogpt_cli.training.run import Command

    def show_plan(plan: "Plan") -> None:
        if not dry_run and not plan.makes_run and plan.finished:
            return
        rows = plan_rows(plan)
        if dry_run and as_json:
            told = [{"what": what, "value": value, "why": why} for what, value, why in rows]
            tables = plan.config_toml()
            show.document({"run": str(plan.run_path), "plan": told, "warnings": plan.warnings, "settings": tables})
        else:
            show.rows(rows, stderr=not dry_run)
        show.notes(plan.notes)
        warn_of_slow_numbers(plan.compute)
        for warning in plan.warnings:
            show.warn(warning)
        if save_config is not None:
            with unwritable_named(save_config, "Choose another file: --save-config FILE."):
                write_toml(save_config, plan.config_toml())
            show.say(f"the settings stand in {save_config}: nanogpt train --config {typed(save_config)}")

    ended = Command(request, machines, dry_run, ProgressBar(), show_plan, show.say).run()
    if ended is not None:
        plan, outcome = ended
        found = _close(plan, outcome, (lambda _: None) if as_json else show.stream)
        if as_json:
            told = {"run": str(outcome.run.path), "step": outcome.step, "max_iters": plan.config.train.max_iters}
            told |= {"ended_by": outcome.ended_by or None, "best_val_loss": outcome.best_loss}
            show.document(told | {"evaluation": None, "sample": None} | found)
        if isinstance(request, TrainRequest) and request.dial and request.dial.minutes and plan.makes_run:
            _tell_time(request.dial, plan, outcome)


def _tell_time(dial: "Dial", plan: "Plan", outcome: "Outcome") -> None:
    """How far off --minutes was, and why where that is much."""
    from nanogpt_cli.runs.metrics import read_metrics
    from nanogpt_cli.view.plain import duration

    told = plan.derived.values
    took = time.perf_counter() - dial.began - told.get("fetch_s", 0.0)
    show.say(f"{told['minutes']:g} minutes were asked for, {duration(took)} it took.")
    trained = [line["time_s"] for line in read_metrics(outcome.run.metrics) if "time_s" in line]
    step_ms = 1000 * trained[-1] / outcome.step if trained else told["step_ms"]
    if abs(step_ms / told["step_ms"] - 1) > MUCH:
        show.say(f"A step was timed at {told['step_ms']:,.1f} ms and took {step_ms:,.1f}.")


def plan_rows(plan: "Plan") -> list[Row]:
    """The plan for people: what, how much, and why or by which formula."""
    rows = [
        *(_dial_rows(plan) if plan.makes_run and plan.resume_point is None else []),
        *_model_rows(plan),
        *_training_rows(plan),
        *_machine_rows(plan),
    ]
    return [*rows, ("writes to", str(plan.run_path), "")]


def _dial_rows(plan: "Plan") -> list[Row]:
    """What --minutes and --depth chose by, where they did."""
    forms = {"minutes": "{:g}", "step_ms": "{:,.1f} ms", "depth": "{}", "expected_loss": "about {:.2f}"}
    told, why = plan.derived.values, plan.derived.reasons
    return [
        (key.removesuffix("_ms").replace("_", " "), form.format(told[key]), why[key])
        for key, form in forms.items()
        if key in told
    ]


def _model_rows(plan: "Plan") -> list[Row]:
    from nanogpt_cli.model.sizes import parameter_table
    from nanogpt_cli.weights.hugging_face import leaves_as

    m, d = plan.config.model, plan.data_set
    vocabulary = f"vocabulary {m.vocab_size:,}: {plan.derived.reasons.get('vocab_size', 'as set')}"
    shape = f"{m.n_layer} layers, {m.n_head} heads, width {m.n_embd}, context {m.block_size}"
    kind, obstacles = leaves_as(m)
    who, why = ("nanogpt alone", ", ".join(obstacles)) if obstacles else (kind, "what export writes for other programs")
    if kind and d.tokenizer is not None and d.tokenizer.kind in ("char", "bytes"):
        why += "; no GGUF, which needs a byte pair encoding"
    rows = [
        ("model", shape, ""),
        ("exports as", who, why),
        ("parameters", f"{sum(parameter_table(m).values()):,}", vocabulary),
    ]
    if plan.weights_from is not None:
        rows.append(("weights", plan.weights_from, f"init_from {plan.config.train.init_from}"))
    elif plan.resume_point is None:
        guessing = math.log(m.vocab_size or 1)
        rows.append(("first loss", f"about {guessing:.2f}", "ln(vocabulary): what guessing costs"))
    size = f"{d.name}, {d.train.count:,} train and {d.val.count:,} val tokens"
    return [*rows, ("data set", size, str(d.folder))]


def _training_rows(plan: "Plan") -> list[Row]:
    c, s = plan.config, plan.schedule
    left = c.train.max_iters - plan.first_step
    steps_an_epoch = plan.order.windows / plan.split.rows
    rates = f"{s.learning_rate:g} {s.shape}"
    if s.shape != "constant":
        rates += f" to {s.min_lr:g} at step {s.lr_decay_iters:,}"
    return [
        ("updates", f"{left:,}", f"step {plan.first_step:,} to {c.train.max_iters:,}"),
        ("tokens a step", f"{plan.tokens_per_step:,}", f"{plan.split.sum} x {c.model.block_size} tokens"),
        ("epochs", f"{plan.order.epoch(left * plan.split.rows):.2f}", f"{steps_an_epoch:,.1f} steps an epoch"),
        ("optimizer", c.optim.optimizer, f"weight decay {c.optim.weight_decay:g}, clip {c.optim.grad_clip:g}"),
        ("learning rate", rates, f"{s.warmup_iters:,} steps of warm-up"),
    ]


def _machine_rows(plan: "Plan") -> list[Row]:
    from nanogpt_cli.model.sizes import flops_per_token
    from nanogpt_cli.view.plain import duration, peak

    c, compute = plan.config, plan.compute
    per_token = flops_per_token(c.model)
    total = per_token * plan.tokens_per_step * (c.train.max_iters - plan.first_step)
    rows = [
        ("device", compute.describe(), compute.reasons["device"]),
        ("dtype", compute.dtype_name, compute.reasons["dtype"]),
        ("compile", ON_OFF[compute.compile], compute.reasons["compile"]),
        *_process_rows(plan),
        ("work", f"{total:.3g} FLOP", f"{per_token / 1e6:,.1f} MFLOP a token, 6N + 12LHQT"),
        ("memory", f"about {sum(plan.memory.values()) / 2**30:.2f} GiB", "estimate: weights, moments, activations"),
    ]
    if plan.peak is not None:
        flops, source = plan.peak
        share, why = (plan.expected_mfu, "as the last run here") if plan.expected_mfu else (USUAL_MFU, "assumed")
        seconds = total / (share * flops * plan.split.world_size)
        rows.append(("time", f"about {duration(seconds)}", f"at {share:.0%} ({why}) of {peak(flops / 1e12)}, {source}"))
    return rows


def _process_rows(plan: "Plan") -> list[Row]:
    ranks, here = plan.split.world_size, plan.config.system.gpus
    if ranks == 1:
        return []
    where = "on this machine" if ranks == here else f"({here} on each of {ranks // here} machines)"
    how = "FSDP: each keeps a share of the model" if plan.sharded else "DDP: each keeps the whole model"
    return [("processes", f"{ranks} {where}", f"{how}; {plan.backend}")]


def _close(plan: "Plan", outcome: "Outcome", on_text: Callable[[str], None]) -> dict[str, Any]:
    """Say how it ended, and what to type next; returns the last evaluation and sample, where there are any."""
    path = outcome.run.path
    name = typed(path)
    last, patience = plan.config.train.max_iters, plan.config.train.patience
    end = f"{path} is finished: {outcome.step:,} updates"
    if outcome.step < last and outcome.ended_by in ("", "--patience"):
        end += f" of {last:,}; {patience} evaluations brought nothing better"
        more = f"nanogpt resume {name} --patience {2 * patience}"
    else:
        more = f"nanogpt resume {name} --max-iters {'N' if outcome.already_finished else 2 * outcome.step}"
    if outcome.already_finished:
        show.say(f"{end}. To extend it: {more}")
        return {}
    if outcome.ended_by not in ("", "--patience"):
        show.say(f"stopped by {outcome.ended_by} after step {outcome.step:,}, which is saved.")
        show.say(f"To go on: nanogpt resume {name}")
        return {}
    show.say(end)
    found: dict[str, Any] = {}
    if outcome.run.best.exists():
        from nanogpt_cli.weights.load import load_model

        loaded = load_model(str(path), device=plan.compute.device)
        if plan.config.log.final_eval:
            found["evaluation"] = _evaluate(plan, loaded)
        if loaded.tokenizer is not None and plan.config.log.sample:
            found["sample"] = _sample(plan, loaded, on_text)
    if find_spec("matplotlib") is not None:
        from nanogpt_cli.view.plot import draw

        try:
            draw([outcome.run], outcome.run.logs / "loss.svg")
        except (OSError, UserError) as error:  # the run is finished and saved all the same
            show.warn(f"no picture of the curves: {error}")
    if plan.schedule.shape != "constant" and outcome.step >= last:  # else the rate stays at its end
        more += f" --lr-decay-iters {2 * outcome.step}"
    show.say("\nwhat to type next:")
    show.say(f'nanogpt sample {name} --prompt "..."\nnanogpt eval {name}\nnanogpt plot {name}\n{more}')
    return found


def _evaluate(plan: "Plan", loaded: "LoadedModel") -> dict[str, Any] | None:
    """Loss over the whole validation split, unless that would take long."""
    from nanogpt_cli.inference.evaluate import UNASKED_SECONDS, evaluate
    from nanogpt_cli.model.sizes import flops_per_token

    seconds = plan.data_set.val.count * flops_per_token(plan.config.model) / 3  # FLOPs of the forward passes
    seconds /= EVALUATION_SHARE * plan.peak[0] if plan.peak else 1.0
    if seconds > UNASKED_SECONDS:
        show.say(f"the best weights are those of step {loaded.step:,}; nanogpt eval reads the whole validation split")
        return None
    with ProgressBar() as progress:
        found = evaluate(loaded, plan.data_set, "val", compute=plan.compute, progress=progress)
    show.say(
        f"best weights, of step {loaded.step:,}, over all {found['tokens']:,} validation tokens:\n"
        f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}, "
        f"bits per byte {show.number(found['bits_per_byte'], '.4f')}"
    )
    return found


def _sample(plan: "Plan", loaded: "LoadedModel", on_text: Callable[[str], None]) -> str:
    from nanogpt_cli.inference.sample import start_of_text, write_samples
    from nanogpt_cli.model.generate import Sampling

    prompt, _ = start_of_text(loaded.tokenizer)
    show.say("a sample of it:\n")
    sampling = Sampling(SAMPLE_TOKENS, seed=plan.config.train.seed)
    (sample,) = write_samples(loaded, prompt, 1, sampling, on_text=on_text)
    on_text("\n")
    return sample.text
