"""What can be asked for: a data set by its name, own text by its paths, or whatever a run needs and is not there."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_cli.data import catalogue
from nanogpt_cli.data.bpe import bpe_size
from nanogpt_cli.data.catalogue import Entry
from nanogpt_cli.data.text.documents import COMPRESSED, ReadOptions, file_kind
from nanogpt_cli.data.text.inputs import Inputs, LocalFiles, PinnedInput, find_files, spooled
from nanogpt_cli.data.text.make import DataSetSpec, Prepared, make_data_set, same_text, whole_meta
from nanogpt_cli.data.text.repository import HubRepository, LocalRepository, Repository, RepositoryInputs
from nanogpt_cli.data.text.splits import SplitRule, split_rule
from nanogpt_cli.data.tokenizers import reused_tokenizer
from nanogpt_cli.data.tokens.files import META, WORK
from nanogpt_cli.errors import UserError, did_you_mean, typed
from nanogpt_cli.progress import QUIET, Progress

ROOT = Path("data")
STAND_IN = "shakespeare"


def prepare_named(
    entry: Entry,
    *,
    name: str | None = None,
    folder: Path | None = None,
    tokenizer: str | None = None,
    shards: int | None = None,
    source: str | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress = QUIET,
) -> Prepared:
    """Make a data set of the catalogue.

    Args: as for `prepare_paths`, and
        shards: take only the first so many of its files.
        source: a folder with a copy of its repository, instead of the hub.

    Raises:
        UserError: an argument does not fit the data set, or the folder holds something else.
        NanogptError: no source answered, or the disk is full. The same call goes on from what is complete.
    """
    name, kind = _checked(name or entry.name), tokenizer or entry.tokenizer
    arguments = [entry.name, *_flags(shards=shards, source=source, tokenizer=tokenizer)]
    arguments += _flags(data_dir=folder, name=None if name == entry.name else name)
    folder, whole = folder or ROOT / name, True
    if entry.file is not None:
        if shards or source:
            raise UserError(f"{entry.name} is one small file: --shards and --source are for larger data sets.")
        file = catalogue.pinned(entry.file)
        inputs: Inputs = PinnedInput(file, progress)
        origin: dict[str, Any] = {"url": file.urls[0], "sha256": file.sha256}
        split = SplitRule("tail")
    else:
        if kind == "char":
            raise UserError(
                f"{entry.name} is too large to be read twice, as characters need: --tokenizer bytes or gpt2."
            )
        hub: Repository = HubRepository(entry.hub or "", entry.revision) if source is None else LocalRepository(source)
        count = min(shards or entry.shards, entry.shards)
        whole = count == entry.shards
        rule = {key: value for key, value in entry.val.items() if key != "pattern"}
        if not whole and entry.shard_val:
            seed = entry.val["seed"]
            rule = {"rule": "documents", "fraction": entry.shard_val, "seed": seed, "first_file_only": True}
        inputs = RepositoryInputs(hub, entry, count, folder / WORK / "downloads", progress)
        origin = {"hub": entry.hub, "revision": entry.revision, "of": entry.shards}
        split = SplitRule(**rule, first_val_file=count)
    spec = DataSetSpec(name, folder, inputs, {"name": entry.name, **origin}, arguments, kind, split)
    expect = entry.expect if whole and kind == entry.tokenizer else {}
    spec = replace(spec, end_of_text=entry.file is None, expect=expect)
    return make_data_set(spec, workers=workers, force=force, progress=progress)


def prepare_paths(
    words: list[str],
    *,
    name: str | None = None,
    folder: Path | None = None,
    tokenizer: str | None = None,
    read_options: ReadOptions | None = None,
    split: SplitRule | None = None,
    val: str | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress = QUIET,
) -> Prepared:
    """Make a data set out of the user's own files, folders and patterns.

    Args:
        words: paths, as on the command line; "-" alone is stdin.
        name: what to call it; default after the one path.
        folder: for the token files; default data/NAME.
        tokenizer: default characters for up to 10 MB with at most 10,000 different ones, else gpt2; "bpe:SIZE" is
            learnt from the text; a run, a data set or a folder with a tokenizer.json lends its own.
        read_options: how files become documents.
        split: default the last tenth, at most ten million bytes.
        val: a file, folder or pattern whose text is val, instead of a split.
        workers: threads; default one a core.
        force: make it again though it is there.
        progress: hears how far the work is.

    Raises:
        UserError: a path or name that will not do, or text that cannot be read as it should.
        NanogptError: the disk is full. The same call goes on from what is complete.
    """
    for word in words if len(words) > 1 else []:
        if word == "-":
            raise UserError("- is stdin and stands alone; to take both, give files.")
        if catalogue.find(word) is not None:
            raise UserError(f"{word} is a known data set, prepared by itself; for a file write ./{word}.")
    read_options, split = read_options or ReadOptions(), split or split_rule("position")
    if tokenizer == "bytes" and not read_options.replace_bad_bytes:
        read_options = replace(read_options, raw_bytes=True)
    usual = None if len(words) > 1 else _usual_name(words[0])
    name = _checked(name or default_name(words))
    arguments = [*words, *_flags(tokenizer=tokenizer, val=val, **read_options.changed(), **split.flags())]
    arguments += _flags(data_dir=folder, name=None if name == usual else name)
    folder = folder or ROOT / name
    given = reused_tokenizer(tokenizer or "auto")
    if given is None and tokenizer is not None and tokenizer.startswith("bpe"):
        bpe_size(tokenizer)  # a mistake is told before any text is read
    found = find_files(words, progress) if words != ["-"] else []
    if val is not None:
        if not found:
            raise UserError("--val needs files for train too: stdin is split, or give a file.")
        others = find_files([val], progress)
        twice = {path.resolve() for path in found} & {path.resolve() for path in others}
        if twice:
            raise UserError(f"--val {val}: {twice.pop().name} cannot be both train and val.")
        split, found = SplitRule("files", first_val_file=len(found)), [*found, *others]
    files = nullcontext(LocalFiles(found, progress=progress)) if found else None
    with files or spooled(sys.stdin.buffer, folder) as inputs:
        spec = DataSetSpec(name, folder, inputs, {}, arguments, tokenizer or "auto", split, read_options, given=given)
        return make_data_set(spec, workers=workers, force=force, progress=progress)


def _checked(name: str) -> str:
    if name != Path(name).name or name.startswith("."):
        raise UserError(f"--name {name}: a name is one word, without / and without a dot in front.")
    return name


def default_name(words: list[str]) -> str:
    """my.txt, my.jsonl.gz and my/ are called my; UserError for several words, a pattern, or a name of the catalogue."""
    name = _usual_name(words[0])
    if len(words) > 1 or name in ("", "-") or set("*?[") & set(name):
        raise UserError("Give this data set a name: --name NAME.")
    if catalogue.find(name) is not None:
        raise UserError(f"{words[0]}: {name} is the name of another data set; give this one its own: --name NAME.")
    return name


def _usual_name(word: str) -> str:
    path = Path(Path(word).name)
    while file_kind(path) or path.suffix in COMPRESSED:
        path = Path(path.stem)
    return path.name


def _flags(**settings: Any) -> list[str]:
    """Settings as they are typed; None and False are not."""
    words = []
    for name, value in settings.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def ensure_prepared(dataset: str, *, progress: Progress = QUIET) -> str:
    """Make sure that a run finds its data set: a text file is prepared, and so is a small set of the catalogue.

    Returns:
        The data set's name; its token files are in data/NAME.

    Raises:
        UserError: there is no such data set, or it is too large to be fetched unasked; says what to type.
    """
    entry = catalogue.find(dataset)
    if entry is None and Path(dataset).is_file():
        name = default_name([dataset])
        folder = ROOT / name
        meta = whole_meta(folder / META)
        if same_text(LocalFiles([Path(dataset)]), meta):  # perhaps with settings that the user chose
            progress.say(f"{dataset} is prepared in {folder}, by {meta['tokenizer']['kind']}")
        else:
            prepare_paths([dataset], progress=progress)
        return name
    name = dataset if entry is None else entry.name
    folder = ROOT / name
    small, started = entry is not None and entry.file is not None, (folder / WORK).exists()
    if (folder / META).is_file() or (started and not small) or (any(folder.glob("*.bin")) and not started):
        return name  # or what is missing is said where the files are opened
    if entry is None:
        raise UserError(_unknown(dataset, folder))
    if entry.file is None:
        raise UserError(_too_large(entry, folder))
    prepare_named(entry, folder=folder, progress=progress)
    return name


def _unknown(dataset: str, folder: Path) -> str:
    path = Path(dataset)
    if path.is_dir() and ((path / META).is_file() or any(path.glob("*.bin"))):
        return f"--dataset {dataset} is no name, but a folder of token files. Type --data-dir {typed(dataset)}"
    if path.is_dir():
        return (
            f"--dataset {dataset} is no name, but a folder. To prepare its texts type nanogpt prepare {typed(dataset)}"
        )
    return (
        f"There is no data set in {folder}, and {dataset} is neither a file nor a known name."
        f"{did_you_mean(dataset, catalogue.names())} Known names: {', '.join(catalogue.names())}. "
        f"Prepare your own text: nanogpt prepare PATH --name {typed(path.stem)}"
    )


def _too_large(entry: Entry, folder: Path) -> str:
    tokens = ""
    if entry.tokens:
        tokens = f"; {entry.tokens / 1e9:.1f} billion tokens in {entry.tokens * 2 / 1e9:.0f} GB of token files"
    part = entry.download_bytes / entry.shards / 1e9
    return (
        f"There is no data set in {folder}, and {entry.name} is not fetched unasked: "
        f"{entry.download_bytes / 1e9:.1f} GB to download{tokens}.\n"
        f"  all of it:          nanogpt prepare {entry.name}\n"
        f"  one of {entry.shards} files:    nanogpt prepare {entry.name} --shards 1    ({part:.1f} GB to download)\n"
        "  both need:          pip install huggingface_hub pyarrow\n"
        f"  a small stand-in:   --dataset {STAND_IN}    (prepared by itself, 1 MB)"
    )
