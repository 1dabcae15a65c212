"""Attention over packed sequences, batched by length: the cost of packing is then that of the sequences.

transformers' own SDPA masks a language model's whole packed row instead, which computes (and, on most kernels, reads)
[T, T] per layer, and calls the kernel for every image and window of a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_SDPA = "packed_sdpa"

PACKED_VISION = "packed_sdpa_like_flash"
"""transformers leaves it to implementations with "flash" in their name to keep images and windows apart."""


def use_packed_sdpa(model: PreTrainedModel) -> None:
    """Let a language model that runs SDPA run it sample by sample; other attention implementations are left as they are.

    transformers makes no mask for an implementation that it does not know, which is what is wanted here.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_SDPA, _packed_sdpa)
        model.set_attn_implementation({"": PACKED_SDPA, "text_config": PACKED_SDPA})


def use_packed_vision(model: PreTrainedModel) -> None:
    """Let a vision tower that runs SDPA run it once for all windows (or images) of one size."""
    if model.config.vision_config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_VISION, _packed_vision)
        model.set_attn_implementation({"vision_config": PACKED_VISION})


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key`` and ``value`` are [1, heads, T, d]; a sample begins where ``position_ids`` [1, T] are 0.

    Samples of a similar length are padded at their ends to the longest of them, which causal attention never sees.
    """
    lengths = _lengths((position_ids[0] == 0).nonzero()[:, 0], query.shape[2])
    return _attend(module, query, key, value, lengths, lengths.log2().ceil(), **options), None


def _packed_vision(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key`` and ``value`` are [1, heads, T, d]; ``cu_seq_lens_q`` are the borders of windows or images."""
    lengths = cu_seq_lens_q.diff()
    return _attend(module, query, key, value, lengths, lengths, **options), None


def _lengths(starts: Tensor, total: int) -> Tensor:
    return torch.cat([starts, starts.new_tensor([total])]).diff()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, kinds: Tensor, **options: Any
) -> Tensor:
    """Attention [1, T, heads, d] within sequences of ``lengths``, one call for all sequences of one of ``kinds``."""
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs, places = [], []
    for index, real in _batches(lengths, kinds):
        forward = _plain if _plain_is_faster(query, index.shape[1]) else sdpa_attention_forward
        output, _ = forward(module, *(_take(row, index) for row in rows), None, **options)
        outputs.append(output.flatten(0, 1).flatten(1).index_select(0, real))
        places.append(index.flatten()[real])
    order = torch.cat(places).argsort()
    return torch.cat(outputs).index_select(0, order).view(1, *rows[0].shape)


def _batches(lengths: Tensor, kinds: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the sequences of one kind: their tokens [n, L], and which elements [real] of the flattened are no padding."""
    starts = lengths.cumsum(0) - lengths
    for kind in kinds.unique():
        chosen = kinds == kind
        steps = torch.arange(int(lengths[chosen].max()), device=lengths.device)
        index = (starts[chosen, None] + steps).clamp(max=int(lengths.sum()) - 1)
        yield index, (steps < lengths[chosen, None]).flatten().nonzero()[:, 0]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """[n, heads, L, d] of ``rows`` [T, heads, d]."""
    taken = rows.flatten(1).index_select(0, index.flatten())
    return taken.view(*index.shape, *rows.shape[1:]).transpose(1, 2)


def _plain_is_faster(query: Tensor, length: int) -> bool:
    """On CPUs, SDPA's backward pass is slow in bfloat16 and for short sequences (docs/performance.md)."""
    return query.device.type == "cpu" and length <= (2048 if query.dtype == torch.bfloat16 else 128)


def _plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """``softmax(query keyᵀ scaling) value`` [n, L, heads, d]; causal where ``module`` or the options say so."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query * scaling) @ key.transpose(2, 3)
    if options.get("is_causal", module.is_causal):
        scores = scores.masked_fill(scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2), None
