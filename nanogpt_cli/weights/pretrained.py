"""Models and files from the Hugging Face hub: the local cache first, never a pickle, never code."""

import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanogpt_cli.errors import NanogptError, UserError, package
from nanogpt_cli.foreign import field, read_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX = f"{WEIGHTS}.index.json"
MODEL_FILES = [CONFIG, WEIGHTS, INDEX, "model-*.safetensors", "tokenizer.json", "tokenizer_config.json"]
CONNECT_SECONDS = 10


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit, or as it is now."""

    name: str
    revision: str = "main"
    kind: str = "model"


GPT2_MODELS: dict[str, HubRepo] = {
    name: HubRepo(**at) for name, at in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists; UserError if neither is there: no pickle is ever read."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if index.exists():
        names = field(read_json(index), "weight_map", dict, index).values()
        return [folder / Path(str(name)).name for name in sorted(set(map(str, names)))]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    hint = " is a pickle, which can run foreign code and is never read: save it again as safetensors."
    raise UserError(f"{folder}: no {WEIGHTS}.{f' {pickled[0]}{hint}' if pickled else ''}")


def hub_file(repo: HubRepo, path: str) -> Path:
    """One file of a repository, from the local cache or downloaded into it with a progress bar.

    A cached file is used without asking the hub. HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT are honoured.

    Raises:
        UserError: the package huggingface_hub is not installed.
        NanogptError: not cached, and the hub cannot be reached.
    """
    return _hub_folder(repo, [path], lambda folder: (folder / path).is_file()) / path


def hub_directory(repo: HubRepo) -> Path:
    """The folder with a model's config.json, weights and tokenizer.json, if there is one; errors as for `hub_file`."""

    def complete(folder: Path) -> bool:
        with suppress(UserError):
            return (folder / CONFIG).is_file() and all(path.is_file() for path in weight_files(folder))
        return False

    return _hub_folder(repo, MODEL_FILES, complete)


def _hub_folder(repo: HubRepo, patterns: list[str], complete: Callable[[Path], bool]) -> Path:
    package("huggingface_hub", f"Fetching {repo.name}")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    which = {"revision": repo.revision, "repo_type": repo.kind}
    fetch = partial(snapshot_download, repo.name, allow_patterns=patterns, **which)
    try:
        with suppress(LocalEntryNotFoundError):
            if complete(folder := Path(fetch(local_files_only=True))):
                return folder
        # asked directly: the download itself tries an unreachable hub for most of a minute
        HfApi().repo_info(repo.name, timeout=CONNECT_SECONDS, **which)
        return Path(fetch())
    # the base of the HTTP library's errors, whichever library it is
    except (OSError, HfHubHTTPError.__mro__[1]) as error:
        home, part = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), "datasets/" * (repo.kind == "dataset")
        reason, at = str(error).strip().partition("\n")[0], f"{home}/{part}{repo.name}/resolve/{repo.revision}"
        raise NanogptError(
            f"{repo.name} is no path here, not in the local cache, and could not be fetched from {home}: {reason}\n"
            f"Fetch {at}/{patterns[0]} and what lies beside it on a machine with a connection and give the path of the "
            "local copy, or set HF_HOME to a cache that holds it."
        ) from error
