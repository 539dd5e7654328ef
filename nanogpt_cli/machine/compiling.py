"""torch.compile for what training and evaluation call, all of it before the first step and with a way back."""

import subprocess

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nanogpt_cli.machine.device import Compute, inference
from nanogpt_cli.model.gpt import GPT


def compile_model(model: nn.Module, compute: Compute, rows: int, block_size: int) -> str:
    """Compile `model` in place and take the passes of a run: one forward and backward, one evaluation.

    Each is given tensors laid out as training's and evaluation's are, since whatever differs would be compiled again in
    the first step. A DDP wrapper is called itself: it splits the graph where gradients can already be sent. Every rank
    must call this.

    Returns what went wrong, in words, with the model back in eager mode; an empty text if nothing did. Compilation
    happens in the first call, so this is where a missing tool shows.
    """
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(bare, GPT)
    methods: list[tuple[nn.Module, str]] = [(bare, "forward")]
    if isinstance(bare, FSDPModule):  # the parts between which weights are gathered
        methods = [*((block, "forward") for block in bare.h), (bare, "embed"), (bare, "loss")]
    for module, name in methods:  # not Module.compile, which would trace FSDP's hooks too
        setattr(module, name, torch.compile(getattr(module, name)))
    block = torch.zeros(rows, block_size + 1, dtype=torch.long, device=compute.device)
    try:
        with inference(model), compute.autocast():
            model(block[:, :-1], block[:, 1:], reduction="none")
        with compute.autocast():
            loss = model(block[:, :-1].contiguous(), block[:, 1:].contiguous())
        loss.backward()  # last: after it FSDP shows its chunks again, whose gradients are to be dropped
    except torch.OutOfMemoryError:
        raise
    # what dynamo and inductor raise, and what comes of compilers they start
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        for module, name in methods:
            delattr(module, name)
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        model.zero_grad(set_to_none=model is bare)  # in place where they lie in DDP's buckets
    return ""
