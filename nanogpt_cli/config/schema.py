"""Every setting of a run: name, type, range, default, help and whether a resumed run may change it.

Flags, validation, `config.toml` and the help texts are all derived from these classes.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from nanogpt_cli.config.setting import Section, Setting, fixed, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Which tokens a run reads, and in which order."""

    dataset: str = fixed("shakespeare_char", "Data set: a name under data/, or a text file to prepare first")
    data_dir: str | None = setting(None, "Folder that holds train.bin and val.bin", derived="data/DATASET")
    sampling: Literal["shuffled", "random"] = fixed(
        "shuffled", "Every window once an epoch, or windows with replacement (nanoGPT's way)"
    )
    token_dtype: Literal["uint16", "uint32"] | None = fixed(None, "Of bare token files", derived="uint16")
    tokenizer: str | None = fixed(None, "What made bare token files, such as gpt2 or bytes", derived="gpt2")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The architecture. The defaults are GPT-2's; every field but dropout is fixed for a run."""

    n_layer: int = fixed(4, "Transformer blocks", ge=1)
    n_head: int = fixed(4, "Attention heads a block", ge=1)
    n_embd: int = fixed(128, "Width of the residual stream", ge=1)
    block_size: int = fixed(64, "Context length", unit="tokens", ge=1)
    vocab_size: int | None = fixed(
        None, "Rows of the token table", derived="the data set's; 50,304 for GPT-2's BPE", ge=1
    )
    n_kv_head: int | None = fixed(None, "Heads of keys and values, shared by groups of queries", derived="n_head", ge=1)
    head_dim: int | None = fixed(None, "Width of a head", derived="n_embd / n_head", ge=1)
    n_inner: int | None = fixed(
        None, "Width of the MLP", derived="4 n_embd; swiglu: 8/3 n_embd, up to a multiple of 64", ge=1
    )
    bias: bool = fixed(True, "Biases in linear layers and norms")
    dropout: float = setting(0.0, "Dropout probability", ge=0, lt=1)
    activation: Literal["gelu_tanh", "gelu", "relu2", "swiglu"] = fixed("gelu_tanh", "Activation of the MLP")
    position: Literal["learned", "rotary"] = fixed("learned", "Position encoding")
    rope_theta: float | None = fixed(
        None,
        "Rotary: base of the frequencies, all pairs turned as in Llama",
        derived="half the pairs, 1 to 1/1024",
        gt=1,
    )
    norm: Literal["layernorm", "rmsnorm"] = fixed("layernorm", "Normalisation")
    norm_eps: float | None = fixed(
        None, "Added to the variance in norms", derived="layernorm: 1e-5, rmsnorm: 1e-6", gt=0
    )
    qk_norm: bool = fixed(False, "Normalise queries and keys of every head")
    qk_gain: bool = fixed(False, "With qk_norm: trained gains and the plain scale, as in Qwen3")
    embed_norm: bool = fixed(False, "Normalise the embedding before the first block")
    tie_weights: bool = fixed(True, "Share the token table with the output head")
    zero_init: bool = fixed(False, "Start the projections back into the residual stream (and an untied head) at zero")
    logit_softcap: float = fixed(0.0, "Bound logits smoothly to +-this value; 0 is off", ge=0)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner_width(self) -> int:
        # three matrices with as many weights as two of 4 n_embd
        if self.n_inner is None and self.activation == "swiglu":
            return -(-8 * self.n_embd // 3 // 64) * 64
        return self.n_inner or 4 * self.n_embd

    @property
    def eps(self) -> float:
        return self.norm_eps or (1e-5 if self.norm == "layernorm" else 1e-6)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """What is fine alone and wrong together: the settings, and what is wrong with them."""
        heads, groups, width = self.n_head, self.kv_heads, self.head_width
        if self.head_dim is None and self.n_embd % heads:
            text = f"n_embd = {self.n_embd} is not divisible by n_head = {heads}: every head needs the same width."
            yield "n_embd n_head", text
        if heads % groups:
            text = f"n_head = {heads} is not divisible by n_kv_head = {groups}: all groups are of one size."
            yield "n_head n_kv_head", text
        if self.position == "rotary" and width % 2:
            yield "n_embd n_head head_dim", f"rotary positions need an even head width; it is {width}."
        if self.position != "rotary" and self.rope_theta is not None:
            yield "rope_theta position", f"rope_theta = {self.rope_theta} belongs to position = rotary."
        if self.qk_gain and not self.qk_norm:
            yield "qk_gain qk_norm", "qk_gain = true belongs to qk_norm = true."


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Section):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "muon"] = fixed("adamw", "AdamW, or Muon for block matrices with AdamW for the rest")
    learning_rate: float = setting(1e-3, "Peak learning rate", gt=0)
    min_lr: float | None = setting(None, "Learning rate at the end of the decay", derived="learning_rate / 10", ge=0)
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "Shape of the decay after warm-up")
    warmup_iters: int | None = setting(
        None, "Updates of linear warm-up", derived="max_iters / 20, at most 2,000; 0 with a constant schedule", ge=0
    )
    lr_decay_iters: int | None = setting(None, "Update at which the decay ends", derived="max_iters", ge=1)
    weight_decay: float = setting(0.1, "Decoupled weight decay of matrices; with muon, of block matrices", ge=0)
    beta1: float = setting(0.9, "AdamW: decay of the first moment", ge=0, lt=1)
    beta2: float = setting(0.99, "AdamW: decay of the second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW: added to the denominator", gt=0)
    grad_clip: float = setting(1.0, "Clip the gradient norm to this; 0 is off", ge=0)
    muon_lr: float = setting(0.02, "Muon: peak learning rate of block matrices", gt=0)
    muon_momentum: float = setting(0.95, "Muon: momentum", ge=0, lt=1)
    embed_lr_scale: float = setting(1.0, "Factor on the rate of the embeddings", gt=0)
    head_lr_scale: float = setting(1.0, "Factor on the rate of an untied head", gt=0)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section):
    """How long, in which batches, and what is measured and saved on the way."""

    init_from: str | None = fixed(None, "Start from the weights of this MODEL instead of random ones")
    batch_size: int = setting(12, "Rows a micro-batch", unit="rows", ge=1)
    gradient_accumulation_steps: int = setting(1, "Micro-batches an update, over all ranks", ge=1)
    max_iters: int = setting(2000, "Updates in all", ge=1)
    eval_interval: int = setting(250, "Evaluate every so many updates", unit="updates", ge=1)
    eval_iters: int = setting(20, "Batches of each split an evaluation reads", ge=1)
    log_interval: int = setting(10, "Log every so many updates", unit="updates", ge=1)
    save_interval: int | None = setting(None, "Save every so many updates", derived="eval_interval", ge=1)
    save_minutes: float = setting(10.0, "Save at least this often; 0 is off", unit="minutes", ge=0)
    keep_every: int = setting(0, "Keep a milestone checkpoint every so many updates; 0 is off", ge=0)
    keep_previous: bool = setting(True, "Keep the checkpoint before the last one")
    patience: int = setting(0, "Stop after so many evaluations without a better one; 0 is off", ge=0)
    max_minutes: float = setting(0.0, "Save and stop after so long, to be resumed; 0 is off", unit="minutes", ge=0)
    seed: int = fixed(1337, "Key of everything random", ge=0)


@dataclass(frozen=True, kw_only=True)
class SystemSettings(Section):
    """The machine: none of it changes what is learned, beyond rounding."""

    device: str = setting(
        "auto",
        "Where to compute: auto, cpu, cuda, cuda:N or mps",
        pattern=r"auto|cpu|cuda(:[0-9]{1,3})?|mps",
        pattern_text="auto, cpu, cuda, cuda:N or mps",
    )
    gpus: int = setting(1, "Processes on this machine, one a GPU", ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "Number format of matrix products")
    compile: Literal["auto", "on", "off"] = setting("auto", "Compile the model with torch.compile")
    deterministic: bool = setting(False, "Bit-identical resume on CUDA too, at some cost (CPU runs always are)")
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", "How processes talk")
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "Replicate the model, or shard it")
    activation_checkpointing: bool = setting(
        False, "Recompute the activations of each block in the backward pass: less memory, a quarter more work"
    )
    peak_tflops: Literal["auto"] | float = setting("auto", "Peak of one device for MFU", unit="TFLOP/s", gt=0)


@dataclass(frozen=True, kw_only=True)
class LogSettings(Section):
    """What is shown and kept besides logs/metrics.jsonl."""

    sample: bool = setting(True, "Write a short sample at evaluations, within 1% of the time, and one at the end")
    final_eval: bool = setting(True, "At the end, the best weights over the whole validation split")
    tensorboard: bool = setting(False, "Write TensorBoard events (extra: tensorboard)")
    wandb: bool = setting(False, "Log to Weights & Biases (extra: wandb)")
    wandb_project: str = setting("nanogpt", "W&B project")
    wandb_run_name: str | None = setting(None, "W&B run name", derived="the run's name")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run, as given: `auto` stays `auto`, unset optional settings are None."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    optim: OptimSettings = OptimSettings()
    train: TrainSettings = TrainSettings()
    system: SystemSettings = SystemSettings()
    log: LogSettings = LogSettings()

    def to_toml(self) -> dict[str, Any]:
        """Nested tables without the unset settings: what config.toml and a checkpoint hold."""
        return {
            section: {name: value for name, value in table.items() if value is not None}
            for section, table in dataclasses.asdict(self).items()
        }

    def replace(self, section: str, **changes: Any) -> "Config":
        """A copy with some settings of one section changed."""
        table: Any = dataclasses.replace(getattr(self, section), **changes)
        return dataclasses.replace(self, **{section: table})


SECTIONS: dict[str, type[Section]] = {
    "data": DataSettings,
    "model": ModelSettings,
    "optim": OptimSettings,
    "train": TrainSettings,
    "system": SystemSettings,
    "log": LogSettings,
}


@cache
def settings() -> dict[str, Setting]:
    """Every setting by name, in the order of the schema. Names are unique over all sections."""
    return {name: known for cls in SECTIONS.values() for name, known in settings_of(cls).items()}
