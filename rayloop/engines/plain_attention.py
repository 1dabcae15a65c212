"""Attention as plain matrix products, which on some CPUs is faster than SDPA for short sequences: up to what length is measured.

On an AMD processor SDPA's backward pass was slow in bfloat16 up to 2,048 tokens; on an Intel one SDPA is six times as fast at 1,024
tokens, and always faster in float32 (docs/performance.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rayloop.engines.timing import GAIN, timed

UNMEASURED = {torch.float32: 128, torch.bfloat16: 2048}
"""Longest sequences, in tokens, that plain products attend where nothing is measured, whatever the machine."""
LENGTHS = (32, 128, 512, 2048)
"""That are tried, in this order; longer sequences are SDPA's."""
TOKENS = 512
"""Of all sequences that are attended in one timing, at least one sequence."""
SECONDS = 0.1
"""For each length, begun timings not counted."""

_limits = dict(UNMEASURED)


def choose(config: PreTrainedConfig, dtype: torch.dtype, kernels: Literal["auto", "torch", "onednn"]) -> None:
    """Find out for which lengths this process uses plain products in ``dtype``. Named kernels compute as on any machine."""
    if torch.cuda.is_available() or dtype not in UNMEASURED:
        return
    _limits[dtype] = _measured(Heads.of(config), dtype, torch.get_num_threads()) if kernels == "auto" else UNMEASURED[dtype]


def chosen(dtype: torch.dtype) -> str:
    """For people: what attends in ``dtype`` on this CPU; "" on GPUs."""
    if torch.cuda.is_available():
        return ""
    limit = _limits.get(dtype, 0)
    return f"plain attention up to {limit} tokens" if limit else "sdpa attention"


def plain_is_faster(query: Tensor, length: int) -> bool:
    """Whether sequences of so many keys are better attended by ``plain_attention``."""
    return query.device.type == "cpu" and length <= _limits.get(query.dtype, 0)


def plain_attention(
    module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """``softmax(query keyᵀ scaling) value`` [n, L, heads, d]; without a ``mask`` causal where ``module`` or options say so."""
    key, value = _repeated(query, key, value)
    scores = (query * scaling) @ key.transpose(2, 3)
    if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
        mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2), None


class Heads(NamedTuple):
    """How many heads a layer's queries have, how many its keys and values, and how wide each is."""

    query: int
    key: int
    width: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Heads:
        """Those of a model's language part."""
        text = config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(text.num_attention_heads, text.num_key_value_heads, width)


def _repeated(query: Tensor, *kept: Tensor) -> list[Tensor]:
    """Keys and values, once for each head of ``query``."""
    return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in kept]


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain_attention(None, query, key, value, None, scaling=query.shape[-1] ** -0.5, is_causal=True)[0]


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = nn.functional.scaled_dot_product_attention(query, *_repeated(query, key, value), is_causal=True)
    return output.transpose(1, 2).contiguous()


@cache
def _measured(heads: Heads, dtype: torch.dtype, threads: int) -> int:
    """The longest of ``LENGTHS`` up to which plain products are faster, 0 for none. Once in a process: it then computes alike."""
    drawn = torch.Generator().manual_seed(0)  # its own: what the process draws must not depend on what was measured
    limit = 0
    for length in LENGTHS:
        inputs = _inputs(heads, dtype, length, drawn)
        until = time.perf_counter() + SECONDS
        took = timed({"plain": partial(_passes, _plain, inputs), "sdpa": partial(_passes, _sdpa, inputs)}, until)
        if took["plain"] >= GAIN * took["sdpa"]:
            break
        limit = length
    return limit


def sdpa_passes(heads: Heads, dtype: torch.dtype, length: int, drawn: torch.Generator) -> Callable[[], None]:
    """Both passes of SDPA over sequences of this length, for timings."""
    return partial(_passes, _sdpa, _inputs(heads, dtype, length, drawn))


def _inputs(heads: Heads, dtype: torch.dtype, length: int, drawn: torch.Generator) -> list[Tensor]:
    """Query, key and value [n, heads, length, d] of ``TOKENS`` tokens in all."""
    count = max(1, TOKENS // length)
    shapes = [(count, number, length, heads.width) for number in (heads.query, heads.key, heads.key)]
    return [torch.randn(shape, generator=drawn).to(dtype).requires_grad_() for shape in shapes]


@torch.enable_grad()
def _passes(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    torch.autograd.grad(attention(*inputs).sum(), inputs)
