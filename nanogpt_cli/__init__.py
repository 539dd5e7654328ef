"""Train, fine-tune, evaluate and sample small GPTs: nanoGPT's job as an installable program.

From Python: `train` and `resume`, which return a `Run`, `load`, which returns a `Model`, `metrics`, `plot`, and the
`View` that shows nothing (see `nanogpt_cli.api`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanogpt_cli.api import Model, Run, View, load, metrics, plot, resume, train

__version__ = "0.1.0"
__all__ = ["Model", "Run", "View", "__version__", "load", "metrics", "plot", "resume", "train"]


def __getattr__(name: str) -> Any:
    """Import torch when something is asked for that needs it: `--help` must not wait for it."""
    if name in __all__:
        from nanogpt_cli import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
