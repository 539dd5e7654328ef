"""Small tokenizers in the styles of models of today, trained on the spot."""

import json
from pathlib import Path
from typing import Any

TEXT = "".join(f"In the year {1000 + 7 * n} they said: it's {n % 9} o'clock, isn't it?\n" for n in range(300))
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
STYLES = (
    "digits",
    "qwen",
)  # SmolLM2: special tokens first, digits alone; Qwen: special tokens last, a split of its own


def write_tokenizer(folder: Path, style: str, end: str = "<|endoftext|>") -> Path:
    """tokenizer.json of some 300 ids in `folder`, which is made."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(exist_ok=True)
    level = {"add_prefix_space": False}
    made = Tokenizer(models.BPE())
    split: Any = pre_tokenizers.Digits(individual_digits=True)
    if style == "qwen":
        split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(**level, use_regex=style != "qwen")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    made.decoder = decoders.ByteLevel()
    special = [end, "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special if style == "digits" else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    made.add_special_tokens(special)
    path = folder / "tokenizer.json"
    made.save(str(path))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path
