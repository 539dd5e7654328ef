"""Our tokenizers as tokenizer.json, which AutoTokenizer and vLLM load without code of ours, and which gives equal ids.

A byte pair encoding is described as one; bytes are one without merges; characters are a table of words of one
character. What its alphabet lacks is an error there, as it is here.
"""

import json
from itertools import pairwise
from typing import Any

from nanogpt_cli.data.bpe import LETTERS
from nanogpt_cli.data.hf_tokenizer import HfTokenizer
from nanogpt_cli.data.tokenizers import BytesTokenizer, CharTokenizer, Tokenizer, gpt2_files
from nanogpt_cli.foreign import parse_json
from nanogpt_cli.progress import QUIET, Progress

END = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, context: int, progress: Progress = QUIET) -> dict[str, bytes]:
    """Names and contents of the files that turn text into ids, for our reader and for others.

    `context` is the longest text the model reads, in tokens. NanogptError if the tokenizer's files are not to be had.
    """
    import tomli_w

    found = {"tokenizer.toml": tomli_w.dumps(tokenizer.to_toml()).encode()}
    described = describe(tokenizer, progress)
    if described is None:
        return found
    end = None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,  # as GPT-2's; nothing is unknown, but CTranslate2 asks for one
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # end-of-text written out in a text is text, as it was in training
    }
    for name, content in (("tokenizer.json", described), ("tokenizer_config.json", config)):
        found[name] = json.dumps(content, ensure_ascii=False).encode()
    return found


def describe(tokenizer: Tokenizer, progress: Progress = QUIET) -> dict[str, Any] | None:
    """The content of tokenizer.json; None for encodings with another pattern than GPT-2's."""
    if isinstance(tokenizer, CharTokenizer):
        vocabulary = {character: number for number, character in enumerate(tokenizer.alphabet)}
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}  # which the table lacks
        return _parts(model, split, {"type": "Fuse"})
    if isinstance(tokenizer, BytesTokenizer):
        return _bpe({LETTERS[byte]: byte for byte in range(256)}, [], tokenizer.eot)
    if tokenizer.kind == "gpt2":
        files = gpt2_files(progress)
        vocabulary = json.loads(files["vocab.json"])
        lines = files["merges.txt"].decode().splitlines()[1:]  # the first says what it is
        return _bpe(vocabulary, [line.split(" ") for line in lines if line], tokenizer.eot)
    if isinstance(tokenizer, HfTokenizer):
        return parse_json(tokenizer.content, "tokenizer.json")
    table = tokenizer.to_toml()
    if tokenizer.kind == "bpe" and table["pattern"] == "gpt2":
        tokens = table["tokens"].split(" ")  # as GPT-2 writes bytes, in the order of the merges
        return _bpe({token: i for i, token in enumerate(tokens)}, _merges(tokens), tokenizer.eot)
    return None


def _merges(tokens: list[str]) -> list[list[str]]:
    """The two pieces of which each token is made, by merging what comes before it."""
    ranks, found = {token: i for i, token in enumerate(tokens)}, []
    for token in tokens:
        pieces = list(token)
        while len(pieces) > 2:
            ranked = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(pieces))]
            place = min(ranked)[1]
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        if len(pieces) == 2:
            found.append(pieces)
    return found


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], eot: int | None) -> dict[str, Any]:
    """A text is cut by GPT-2's pattern before merging."""
    vocabulary = {token: number for token, number in vocabulary.items() if number != eot}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": bool(merges)}
    return _parts({"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": True}, level, level, eot)


def _parts(
    model: dict[str, Any], before: dict[str, Any], decoder: dict[str, Any], eot: int | None = None
) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [] if eot is None else [{"id": eot, "content": END, "special": True, **plain}]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": before,
        "model": model,
        "decoder": decoder,
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
    }
