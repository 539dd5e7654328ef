"""`nanogpt prepare`: text to token files."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanogpt_cli.cli import show
from nanogpt_cli.errors import UserError

if TYPE_CHECKING:
    from nanogpt_cli.data.catalogue import Entry
    from nanogpt_cli.data.job import Prepared

NAMED, OWN = "Known data sets", "Own text"
SHORT = 0.5  # seconds that need no bar
LONGEST_SILENCE = 30.0  # seconds without a word on a stderr that is no terminal


def _own(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=OWN)


def prepare(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME | PATH...", help="A known data set, or files, folders, patterns, - for stdin."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it [default: after the path].")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder for the token files [default: data/NAME].")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="char, bytes, gpt2 or any encoding of tiktoken [default: by the text].")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes [default: one a core, at most 16].")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again, replacing what is there.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only check what is there against its hashes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Take only the first N files.", rich_help_panel=NAMED)
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Folder with a copy of the hub's repository.", rich_help_panel=NAMED)
    ] = None,
    text_field: Annotated[str | None, _own("Field of jsonl and parquet that holds the text [default: text].")] = None,
    format: Annotated[
        Literal["txt", "jsonl", "parquet"] | None, _own("Of every file [default: by its name, else txt].")
    ] = None,
    encoding: Annotated[str | None, _own("Of txt and jsonl [default: utf-8].")] = None,
    replace_bad_bytes: Annotated[
        bool, typer.Option("--replace-bad-bytes", help="Put U+FFFD in their place.", rich_help_panel=OWN)
    ] = False,
    separator: Annotated[
        str | None, _own(r"Between the documents of a txt file, such as '\n\n' [default: a file is one document].")
    ] = None,
    split: Annotated[
        Literal["position", "documents"] | None,
        _own("Val is the end of the text, or documents chosen by a hash of their text [default: position]."),
    ] = None,
    val_fraction: Annotated[float | None, _own("Share of val [default: 0.1, at most 10 million tokens].")] = None,
    split_seed: Annotated[int | None, _own("For another choice of documents [default: 0].")] = None,
) -> None:
    r"""Turn text into token files, in data/NAME.

    Known data sets: shakespeare_char, shakespeare, tinystories, openwebtext, fineweb, fineweb_edu. These words are
    names; write ./shakespeare for a file. Files are txt, jsonl and parquet, also with .gz or .zst. The same command
    again goes on where it was interrupted. JSON: name, folder, tokens by split, statistics, warnings, next and more.
    """
    from nanogpt_cli.data import catalogue
    from nanogpt_cli.data.documents import Reading
    from nanogpt_cli.data.prepare import default_name, prepare_named, prepare_paths
    from nanogpt_cli.data.splits import own_split

    words, known = what or [], catalogue.names()
    if not words:
        raise UserError(f"Say what to prepare: paths, or one of {', '.join(known)}.")
    entry = catalogue.find(words[0]) if len(words) == 1 else None
    if verify:
        _verify(name or (entry.name if entry else default_name(words)), data_dir, as_json)
        return
    reading: dict[str, Any] = {
        "text_field": text_field,
        "format": format,
        "encoding": encoding,
        "replace_bad_bytes": replace_bad_bytes or None,
        "separator": separator and separator.replace("\\n", "\n").replace("\\t", "\t"),
    }
    reading = {key: value for key, value in reading.items() if value is not None}
    with Shown() as shown:
        common: dict[str, Any] = {"name": name, "folder": data_dir, "tokenizer": tokenizer, "workers": workers}
        common |= {"force": force, "progress": shown}
        if entry is not None:
            _refuse({**reading, "split": split, "val_fraction": val_fraction, "split_seed": split_seed}, OWN)
            done = prepare_named(entry, shards=shards, source=source, **common)
        else:
            _refuse({"shards": shards, "source": source}, NAMED)
            rule = own_split(split or "position", val_fraction, split_seed)
            done = prepare_paths(words, reading=Reading(**reading), split=rule, **common)
    _report(done, entry, data_dir, as_json)


def _refuse(flags: dict[str, Any], panel: str) -> None:
    given = [f"--{flag.replace('_', '-')}" for flag, value in flags.items() if value is not None]
    if given:
        raise UserError(f"{', '.join(given)}: for {panel.lower()} only. nanogpt prepare --help says more.")


def _verify(name: str, data_dir: Path | None, as_json: bool) -> None:
    from nanogpt_cli.data.prepare import ROOT
    from nanogpt_cli.data.token_files import open_data_set

    folder = data_dir or ROOT / name
    data_set = open_data_set(folder, verify=True)
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
    line = f"nanogpt train{f' --preset {preset}' if preset else ''}"
    if not preset or config.data.dataset != meta["name"]:
        line += f" --dataset {shlex.quote(meta['name'])}"
    if data_dir is not None:
        line += f" --data-dir {shlex.quote(str(data_dir))}"
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
    rows = [
        ("tokens", f"{tokens['train']:,} train + {tokens['val']:,} val", meta["split_rule"]),
        ("tokenizer", f"{meta['tokenizer']['kind']}, {meta['vocab_size']:,} ids", f"{meta['dtype']} token files"),
        ("documents", f"{statistics['documents']:,}{empty}", f"end of text: {meta['eot_rule']}"),
        ("characters", f"{statistics['characters']:,}", f"{per_token:.2f} a token"),
        ("epochs", f"{passes:.3g}", f"in a run of {f'preset {preset}' if preset else 'the defaults'}"),
    ]
    state = "is complete already, nothing to do" if done.already else f"made in {done.seconds:.1f} s"
    show.groups([(f"{done.folder} {state}", rows)], stderr=False)
    print(f"\nNext: {line}")


class Shown:
    """The library's progress on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.began: tuple[float, float, int] | None = None  # time, share, tokens
        self.said = time.monotonic()

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        show.say(text)

    def at(self, share: float, documents: int, text_bytes: int, tokens: int) -> None:
        """Totals so far."""
        now = time.monotonic()
        if self.began is None:
            self.began, self.bar = (now, share, tokens), _bar()
            return
        began, first_share, first_tokens = self.began
        seconds = max(now - began, 1e-9)
        left = seconds * (1 - share) / max(share - first_share, 1e-9)
        rate = (tokens - first_tokens) / seconds
        text = f"{documents:,} documents, {text_bytes / 1e6:,.0f} MB, {tokens:,} tokens, {rate / 1e6:.2f} M tokens/s"
        if self.bar is not None and seconds > SHORT:
            self.bar.start()
            self.bar.update(self.bar.task_ids[0], completed=share, text=f"{text}, {_clock(left)} left")
        elif self.bar is None and now - self.said > LONGEST_SILENCE:
            self.said = now
            show.say(f"{share:.1%}: {text}, {_clock(left)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}")
    bar = Progress(*columns, console=console, transient=True)
    bar.add_task("", total=1.0, text="")
    return bar
