"""`nanogpt prepare`: text to token files."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.cli.options import Json
from nanogpt_cli.cli.progress import ProgressBar
from nanogpt_cli.errors import StoppedError, UserError, typed
from nanogpt_cli.machine.signals import handling

if TYPE_CHECKING:
    from nanogpt_cli.data.catalogue import Entry
    from nanogpt_cli.data.text.make import Prepared

NAMED, OWN = "Known data sets", "Own text"


def _option(text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def prepare(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME | PATH...", help="A known data set, or files, folders, patterns, - for stdin."),
    ] = None,
    name: Annotated[str | None, _option("What to call it [default: after the path].")] = None,
    data_dir: Annotated[Path | None, _option("Folder for the token files [default: data/NAME].")] = None,
    tokenizer: Annotated[
        str | None, _option("char, bytes, bpe:SIZE, gpt2..., or a run or data set [default: by the text].")
    ] = None,
    workers: Annotated[int | None, _option("Threads [default: one a core, at most 16].", min=1)] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again, replacing what is there.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only check what is there against its hashes.")] = False,
    json: Json = False,
    shards: Annotated[int | None, _option("Take only the first N files.", NAMED, min=1)] = None,
    source: Annotated[str | None, _option("Folder with a copy of the hub's repository.", NAMED)] = None,
    text_field: Annotated[str | None, _option("Field or column that holds the text [default: text].", OWN)] = None,
    format: Annotated[
        Literal["txt", "jsonl", "json", "csv", "tsv", "parquet"] | None,
        _option("Of every file [default: by its name, else txt].", OWN),
    ] = None,
    encoding: Annotated[str | None, _option("Of all but parquet [default: utf-8].", OWN)] = None,
    replace_bad_bytes: Annotated[
        bool, typer.Option("--replace-bad-bytes", help="Put U+FFFD in their place.", rich_help_panel=OWN)
    ] = False,
    separator: Annotated[
        str | None,
        _option(r"Between the documents of a txt file, such as '\n\n' [default: a file is one document].", OWN),
    ] = None,
    split: Annotated[
        Literal["position", "documents"] | None,
        _option("Val is the end of the text, or documents chosen by a hash of their text [default: position].", OWN),
    ] = None,
    val: Annotated[str | None, _option("File, folder or pattern that is val, instead of a split.", OWN)] = None,
    val_fraction: Annotated[float | None, _option("Share of val [default: 0.1, at most 10 MB].", OWN)] = None,
    split_seed: Annotated[int | None, _option("For another choice of documents [default: 0].", OWN)] = None,
) -> None:
    r"""Turn text into token files, in data/NAME.

    Known data sets: shakespeare_char, shakespeare, tinystories, openwebtext, fineweb, fineweb_edu. These words are
    names; write ./shakespeare for a file. Files are txt, jsonl, json, csv, tsv and parquet, also with .gz or .zst; line
    ends become LF. --tokenizer bpe:4096 learns a tokenizer of 4,096 ids from the text; --tokenizer runs/demo takes that
    of a run. The same command again goes on where it was interrupted.
    """
    from nanogpt_cli.data import catalogue
    from nanogpt_cli.data.text.documents import ReadOptions
    from nanogpt_cli.data.text.prepare import default_name, prepare_named, prepare_paths
    from nanogpt_cli.data.text.splits import split_rule

    if not what:
        raise UserError(f"Say what to prepare: paths, or one of {', '.join(catalogue.names())}.")
    entry = catalogue.find(what[0]) if len(what) == 1 else None
    if verify:
        _verify(name or (entry.name if entry else default_name(what)), data_dir, json)
        return
    if separator is not None:
        separator = separator.replace("\\n", "\n").replace("\\t", "\t")
    bad_bytes = replace_bad_bytes or None
    reading = _given(
        text_field=text_field, format=format, encoding=encoding, replace_bad_bytes=bad_bytes, separator=separator
    )
    splitting = _given(split=split, val_fraction=val_fraction, split_seed=split_seed)
    if val is not None and splitting:
        raise UserError(f"--val names the files of val: leave out {', '.join(map(_flag, splitting))}.")
    fetching = _given(shards=shards, source=source)
    making = _given(name=name, folder=data_dir, tokenizer=tokenizer, workers=workers, force=force)
    with handling(_stop), ProgressBar() as progress:
        if entry is not None:
            _refuse(reading | splitting | _given(val=val), OWN)
            done = prepare_named(entry, progress=progress, **fetching, **making)
        else:
            _refuse(fetching, NAMED)
            rule = split_rule(split or "position", val_fraction, split_seed)
            done = prepare_paths(
                what, read_options=ReadOptions(**reading), split=rule, val=val, progress=progress, **making
            )
    _report(done, entry, data_dir, json)


def _stop(signum: int, frame: object) -> None:
    name = signal.Signals(signum).name
    raise StoppedError(f"Stopped by {name}. To go on from here: the same command again.", signum)


def _given(**flags: Any) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _refuse(given: dict[str, Any], panel: str) -> None:
    if given:
        raise UserError(f"{', '.join(map(_flag, given))}: for {panel.lower()} only. nanogpt prepare --help says more.")


def _verify(name: str, data_dir: Path | None, as_json: bool) -> None:
    from nanogpt_cli.data.text.prepare import ROOT
    from nanogpt_cli.data.tokens.data_set import open_data_set

    folder = data_dir or ROOT / name
    with ProgressBar() as progress:
        data_set = open_data_set(folder, verify=True, progress=progress)
    counts = {"train": data_set.train.count, "val": data_set.val.count}
    if as_json:
        show.document({"name": data_set.name, "folder": str(folder), "verified": True, "tokens": counts})
    else:
        show.say(f"{folder} is as it was made: {counts['train']:,} train and {counts['val']:,} val tokens")


def _report(done: "Prepared", entry: "Entry | None", data_dir: Path | None, as_json: bool) -> None:
    from nanogpt_cli.config.layers import combine
    from nanogpt_cli.config.presets import preset_layer

    meta, statistics = done.meta, done.meta["statistics"]
    tokens = {split: table["tokens"] for split, table in meta["splits"].items()}
    preset = entry.preset if entry is not None else None
    config = combine(*[preset_layer(preset)] if preset else []).config
    line = _train_line(preset, None if preset and config.data.dataset == meta["name"] else meta["name"], data_dir)
    per_token = statistics["characters"] / sum(tokens.values())
    steps = config.train.max_iters * config.train.gradient_accumulation_steps
    passes = steps * config.train.batch_size * config.model.block_size / tokens["train"]
    if as_json:
        kept = ("name", "dtype", "vocab_size", "eot_rule", "split_rule", "warnings", "source")
        result = {key: meta[key] for key in kept} | {"tokenizer": meta["tokenizer"]["kind"], "tokens": tokens}
        result |= {"folder": str(done.folder), "already": done.already, "seconds": round(done.seconds, 3)}
        show.document(result | {**statistics, "characters_per_token": per_token, "epochs": passes, "next": line})
        return
    for warning in meta["warnings"]:
        show.warn(warning)
    empty = f", and {statistics['empty_documents']:,} empty ones left out" if statistics["empty_documents"] else ""
    if "line_ends" in meta:
        show.say(f"note: {meta['line_ends']}")
    rows = [
        ("tokens", f"{tokens['train']:,} train + {tokens['val']:,} val", meta["split_rule"]),
        ("tokenizer", f"{meta['tokenizer']['kind']}, {meta['vocab_size']:,} ids", f"{meta['dtype']} token files"),
        ("documents", f"{statistics['documents']:,}{empty}", f"end of text: {meta['eot_rule']}"),
        ("characters", f"{statistics['characters']:,}", f"{per_token:.2f} a token"),
        ("epochs", f"{passes:.3g}", f"in a run of {f'preset {preset}' if preset else 'the defaults'}"),
    ]
    state = "is complete already, nothing to do" if done.already else f"made in {done.seconds:.1f} s"
    show.groups([(f"{done.folder} {state}", rows)], stderr=False)
    show.stream(f"\nNext: {line}\n")


def _train_line(preset: str | None, dataset: str | None, data_dir: Path | None) -> str:
    flags = _given(preset=preset, dataset=dataset, data_dir=data_dir)
    return " ".join(["nanogpt train", *(f"{_flag(name)} {typed(value)}" for name, value in flags.items())])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
