"""Names that a shell completes: presets, runs, data sets."""

from pathlib import Path


def presets() -> list[str]:
    """For `--preset`."""
    from nanogpt_cli.config.presets import preset_names

    return preset_names()


def preset_words() -> list[str]:
    """For `nanogpt presets`."""
    return ["show", *presets()]


def runs() -> list[str]:
    """For a RUN; a path is completed by the shell itself where no name fits."""
    from nanogpt_cli.runs.directory import list_runs

    return [str(run.path) for run in list_runs()]


def data_sets() -> list[str]:
    """What is prepared here."""
    return sorted(folder.name for folder in Path("data").glob("*") if folder.is_dir())


def presets_and_runs() -> list[str]:
    """For `nanogpt mfu`."""
    return [*presets(), *runs()]
