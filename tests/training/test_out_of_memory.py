"""Running out of memory is a message that says what was tried and what to type; the run goes on from it."""

import shlex
from typing import Any

import numpy as np
import pytest
import torch

from nanogpt_cli.config.schema import Config
from nanogpt_cli.errors import NanogptError, UserError
from nanogpt_cli.machine.memory import explain_out_of_memory, is_out_of_memory
from nanogpt_cli.model.gpt import GPT
from nanogpt_cli.training.plan import smaller_batch
from tests.runner import Runner

ALIKE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of..."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.29 GB, other allocations: 2 GB, max allowed: 6.80 GB)."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the first training step need too much."""

    def forward(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(GPT, "forward", forward)


@pytest.mark.parametrize("error", ALIKE, ids=lambda error: str(error)[:40])
def test_the_message_names_what_was_tried_and_flags_that_keep_the_tokens_of_a_step(
    runs: Runner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patched:
        failing(patched, error)
        with pytest.raises(NanogptError) as caught:
            runs.train("my run", batch_size=6, gradient_accumulation_steps=2)
    first, tried, same, less, *_ = str(caught.value).splitlines()
    assert caught.value.exit_code == 1
    assert first == (f"Out of memory ({str(error).splitlines()[0]})." if str(error) else "Out of memory.")
    assert "micro-batches of 6 rows x 16 tokens in float32, 3,936 parameters; estimated: activations 0.00 GiB" in tried
    words = shlex.split(same)
    assert " ".join(words[:5]) == "The same 192 tokens a"
    assert words[6:9] == ["nanogpt", "resume", str(runs.root / "my run")]
    assert words[9:] == ["--batch-size", "3", "--gradient-accumulation-steps", "4"]
    assert less.endswith("--activation-checkpointing")
    # what it says to type works, and takes the same rows
    outcome = runs.resume("my run", batch_size=3, gradient_accumulation_steps=4)
    assert outcome.step == 8
    assert runs.lines("my run")[-1]["step"] == 8
    assert max(line.get("tokens", 0) for line in runs.lines("my run")) == 8 * 192


def test_single_rows_have_no_smaller_batch(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ALIKE[0])
    with pytest.raises(NanogptError) as caught:
        runs.train("one", batch_size=1, activation_checkpointing="true")
    assert "--batch-size" not in str(caught.value)
    assert "--activation-checkpointing" not in str(caught.value)
    assert "a smaller --block-size, --n-layer or --n-embd" in str(caught.value)


def test_other_errors_stay_what_they_are() -> None:
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_out_of_memory("advice"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_the_real_allocators_are_understood() -> None:
    with pytest.raises(NanogptError, match=r"can't allocate memory.*\nadvice$"), explain_out_of_memory("advice"):
        torch.empty(10**15)
    with pytest.raises(NanogptError, match=r"Unable to allocate .*\nadvice$"), explain_out_of_memory("advice"):
        np.zeros(10**15)


@pytest.mark.parametrize("batch", range(1, 14))
@pytest.mark.parametrize("accumulation", [1, 3, 40])
def test_a_smaller_batch_keeps_the_rows(batch: int, accumulation: int) -> None:
    config = Config().replace("train", batch_size=batch, gradient_accumulation_steps=accumulation)
    found = smaller_batch(config, batch)
    assert (found is None) == (batch == 1)
    if found is not None:
        assert found[0] * found[1] == batch * accumulation
        assert 1 <= found[0] <= batch / 2


def test_a_plan_warns_before_memory_is_short(runs: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanogpt_cli.machine.memory.free_memory", lambda: 1 << 30)
    assert runs.plan("small").warnings == ()
    warning = runs.plan("large", batch_size=100_000).warnings[-1]
    assert "GiB of memory are expected to be needed, 1.0 GiB are there. A smaller --batch-size" in warning


def test_what_can_never_fit_is_refused(runs: Runner) -> None:
    for batch_size in (10**8, 10**12, 2**63 - 1):
        with pytest.raises(
            UserError, match=r"GiB of memory are expected to be needed, [\d.,]+ GiB are there\. A smaller"
        ):
            runs.plan("absurd", batch_size=batch_size, block_size=64)
