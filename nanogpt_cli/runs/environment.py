"""What a run was started with, for environment.toml: versions, commit, machine, command line."""

import os
import platform
import secrets
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from nanogpt_cli.errors import UserError
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.terminal import escaped

PACKAGES = ("nanogpt-cli", "torch", "numpy", "tiktoken", "typer", "rich")


def environment(device: str) -> dict[str, Any]:
    """The table of environment.toml. `device` names the hardware in words; `run_id` is new with every call."""
    return {
        "run_id": secrets.token_hex(8),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": escaped(shlex.join(["nanogpt", *sys.argv[1:]])),
        "folder": escaped(str(Path.cwd())),  # which need be no UTF-8
        "device": device,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 0,
        **_git(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def with_resume(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The table in `path` with another life of the run: what it went on with, in the list `resumed`."""
    try:
        first = read_toml(path)
    except UserError:  # damaged, or tidied away: it says nothing that a run needs
        return now
    lives = first.get("resumed", [])
    known = lives if isinstance(lives, list) else []
    return {**first, "resumed": [*known, {key: value for key, value in now.items() if key != "run_id"}]}


def _version(name: str) -> str:
    """From the package's metadata: nothing is imported for it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git() -> dict[str, Any]:
    """The commit of the working folder and whether it was changed since; empty without git or a repository."""
    try:
        sha = _git_says("rev-parse", "HEAD")
        return {"git_sha": sha, "git_changed": bool(_git_says("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git_says(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
