"""`nanogpt sample MODEL -i`: prompt after prompt for one loaded model; a line that begins with / is a setting."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from nanogpt_cli.cli import show
from nanogpt_cli.errors import UserError

WORDS = "Type a text to continue. /temperature 0.5 and the like set, / shows all; Ctrl-C ends a text, Ctrl-D ends this."
LONGEST_HISTORY = 1000  # lines

Settings = dict[str, str]  # by the names of their flags, as typed


def read_prompts(
    settings: Settings, check: Callable[[Settings], object], write: Callable[[str, Settings], None]
) -> None:
    """Let `write` continue each line of stdin until it ends; a mistake is said, and ends nothing.

    Args:
        settings: what a line /NAME VALUE changes.
        check: raises UserError for settings that cannot be.
    """
    show.say(WORDS)
    with _history():
        for line in _lines():
            try:
                if line.startswith("/"):
                    changed = settings | _typed(line[1:], settings)
                    check(changed)
                    settings = changed
                else:
                    write(line, settings)
                    settings = settings | {"seed": str(int(settings["seed"]) + 1)}  # the same line, another text
            except UserError as error:
                show.say(str(error))
            except KeyboardInterrupt:
                show.stream("\n")


def _typed(words: str, settings: Settings) -> Settings:
    """The setting that a line changes; without a value, what there is is said."""
    name, _, value = words.strip().partition(" ")
    name = name.replace("_", "-")
    if name and name not in settings:
        raise UserError(f"/{name}: no such setting. There are: /{', /'.join(settings)}.")
    if value:
        return {name: value.strip()}
    show.say("\n".join(f"/{known} {settings[known]}" for known in settings if name in ("", known)))
    return {}


def _lines() -> Iterator[str]:
    """Lines of stdin, with editing on a terminal; an interrupt clears the line."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            show.say("\nCtrl-D ends this.")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """What was typed before, with the arrow keys; without readline or a writable cache, only this time's lines."""
    try:
        import readline
    except ImportError:
        yield
        return
    from nanogpt_cli.files import user_cache

    with contextlib.suppress(OSError):
        readline.read_history_file(user_cache() / "prompts")
    try:
        yield
    finally:
        readline.set_history_length(LONGEST_HISTORY)
        with contextlib.suppress(OSError):
            readline.write_history_file(user_cache() / "prompts")
