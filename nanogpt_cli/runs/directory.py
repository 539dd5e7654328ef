"""The run directory: where each file lies, how it comes into being, how it is found, and what state it is in."""

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanogpt_cli import files
from nanogpt_cli.errors import NanogptError, UserError, typed
from nanogpt_cli.foreign import read_toml
from nanogpt_cli.runs.lock import holder
from nanogpt_cli.runs.metrics import read_metrics

RUNS = Path("runs")
QUICKLY_READ = 1 << 26  # bytes; of a larger checkpoint not every checksum is held against the file
State = Literal["running", "finished", "stopped", "damaged"]


class RunDirectory:
    """The names of a run's files; none of them need exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.absolute().name
        self.config = path / "config.toml"  # settings, and [derived]
        self.tokenizer = path / "tokenizer.toml"  # absent if the data set has none
        self.checkpoint = path / "ckpt.pt"  # the last complete training state
        self.previous = path / "ckpt-previous.pt"  # the one before it
        self.best = path / "best.pt"  # the weights with the lowest validation loss
        self.logs = path / "logs"  # what only people and plots read
        self.metrics = self.logs / "metrics.jsonl"
        self.samples = self.logs / "samples.jsonl"  # written at evaluations
        self.log_file = self.logs / "train.log"
        self.environment = self.logs / "environment.toml"

    def milestone(self, step: int) -> Path:
        """The checkpoint that `keep_every` keeps."""
        return self.path / f"ckpt-{step:06d}.pt"

    def named_checkpoint(self, word: str | Path, allowed: str) -> Path:
        """The file that `--checkpoint` means, by its path or its name in the run; UserError lists what there is."""
        for path in (Path(word), self.path / word):
            if path.is_file():
                return path
        there = ", ".join(sorted(path.name for path in self.path.glob("*.pt"))) or "none"
        raise UserError(f"--checkpoint {word}: {allowed}. Files in {self.path}: {there}.")


def create_run(
    path: Path,
    *,
    config: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    environment: dict[str, Any],
    fill: Callable[["RunDirectory"], None] = lambda run: None,
) -> RunDirectory:
    """Make the run directory `path`: complete with its TOML files and what `fill` adds, or not at all.

    Raises:
        UserError: `path` exists (an empty folder is taken over), or its place cannot be written.
        NanogptError: the disk is full.
    """
    refuse_existing(path)
    if path.is_symlink():
        path = path.resolve()  # a folder elsewhere, perhaps on another disk: the run is made there
    try:
        with files.disk_full_named(path):
            files.make_folder(path.parent)
            files.remove_leftovers(path.parent)
            with files.temporary_folder(path) as building:
                run = RunDirectory(building)
                run.logs.mkdir()
                files.write_toml(run.environment, environment)
                if tokenizer is not None:
                    files.write_toml(run.tokenizer, tokenizer)
                files.write_toml(run.config, config)
                fill(run)
                if path.is_dir() and os.name == "nt":
                    path.rmdir()  # elsewhere a rename takes the place of an empty folder
                building.rename(path)
            files.sync_folder(path.parent)
    except files.DiskFullError as error:
        raise NanogptError(f"{path}: the disk is full ({error.strerror}). Nothing was made.") from None
    except OSError as error:
        refuse_existing(path)  # another process was faster
        raise UserError(f"{path}: cannot make the run directory: {error.strerror or error}.") from None
    return RunDirectory(path)


def refuse_existing(path: Path) -> None:
    """Raise UserError if anything but an empty folder stands at `path`, or if nothing could read its name."""
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise UserError(f"--run {path}: the name is no UTF-8, which TOML and other programs need. Choose another.")
    if RunDirectory(path).config.exists():
        raise UserError(
            f"{path}: there is a run already, and nothing is ever overwritten. To continue it type "
            f"`nanogpt resume {typed(path)}` or add --or-resume; for a new run choose another --run."
        )
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists and is no run; nothing is ever overwritten. Choose another --run.")
    if os.path.ismount(path):
        inside = typed(path / "run")
        raise UserError(f"{path}: a disk of its own, which no run can take the place of. Use --run {inside}")


def new_run_path(root: Path, base: str) -> Path:
    """The first free name of base, base-2, base-3... in `root`."""
    path, number = root / base, 1
    while os.path.lexists(path):
        number += 1
        path = root / f"{base}-{number}"
    return path


def list_runs(root: Path = RUNS) -> list[RunDirectory]:
    """The runs in a folder by name, numbers in their order; no folder, no runs."""
    if not root.is_dir():
        return []
    found = [RunDirectory(path) for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    runs = [run for run in found if run.config.exists() or run.checkpoint.exists()]
    return sorted(runs, key=lambda run: [(int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", run.name)])


def run_named(word: str, runs: list[RunDirectory]) -> RunDirectory | None:
    """The run of that name, else the only one whose name is alike."""
    exact = [run for run in runs if run.name == word]
    alike = exact or [run for run in runs if plain_name(run.name) == plain_name(word)]
    return alike[0] if len(alike) == 1 else None


def plain_name(name: str) -> str:
    """The same for all names that are alike."""
    return name.replace("_", "-")


@dataclass(frozen=True)
class RunStatus:
    """What `nanogpt runs` shows of a run; None is unknown."""

    name: str
    path: str
    state: State
    step: int | None  # completed updates: what resume would go on from; of a running one, the newest on record
    max_iters: int | None
    best_val_loss: float | None
    best_step: int | None


def status(run: RunDirectory) -> RunStatus:
    """The state of a run, read from its TOML and metrics; never raises for a damaged one."""
    try:
        config = read_toml(run.config)
    except UserError:
        config = {}
    train = config.get("train")
    limit = train.get("max_iters") if isinstance(train, dict) else None
    lines = list(read_metrics(run.metrics))
    evaluations = [line for line in lines if isinstance(line.get("val_loss"), int | float)]
    best = min(evaluations, key=lambda line: line["val_loss"], default=None)
    saved = [saved_step(path) for path in (run.checkpoint, run.previous) if path.exists()]
    whole = [step for step in saved if step is not None]
    damaged = not config or (run.checkpoint.exists() and saved[0] is None)
    evaluated = max((line["step"] for line in evaluations), default=0)
    finished = isinstance(limit, int) and bool(whole) and min(whole[0], evaluated) >= limit
    running = holder(run.path) is not None
    logged = max((line["step"] for line in lines), default=0)
    return RunStatus(
        name=run.name,
        path=str(run.path),
        state="running" if running else "damaged" if damaged else "finished" if finished else "stopped",
        step=logged if running else whole[0] if whole else 0 if config else None,
        max_iters=limit if isinstance(limit, int) else None,
        best_val_loss=best["val_loss"] if best else None,
        best_step=best["step"] if best else None,
    )


def saved_step(path: Path) -> int | None:
    """The step in a checkpoint of ours, read without torch; None if it is damaged, as far as a short look can tell."""
    try:
        with zipfile.ZipFile(path) as archive:
            if is_bomb(archive, path) or (path.stat().st_size <= QUICKLY_READ and archive.testzip() is not None):
                return None
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > QUICKLY_READ:
                return None
            step = _Inert(io.BytesIO(archive.read(name))).load()["step"]
            return step if type(step) is int else None
    except Exception:  # there is no list of what damage makes of an archive and a pickle
        return None


def is_bomb(archive: zipfile.ZipFile, path: Path) -> bool:
    """Whether a checkpoint says that it holds more than the file `path` is long: torch compresses nothing."""
    return sum(member.file_size for member in archive.infolist()) > path.stat().st_size


class _Inert(pickle.Unpickler):
    """Reads plain values; whatever else a pickle names becomes nothing, and nothing of it is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return lambda *_: None

    def persistent_load(self, pid: Any, /) -> None:
        """The place of a tensor's bytes."""
