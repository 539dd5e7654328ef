"""What a word on the command line names: a run, a file, a folder of another program, or published weights.

Every command that takes a MODEL or a RUN asks here, and torch is not imported for the answer.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanogpt_cli.errors import UserError, did_you_mean, typed
from nanogpt_cli.runs.directory import RUNS, RunDirectory, list_runs, plain_name, run_named
from nanogpt_cli.weights.pretrained import CONFIG, GPT2_MODELS, WEIGHTS

OURS = (".pt", ".toml", ".safetensors", ".gguf", ".bin", ".txt")  # endings of files, of no repository


@dataclass(frozen=True)
class Source:
    """What a word was found to name."""

    kind: Literal["run", "file", "checkpoint folder", "Hugging Face folder", "published", "hub"]
    path: Path  # of what is elsewhere: nothing
    published: str = ""  # the key in GPT2_MODELS, or the repository on the hub
    note: str = ""  # what else has this name, and how to get it


def look_up(word: str) -> Source | None:
    """A path, else a name in runs/ (`-` and `_` alike), else a published model; None if it can be none of them.

    Published weights can be named so that no run hides them: openai-community/gpt2.
    """
    path, published, note = Path(word), _published(word), ""
    if published:
        note = f"{word} is also the name of published weights; for those type {GPT2_MODELS[published].name}"
    if os.path.isfile(path):  # noqa: PTH113 - False, not an error, for a name no file system takes
        if path.name == WEIGHTS:
            return Source("Hugging Face folder", path.parent)
        return Source("file", path, note=note)
    for folder in (path, RUNS / word):
        for name, kind in _MARKS.items():
            if os.path.isfile(folder / name):  # noqa: PTH113
                return Source(kind, folder, note=note)
    if run := run_named(word, list_runs()):
        return Source("run", run.path, note=note)
    if published:
        return Source("published", Path(), published)
    # OWNER/NAME is a repository on the hub unless OWNER is a folder here; who is asked for it only when it is read
    owner = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*", word)
    elsewhere = owner and not Path(owner[1]).exists() and owner[1] not in (RUNS.name, "data")
    return Source("hub", Path(), word) if elsewhere and Path(word).suffix not in OURS else None


_MARKS: dict[str, Literal["run", "checkpoint folder", "Hugging Face folder"]] = {
    "config.toml": "run",
    CONFIG: "Hugging Face folder",
    "ckpt.pt": "checkpoint folder",  # nanoGPT's, or a run that lost its config.toml
}


def _published(word: str) -> str:
    plain = plain_name(word)
    return next((name for name, repo in GPT2_MODELS.items() if word == repo.name or plain == name), "")


def find_model(word: str) -> Source:
    """What `word` names, which may still be damaged or no model; UserError tells what there is instead."""
    if found := look_up(word):
        return found
    if os.path.isdir(word):  # noqa: PTH112
        raise UserError(
            f"{word} is a folder, but no model: it has no config.toml (a run), no {CONFIG} (Hugging Face) "
            "and no ckpt.pt (nanoGPT)."
        )
    names = [run.name for run in list_runs()]
    near = did_you_mean(word, [*names, *GPT2_MODELS])
    there = f"runs in {RUNS}/: {', '.join(names) or 'none'}; names: {', '.join(GPT2_MODELS)}"
    raise UserError(f"{word}: no such model.{near} There is no such path; {there}.")


def find_run(word: str) -> RunDirectory:
    """The run that `word` names, even without its config.toml; UserError tells what was found instead, or is near."""
    found, path = look_up(word), Path(word)
    if found and found.kind in ("run", "checkpoint folder"):
        return RunDirectory(found.path)
    if found and found.kind == "file" and RunDirectory(path.parent).config.exists():
        raise UserError(f"{word} is a file of a run. Name the run itself: {typed(path.parent)}")
    for folder in (path, RUNS / word):
        if os.path.isdir(folder):  # noqa: PTH112
            raise UserError(f"{folder} is no run directory: it has no config.toml.")
    names = [run.name for run in list_runs()]
    listed = f" Runs in {RUNS}/: {', '.join(names)}." if names else f" There are no runs in {RUNS}/."
    raise UserError(f"{word}: no such run.{did_you_mean(path.name, names)}{listed}")
