"""Attention of one new token over a cache, without a copy of the cache for every head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from rayloop.engines import attention
from rayloop.engines.attention import GROUPED_SDPA, use_grouped_decoding
from rayloop.engines.models import load_model
from rayloop.engines.settings import ModelSettings


@pytest.mark.parametrize("padded", [False, True])
def test_a_new_token_sees_what_it_saw_with_repeated_keys(tiny_text: Path, padded: bool) -> None:
    ids = torch.arange(20, 38).reshape(3, 6)
    mask = torch.ones(3, 7, dtype=torch.bool)
    if padded:
        mask[1, :4] = False
    logits = []
    for grouped in (False, True):
        model = load_model(ModelSettings(path=str(tiny_text)))
        if grouped:
            use_grouped_decoding(model)
            assert model.config._attn_implementation == GROUPED_SDPA
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)
            logits.append(model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert model.config.num_key_value_heads < model.config.num_attention_heads, "heads share keys here"


def test_only_sdpa_is_replaced(tiny_text: Path) -> None:
    model = load_model(ModelSettings(path=str(tiny_text), attention="eager"))
    use_grouped_decoding(model)
    assert model.config._attn_implementation == "eager"


def test_members_that_share_a_long_prompt_are_padded_by_their_own_length() -> None:
    """Groups of 8 with a prompt of 2,000 tokens and long-tailed answers: queries that are computed for nothing."""
    torch.manual_seed(0)
    answers = torch.empty(400).log_normal_(6.2, 0.7).clamp(16, 8192).int().tolist()
    needed, computed = 0, 0
    for first in range(0, len(answers), 8):
        own = [2000 + answers[first], *answers[first + 1 : first + 8]]
        starts = [0, *[2000] * 7]
        row = torch.cat([torch.arange(start, start + many) for start, many in zip(starts, own, strict=True)])[None]
        computed += sum(part.own.numel() for part in attention._samples(row).parts)
        needed += sum(own)
    assert computed / needed < 1.15
    short = torch.cat([torch.arange(70), *(torch.arange(60, 60 + many) for many in (1, 5, 12, 40))])[None]
    assert len(attention._samples(short).parts) == 2, "short answers are one call"
