"""What stands at the end of a training: the result, a sample from the best weights, and what to type next."""

import sys
from typing import TYPE_CHECKING

from nanogpt_cli.cli import show

if TYPE_CHECKING:
    from nanogpt_cli.training.start import Outcome


def close(outcome: "Outcome") -> None:
    """Report to stderr, the sample to stdout."""
    if not show.main_process():
        return
    path = outcome.run.path
    if outcome.already_finished:
        show.say(f"{path} is finished: {outcome.step:,} updates. To extend it: nanogpt resume {path} --max-iters N")
        return
    best = f", best validation loss {outcome.best_loss:.4f}" if outcome.best_loss is not None else ""
    show.say(f"done: {outcome.step:,} updates{best}; everything is in {path}")
    if outcome.run.tokenizer.exists():
        from nanogpt_cli.cli.sample import closing_sample

        show.say("a sample from the best weights:\n")
        closing_sample(outcome.run)
        sys.stdout.flush()
    show.say("\nwhat to type next:")
    rows = [
        (f'nanogpt sample {path} --prompt "..."', "text"),
        (f"nanogpt eval {path}", "loss over the whole validation split"),
        (f"nanogpt plot {path}", "the curves"),
        (f"nanogpt resume {path} --max-iters {2 * outcome.step}", "go on"),
    ]
    width = max(len(command) for command, _ in rows)
    for command, what in rows:
        show.say(f"  {command:<{width}}  {what}")
