"""With how many threads a process computes fastest on this CPU: timed, beside whatever else the machine does at that moment.

More is not always faster: threads wait for each other several hundred times per decoded token, and on cores that others use as
well each wait lasts until the last of them gets its turn (docs/performance.md). Timed is a small piece of the process's own kind of
work, in shapes of its model, once all actors are up and none of them computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayloop.engines.cores import usable
from rayloop.engines.linear import usual
from rayloop.engines.plain_attention import Heads, sdpa_passes
from rayloop.engines.timing import medians

SECONDS = 0.3
"""For all timings of a process, begun ones not counted."""
WORTH = 0.9
"""More threads are taken where they need at most so much of the time that fewer need: else cores are left to others."""
SIDE = 1024
"""Larger layers are timed as if they had so many rows and columns."""
WORK = 2e8
"""FLOP of a trainer's timed product: 2 ms at 100 GFLOP/s."""
LENGTH = 128
"""Tokens of the sequences that are attended."""
SEQUENCES = 256
"""At most: an engine decodes ``max_sequences`` together."""
LAYERS = 4
"""That a step of decoding consists of in a timing, besides the head."""
VOCABULARY = 8192
"""At most, of the head."""


def candidates(sharing: int = 1) -> list[int]:
    """The numbers that are tried when so many processes share this one's cores: one, half of its share, all of it."""
    most = max(1, usable() // max(1, sharing))
    return sorted({1, max(1, most // 2), most})


def use_fastest(work: Callable[[], object], sharing: int = 1) -> int:
    """Let the calling thread compute with the number of threads that does ``work`` fastest; returns it. Nothing is timed where one
    thread is all there is."""
    tried = candidates(sharing)
    chosen = tried[0] if len(tried) == 1 else _fewest(medians({n: partial(_with, n, work) for n in tried}, SECONDS))
    torch.set_num_threads(chosen)
    return chosen


def _fewest(took: dict[int, float]) -> int:
    """Of the numbers of threads with their seconds: each step up must pay."""
    chosen, *more = sorted(took)
    for number in more:
        if took[number] <= WORTH * took[chosen]:
            chosen = number
    return chosen


def _with(threads: int, work: Callable[[], object]) -> float:
    """Seconds. The threads are there before the clock starts."""
    torch.set_num_threads(threads)
    torch.ones(1 << 16).exp_()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def training(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward pass of the layer that the model has most of, and of attention."""
    out, into = (min(side, SIDE) for side in usual(model))
    drawn = torch.Generator().manual_seed(0)  # its own: what the process draws must not depend on what was measured
    sizes = ((int(WORK / (2 * out * into)), into), (out, into))
    rows, weight = (torch.randn(size, generator=drawn).to(dtype).requires_grad_() for size in sizes)
    attention = sdpa_passes(Heads.of(model.config), dtype, LENGTH, drawn)

    @torch.enable_grad()
    def work() -> None:
        activation = nn.functional.silu(nn.functional.linear(rows, weight))
        torch.autograd.grad((activation * activation).sum(), (rows, weight))
        attention()

    return work


def decoding(model: PreTrainedModel, dtype: torch.dtype, sequences: int) -> Callable[[], None]:
    """One token of so many sequences through some layers like the model's and its head: small operations, each waited for."""
    (out, into), heads = (min(side, SIDE) for side in usual(model)), Heads.of(model.config)
    config, sequences = model.config.get_text_config(), min(sequences, SEQUENCES)
    drawn = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=drawn).to(dtype)

    hidden, weight, head = made(sequences, into), made(out, into), made(min(config.vocab_size, VOCABULARY), into)
    query = made(sequences, heads.key, heads.query // heads.key, heads.width)
    keys = made(sequences, heads.key, LENGTH, heads.width)

    @torch.inference_mode()
    def work() -> None:
        rows: Tensor = hidden
        for _ in range(LAYERS):
            (query @ keys.transpose(2, 3)).float().softmax(-1).to(dtype) @ keys
            inner = nn.functional.silu(nn.functional.linear(nn.functional.rms_norm(rows, rows.shape[-1:]), weight))
            rows = hidden + nn.functional.linear(inner, weight.t())
        nn.functional.linear(rows, head).float().log_softmax(-1)

    return work
