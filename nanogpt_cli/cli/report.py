"""From a plan to a trained model: what train and resume have in common, up to the words of farewell."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nanogpt_cli.cli import show
from nanogpt_cli.cli.progress import ProgressBar
from nanogpt_cli.errors import UserError, typed

if TYPE_CHECKING:
    from nanogpt_cli.machine.rank import Machines
    from nanogpt_cli.training.plan import Plan
    from nanogpt_cli.training.roles import MakePlan
    from nanogpt_cli.training.start import Outcome
    from nanogpt_cli.weights.load import LoadedModel

EVALUATION_SECONDS = 60.0  # a longer evaluation is left to the user
EVALUATION_SHARE = 0.3  # of the peak that a forward pass is expected to reach
SAMPLE_TOKENS = 300


def carry_out(make_plan: "MakePlan", processes: Callable[[], int], machines: "Machines", *, dry_run: bool) -> None:
    """Show the plan, train, report to stderr, and write the sample to stdout; see `conduct` for the arguments."""
    from nanogpt_cli.training.roles import conduct

    def show_plan(plan: "Plan") -> None:
        if not dry_run and not plan.makes_run and plan.finished:
            return
        show.rows([row for _, rows in plan.groups() for row in rows], stderr=True)
        show.notes(plan.notes)
        for warning in plan.warnings:
            show.warn(warning)

    ended = conduct(make_plan, processes=processes, machines=machines, dry_run=dry_run, show=show_plan, say=show.say)
    if ended is not None:
        _close(*ended)


def _close(plan: "Plan", outcome: "Outcome") -> None:
    path = outcome.run.path
    name = typed(path)
    if outcome.already_finished:
        show.say(f"{path} is finished: {outcome.step:,} updates. To extend it: nanogpt resume {name} --max-iters N")
        return
    show.say(f"{path} is finished: {outcome.step:,} updates")
    if outcome.run.best.exists():
        from nanogpt_cli.weights.load import load_model

        loaded = load_model(str(path), device=plan.compute.device)
        _evaluate(plan, loaded)
        if loaded.tokenizer is not None:
            _sample(plan, loaded)
    plots = find_spec("matplotlib") is not None
    if plots:
        from nanogpt_cli.view.plot import draw

        try:
            draw([outcome.run], outcome.run.logs / "loss.svg")
        except (OSError, UserError) as error:  # the run is finished and saved all the same
            show.warn(f"no picture of the curves: {error}")
    longer = 2 * outcome.step
    decay = "" if plan.schedule.shape == "constant" else f" --lr-decay-iters {longer}"  # else the rate stays at its end
    show.say("\nwhat to type next:")
    for command in (f'sample {name} --prompt "..."', f"eval {name}", *([f"plot {name}"] if plots else [])):
        show.say(f"nanogpt {command}")
    show.say(f"nanogpt resume {name} --max-iters {longer}{decay}")


def _evaluate(plan: "Plan", loaded: "LoadedModel") -> None:
    """Loss over the whole validation split, unless that would take long."""
    from nanogpt_cli.inference.evaluate import evaluate
    from nanogpt_cli.model.sizes import flops_per_token

    seconds = plan.data_set.val.count * flops_per_token(plan.architecture) / 3  # FLOPs of the forward passes
    seconds /= EVALUATION_SHARE * plan.peak[0] if plan.peak else 1.0
    if seconds > EVALUATION_SECONDS:
        show.say(f"the best weights are those of step {loaded.step:,}; nanogpt eval reads the whole validation split")
        return
    with ProgressBar() as progress:
        found = evaluate(loaded, plan.data_set, "val", compute=plan.compute, progress=progress)
    show.say(
        f"best weights, of step {loaded.step:,}, over all {found['tokens']:,} validation tokens:\n"
        f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.2f}, "
        f"bits per byte {show.number(found['bits_per_byte'], '.4f')}"
    )


def _sample(plan: "Plan", loaded: "LoadedModel") -> None:
    from nanogpt_cli.inference.sample import start_of_text, write_samples
    from nanogpt_cli.model.generate import Sampling

    prompt, _ = start_of_text(loaded.tokenizer)
    show.say("a sample of it:\n")
    write_samples(loaded, prompt, 1, Sampling(SAMPLE_TOKENS, seed=plan.config.train.seed), on_text=show.stream)
    show.stream("\n")
