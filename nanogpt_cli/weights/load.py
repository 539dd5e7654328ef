"""One word to a model: a run, a checkpoint file, nanoGPT's files, a Hugging Face folder, or the name of a GPT-2."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanogpt_cli.config.layers import Layer, combine
from nanogpt_cli.config.schema import Config
from nanogpt_cli.data.tokenizers import CharTokenizer, Tokenizer, gpt2_tokenizer, tokenizer_from_toml, tokenizer_in
from nanogpt_cli.data.tokens.data_set import DataSet
from nanogpt_cli.data.tokens.files import prepare_line
from nanogpt_cli.data.tokens.formats import read_meta_pkl
from nanogpt_cli.errors import UserError, typed
from nanogpt_cli.foreign import read_json
from nanogpt_cli.model.build import build_model
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.runs.checkpoint import damage, is_nanogpt, own_checkpoint, read_torch_file, refuse_non_finite
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.weights.hugging_face import read_folder, settings_of
from nanogpt_cli.weights.nanogpt import from_nanogpt
from nanogpt_cli.weights.pretrained import CONFIG, GPT2_MODELS, HubRepo, hub_directory, hub_file
from nanogpt_cli.weights.resolve import find_model

GPT2_TABLES = (50_257, 50_304)  # as released, and padded as nanoGPT does


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use, and what is known about it."""

    model: GPT  # in evaluation mode
    tokenizer: Tokenizer | None
    source: str  # in words
    step: int | None = None
    config: Config | None = None  # settings of the run it comes from
    data: dict[str, Any] | None = None  # fingerprint of the data it was trained on: "name", "folder", ...
    released: str | None = None  # "gpt2", "gpt2-medium"...: the weights are OpenAI's
    notes: tuple[str, ...] = ()

    @property
    def token_limit(self) -> int:
        """Ids below this have a meaning; the rest of the table is padding."""
        rows = self.model.wte.weight.shape[0]
        return rows if self.tokenizer is None else min(rows, self.tokenizer.size)


def load_model(word: str, checkpoint: str = "best", device: str | torch.device = "cpu") -> LoadedModel:
    """The model a user means. Nothing on disk changes.

    Args:
        word: see `look_up`.
        checkpoint: of a run: "best", "last", or a file, by path or by its name in the run.
        device: where the weights go.

    Raises:
        UserError: nothing of that name, not a model, damaged, or not finite; says what could be used instead.
        NanogptError: a released GPT-2 that is neither cached nor to be had.
    """
    found = find_model(word)
    match found.kind:
        case "published":
            loaded = _from_folder(hub_directory(GPT2_MODELS[found.published]), released=found.published)
        case "hub":
            repo = HubRepo(found.published)
            config = hub_file(repo, CONFIG)
            settings_of(read_json(config), config)  # what does not fit is refused before its weights are fetched
            loaded = _from_folder(hub_directory(repo), word)
        case "run":
            loaded = _from_run(RunDirectory(found.path), checkpoint)
        case "Hugging Face folder":
            loaded = _from_folder(found.path)
        case "checkpoint folder":
            loaded = _from_file(found.path / "ckpt.pt")
        case "file":
            loaded = _from_file(found.path)
    if found.note:
        loaded = dataclasses.replace(loaded, notes=(found.note, *loaded.notes))
    refuse_non_finite(loaded.model.state_dict(), loaded.source, "weights")
    loaded.model.to(device)
    return loaded


def check_reads(loaded: LoadedModel, data_set: DataSet, word: str) -> None:
    """Refuse data whose ids mean something else than to the model called `word`: UserError naming both."""
    ours, theirs = loaded.tokenizer, data_set.tokenizer
    if ours is None or theirs is None or ours.identity == theirs.identity:
        return
    name = f"{data_set.name}-{ours.kind}"
    line = prepare_line(data_set.folder, tokenizer=word if ours.kind in ("char", "bpe", "hf") else ours.kind, name=name)
    raise UserError(
        f"{data_set.folder} holds {theirs.size:,} ids of the tokenizer {theirs.kind}, {loaded.source} reads "
        f"{ours.size:,} of {ours.kind}: the same ids mean different text. Prepare the text with the model's tokenizer, "
        f"and take --dataset {typed(name)}: {line}"
    )


def _from_run(run: RunDirectory, checkpoint: str) -> LoadedModel:
    note, path = "", {"best": run.best, "last": run.checkpoint}.get(checkpoint)
    if path is None:
        path = run.named_checkpoint(checkpoint, "best, last, or a file")
    elif not path.exists():
        if not run.checkpoint.exists():
            raise UserError(f"{run.path} has no checkpoint yet. To start or go on: nanogpt resume {typed(run.path)}")
        note, path = "no evaluation yet, so no best.pt: the last checkpoint", run.checkpoint
    try:
        loaded = _from_file(path)
    except UserError as error:
        others = [p.name for p in (run.best, run.checkpoint, run.previous) if p != path and p.is_file()]
        usable = " or ".join(f"--checkpoint {name}" for name in others if not damage(run.path / name))
        raise UserError(f"{error}{f' What can still be used: {usable}.' if usable else ''}") from None
    return dataclasses.replace(loaded, notes=(*([note] if note else []), *loaded.notes))


def _from_file(path: Path) -> LoadedModel:
    """A checkpoint file: ours or nanoGPT's."""
    content = read_torch_file(path)
    if is_nanogpt(content):
        return _from_nanogpt(content, path)
    content = own_checkpoint(content, path)
    config = combine(Layer(str(path), content["config"])).config
    model = build_model(config.model, content["model"], str(path))
    loss = content.get("val_loss")
    quality = f", validation loss {loss:.4f}" if loss is not None else ""
    table = content.get("tokenizer")
    return LoadedModel(
        model,
        tokenizer_from_toml(table) if table else None,
        f"{path} (step {content['step']:,}{quality})",
        step=content["step"],
        config=config,
        data=content.get("data") or None,
        notes=() if table else ("the run has no tokenizer: its data set came without one",),
    )


def _from_nanogpt(content: dict[str, Any], path: Path) -> LoadedModel:
    theirs = from_nanogpt(content, str(path))
    roots = [Path("data"), path.parent.parent / "data"] if theirs.dataset else []
    places = [path.parent, *(root / str(theirs.dataset) for root in roots)]
    tokenizer, note = _nanogpt_tokenizer(places, theirs.settings.vocab_size or 0)
    folder = next((place.absolute() for place in places[1:] if (place / "val.bin").is_file()), None)
    return LoadedModel(
        build_model(theirs.settings, theirs.tensors, str(path)),
        tokenizer,
        f"{path} (nanoGPT, step {theirs.step:,})",
        step=theirs.step,
        data={"name": theirs.dataset} | ({"folder": str(folder)} if folder else {}) if theirs.dataset else None,
        notes=(note,),
    )


def _nanogpt_tokenizer(places: list[Path], vocab_size: int) -> tuple[Tokenizer | None, str]:
    """What nanoGPT's sample.py would use: the data set's meta.pkl, else GPT-2's; and where it comes from."""
    for place in places:
        tokenizer = _data_tokenizer(place)
        if tokenizer is not None and tokenizer.size == vocab_size:
            return tokenizer, f"tokenizer: the {vocab_size} characters of {place}"
    if vocab_size in GPT2_TABLES:
        return gpt2_tokenizer(), "tokenizer: GPT-2's, going by the size of the token table"
    sought = ", ".join(map(str, places))
    return None, f"no meta.pkl for {vocab_size} ids in {sought}: no text can be read or written (put one there)"


def _data_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "meta.pkl").is_file():
        alphabet = read_meta_pkl(folder / "meta.pkl")[1]
        return CharTokenizer(alphabet) if alphabet else None
    return tokenizer_in(folder) if (folder / "meta.toml").is_file() else None


def _from_folder(folder: Path, word: str = "", released: str | None = None) -> LoadedModel:
    """A Hugging Face folder: `word` on the hub, a released GPT-2, or as it lies there."""
    settings, tensors, notes = read_folder(folder)
    rows, source = settings.vocab_size or 0, f"{word} at {folder.name[:8]}" if word else str(folder)
    tokenizer, note = (gpt2_tokenizer(), "") if released else _folder_tokenizer(folder, rows)
    if tokenizer is not None and tokenizer.size > rows:
        note = f"the tokenizer of {folder} is unused: it has {tokenizer.size:,} ids, the token table {rows:,}"
        tokenizer = None
    return LoadedModel(
        build_model(settings, tensors, str(folder)),
        tokenizer,
        f"{released}, OpenAI's weights" if released else f"{source} (safetensors)",
        released=released,
        notes=(*notes, *([note] if note else [])),
    )


def _folder_tokenizer(folder: Path, rows: int) -> tuple[Tokenizer | None, str]:
    """Its own; GPT-2's where there is none and the table has its size."""
    try:
        tokenizer = tokenizer_in(folder)
    except UserError as error:
        return None, f"no text can be read or written: {error}"
    if tokenizer is None and rows in GPT2_TABLES:
        return gpt2_tokenizer(), "tokenizer: GPT-2's, going by the size of the token table"
    return tokenizer, "" if tokenizer else f"there is no tokenizer in {folder}: no text can be read or written"
