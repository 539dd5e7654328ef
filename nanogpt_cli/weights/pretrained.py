"""Files from the Hugging Face hub: one pinned revision each, the local cache first, never a pickle."""

import os
from dataclasses import dataclass
from pathlib import Path

from nanogpt_cli.errors import NanogptError, UserError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit."""

    name: str
    revision: str
    kind: str = "model"


GPT2_MODELS = {
    "gpt2": HubRepo("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": HubRepo("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    "gpt2-large": HubRepo("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
    "gpt2-xl": HubRepo("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
}


def needs_extra(package: str, purpose: str) -> UserError:
    """The error for a package of an extra that is not installed."""
    return UserError(f"{purpose} needs the package {package}. Install it: pip install {package}")


def hub_file(repo: HubRepo, path: str) -> Path:
    """One file of a repository, from the local cache or downloaded into it with a progress bar.

    A cached file is used without asking the hub. HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT are honoured.

    Raises:
        UserError: the extra `hf` is not installed.
        NanogptError: not cached, and the hub cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        raise needs_extra("huggingface_hub", f"Fetching {repo.name}") from None
    try:
        return Path(hf_hub_download(repo.name, path, revision=repo.revision, repo_type=repo.kind))
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        home = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        part = "datasets/" if repo.kind == "dataset" else ""
        raise NanogptError(
            f"{path} of {repo.name} is not in the local cache and could not be fetched from {home}: {error}\n"
            f"Fetch {home}/{part}{repo.name}/resolve/{repo.revision}/{path} on a machine with a connection and give "
            "the path of the local copy, or set HF_HOME to a cache that holds it."
        ) from error


def hub_directory(name: str) -> Path:
    """The folder that holds config.json and model.safetensors of `gpt2`, `gpt2-medium`, `gpt2-large` or `gpt2-xl`."""
    repo = GPT2_MODELS[name]
    return [hub_file(repo, path) for path in (CONFIG, WEIGHTS)][-1].parent
