"""Attention over packed samples, one by one: the cost of packing is then that of the samples, not of their square sum.

transformers' own SDPA masks the whole row instead, which computes (and, on most kernels, reads) [T, T] per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_SDPA = "packed_sdpa"


def use_packed_sdpa(model: PreTrainedModel) -> None:
    """Let a model that runs SDPA run it sample by sample; other attention implementations are left as they are.

    transformers makes no mask for an implementation that it does not know, which is what is wanted here.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_SDPA, _packed_sdpa)
        model.set_attn_implementation(PACKED_SDPA)


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query``, ``key`` and ``value`` are [1, heads, T, d]; a sample begins where ``position_ids`` [1, T] are 0.

    The vision tower, which passes no ``position_ids``, has separated its images already.
    """
    if position_ids is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    starts = (position_ids[0] == 0).nonzero()[1:, 0].tolist()
    samples = zip(*(tensor.tensor_split(starts, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *sample, None, **options)[0] for sample in samples]
    return torch.cat(outputs, dim=1), None
