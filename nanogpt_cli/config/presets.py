"""Presets: complete TOML files that come with the program."""

from pathlib import Path

from nanogpt_cli.config.layers import Layer, Rank
from nanogpt_cli.errors import UserError, did_you_mean
from nanogpt_cli.foreign import read_toml


def presets_folder() -> Path:
    """Inside the package when installed; the repository's top-level folder in an editable install."""
    package = Path(__file__).parents[1]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in presets_folder().glob("*.toml"))


def preset_path(name: str) -> Path:
    """The file of a preset, `-` and `_` being alike; UserError names the nearest."""
    known = preset_names()
    stem = name.replace("-", "_")
    if stem not in known:
        raise UserError(f"--preset {name}: no such preset.{did_you_mean(stem, known)} There are: {', '.join(known)}.")
    return presets_folder() / f"{stem}.toml"


def preset_layer(name: str) -> Layer:
    path = preset_path(name)
    return Layer(f"preset {path.stem}", read_toml(path), Rank.PRESET, path.stem)


def preset_summary(name: str) -> str:
    """The first comment line of a preset's file: what it is for."""
    first = preset_path(name).read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()
