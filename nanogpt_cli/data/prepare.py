"""What can be asked for: a data set by its name, own text by its paths, or whatever a run needs and is not there."""

from pathlib import Path

from nanogpt_cli.data import catalogue
from nanogpt_cli.data.catalogue import Entry
from nanogpt_cli.data.documents import Reading, file_kind
from nanogpt_cli.data.inputs import LocalFiles, PinnedInput, find_files
from nanogpt_cli.data.job import META, Job, Prepared, Progress, Quiet, run
from nanogpt_cli.data.splits import VAL_FRACTION, VAL_MOST, Split
from nanogpt_cli.errors import UserError, did_you_mean

ROOT = Path("data")


def prepare_named(
    entry: Entry,
    *,
    name: str | None = None,
    folder: Path | None = None,
    tokenizer: str | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make a data set of the catalogue in `folder` (default data/NAME).

    Raises:
        UserError, NanogptError: as `job.run`; and no source answered.
    """
    progress, name = progress or Quiet(), name or entry.name
    file = catalogue.pinned(entry.file or "")
    job = Job(
        name=name,
        folder=folder or ROOT / name,
        inputs=PinnedInput(file, progress.say),
        source={"name": entry.name, "url": file.urls[0], "sha256": file.sha256},
        tokenizer=tokenizer or entry.tokenizer,
        split=Split("tail"),
        end_of_text=False,
        expect=entry.expect if tokenizer in (None, entry.tokenizer) else {},
    )
    return run(job, workers=workers, force=force, progress=progress)


def prepare_paths(
    words: list[str],
    *,
    name: str | None = None,
    folder: Path | None = None,
    tokenizer: str = "auto",
    reading: Reading | None = None,
    split: Split | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make a data set out of the user's own files, folders and patterns, in `folder` (default data/NAME).

    Raises:
        UserError: a path or name that will not do; else as `job.run`.
    """
    name = name or default_name(words)
    if name != Path(name).name or name.startswith("."):
        raise UserError(f"--name {name}: a name is one word, without / and no dot in front.")
    paths = find_files(words)
    job = Job(
        name=name,
        folder=folder or ROOT / name,
        inputs=LocalFiles(paths),
        source={"paths": [str(path.absolute()) for path in paths]},
        tokenizer=tokenizer,
        split=split or Split("tail", VAL_FRACTION, VAL_MOST),
        reading=reading or Reading(),
    )
    return run(job, workers=workers, force=force, progress=progress)


def default_name(words: list[str]) -> str:
    """my.txt and my/ are called my.

    Raises:
        UserError: several words, a pattern, or a name of the catalogue.
    """
    stem = Path(words[0]).name
    while file_kind(Path(stem)) or Path(stem).suffix in (".gz", ".zst"):
        stem = Path(stem).stem
    if len(words) > 1 or not stem or "*" in stem:
        raise UserError("Give this data set a name: --name NAME.")
    if catalogue.find(stem) is not None:
        raise UserError(f"{words[0]}: {stem} is the name of another data set; give this one a name: --name NAME.")
    return stem


def ensure_prepared(dataset: str, root: Path = ROOT, *, progress: Progress | None = None) -> str:
    """Make sure that a run finds its data set: a text file is prepared, and so is a small set of the catalogue.

    Returns:
        The data set's name: its token files are in `root`/NAME.

    Raises:
        UserError: there is no such data set, or it is too large to be fetched unasked; says what to type.
    """
    entry = catalogue.find(dataset)
    if entry is None and Path(dataset).is_file():
        name = default_name([dataset])
        prepare_paths([dataset], name=name, folder=root / name, progress=progress)
        return name
    name = entry.name if entry is not None else dataset
    folder = root / name
    if (folder / META).is_file() or (folder / "train.bin").is_file() or any(folder.glob("*.bin")):
        return name
    if entry is None:
        raise UserError(
            f"There is no data set in {folder}, and {dataset} is neither a file nor a known name."
            f"{did_you_mean(dataset, catalogue.names())} Known names: {', '.join(catalogue.names())}. "
            f"Prepare your own text: nanogpt prepare PATH --name {Path(dataset).stem}"
        )
    prepare_named(entry, folder=folder, progress=progress)
    return name
