"""Attention over packed sequences, batched by length: the cost of packing is then that of the sequences.

transformers' own SDPA masks a language model's whole packed row instead, which computes (and, on most kernels, reads)
[T, T] per layer, and calls the kernel for every image and window of a vision tower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether the model's attention finds the prompt that several samples of a row have in common."""
    return bool(model.config.get_text_config()._attn_implementation == PACKED_SDPA)


def use_packed_vision(model: PreTrainedModel) -> None:
    """Let a vision tower that runs SDPA run it once for all windows (or images) of one size."""
    if model.config.vision_config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_VISION, _packed_vision)
        model.set_attn_implementation({"vision_config": PACKED_VISION})


class _Sequences(NamedTuple):
    """The sequences of a packed row [n]. The ``shared`` first tokens of one lie at ``roots``, the others at ``starts``."""

    lengths: Tensor
    shared: Tensor
    roots: Tensor
    starts: Tensor


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

    What begins at position P > 0 continues the first P tokens of the last sample that began at 0. Samples of a similar
    length are padded at their ends to the longest of them, which causal attention never sees.
    """
    positions = position_ids[0]
    starts = (positions.diff(prepend=positions[:1]) != 1).nonzero()[:, 0]
    shared = positions[starts]
    lengths = shared + torch.cat([starts, starts.new_tensor([len(positions)])]).diff()
    roots = torch.where(shared == 0, starts, 0).cummax(0).values
    size = lengths.log2().ceil()
    kinds = torch.where(shared == 0, size, -size)
    return _attend(module, query, key, value, _Sequences(lengths, shared, roots, starts), kinds, **options), None


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
    lengths, starts = cu_seq_lens_q.diff(), cu_seq_lens_q[:-1]
    sequences = _Sequences(lengths, torch.zeros_like(lengths), starts, starts)
    return _attend(module, query, key, value, sequences, lengths, **options), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sequences: _Sequences, kinds: Tensor, **options: Any
) -> Tensor:
    """Attention [1, T, heads, d] within ``sequences``, one call for all of one of ``kinds`` [n]."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    outputs, places = [], []
    for kind in kinds.unique():
        own, seen, mask, real = _batch(_Sequences(*(field[kinds == kind] for field in sequences)), len(queries))
        forward = _plain if _plain_is_faster(query, seen.shape[1]) else sdpa_attention_forward
        output, _ = forward(module, _take(queries, own), _take(keys, seen), _take(values, seen), mask, **options)
        outputs.append(output.flatten(0, 1).flatten(1).index_select(0, real))
        places.append(own.flatten()[real])
    order = torch.cat(places).argsort()
    return torch.cat(outputs).index_select(0, order).view(1, *queries.shape)


def _batch(sequences: _Sequences, total: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Indices of the queries [n, Q] and keys [n, K]; a mask [n, 1, Q, K] if the first keys are shared; real queries.

    ``real`` are the elements of the flattened indices of the queries that are no padding.
    """
    lengths, shared, roots, starts = (field[:, None] for field in sequences)
    ahead = torch.arange(int((lengths - shared).max()), device=lengths.device)
    steps = torch.arange(int(lengths.max()), device=lengths.device)
    own = (starts + ahead).clamp(max=total - 1)
    real = (ahead < lengths - shared).flatten().nonzero()[:, 0]
    if not shared.any():
        return own, own, None, real
    seen = torch.where(steps < shared, roots + steps, starts - shared + steps).clamp(max=total - 1)
    return own, seen, (steps <= shared[..., None] + ahead[:, None])[:, None], real


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """[n, heads, L, d] of ``rows`` [T, heads, d]."""
    taken = rows.flatten(1).index_select(0, index.flatten())
    return taken.view(*index.shape, *rows.shape[1:]).transpose(1, 2)


def _plain_is_faster(query: Tensor, length: int) -> bool:
    """On CPUs, SDPA's backward pass is slow in bfloat16 and for short sequences (docs/performance.md)."""
    return query.device.type == "cpu" and length <= (2048 if query.dtype == torch.bfloat16 else 128)


def _plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """``softmax(query keyᵀ scaling) value`` [n, L, heads, d]; without a ``mask`` causal where module or options say so."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query * scaling) @ key.transpose(2, 3)
    if mask is None and options.get("is_causal", module.is_causal):
        mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).transpose(1, 2), None
