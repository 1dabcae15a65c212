"""Attention of one new token over a cache without a copy for every head, and attention as plain
products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rayloop.core.failures import ConfigError
from rayloop.engines import attention
from rayloop.engines.attention import GROUPED_SDPA, PLAIN_ATTENTION_TOKENS, use_grouped_decoding
from rayloop.engines.models import load_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.scorer import FrozenScorer
from tests.engines.training import engine, mixed_items


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
            logits.append(
                model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache).logits
            )
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert model.config.num_key_value_heads < model.config.num_attention_heads, (
        "heads share keys here"
    )


def test_only_sdpa_is_replaced(tiny_text: Path) -> None:
    model = load_model(ModelSettings(path=str(tiny_text)))
    model.set_attn_implementation("eager")
    use_grouped_decoding(model)
    assert model.config._attn_implementation == "eager"


def test_members_that_share_a_long_prompt_are_padded_by_their_own_length() -> None:
    """Groups of 8 with a prompt of 2,000 tokens and long-tailed answers: queries that are computed
    for nothing.
    """
    torch.manual_seed(0)
    answers = torch.empty(400).log_normal_(6.2, 0.7).clamp(16, 8192).int().tolist()
    needed, computed = 0, 0
    for first in range(0, len(answers), 8):
        own = [2000 + answers[first], *answers[first + 1 : first + 8]]
        starts = [0, *[2000] * 7]
        row = torch.cat(
            [torch.arange(start, start + many) for start, many in zip(starts, own, strict=True)]
        )[None]
        computed += sum(part.queries.numel() for part in attention._samples(row).parts)
        needed += sum(own)
    assert computed / needed < 1.15
    short = torch.cat(
        [torch.arange(70), *(torch.arange(60, 60 + many) for many in (1, 5, 12, 40))]
    )[None]
    assert len(attention._samples(short).parts) == 2, "short answers are one call"


class Causal(nn.Module):
    is_causal, num_key_value_groups = True, 2


@pytest.mark.parametrize("masked", [False, True])
def test_plain_products_give_the_values_and_gradients_of_sdpa(masked: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2)]
    mask = (torch.rand(3, 1, 5, 5) < 0.7) | torch.eye(5, dtype=torch.bool) if masked else None
    weights = torch.linspace(-1, 1, 3 * 5 * 4 * 8).reshape(3, 5, 4, 8)

    def passes(attend: Any) -> list[Tensor]:
        output = attend(Causal(), *inputs, mask, scaling=8**-0.5, dropout=0.0)[0]
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    for one, other in zip(
        passes(attention.plain_attention), passes(sdpa_attention_forward), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, SDPA attends")
@pytest.mark.parametrize(
    ("dtype", "length", "plain"),
    [
        (torch.bfloat16, PLAIN_ATTENTION_TOKENS, 1),
        (torch.bfloat16, PLAIN_ATTENTION_TOKENS + 1, 0),
        (torch.float32, 16, 0),
    ],
)
def test_short_sequences_in_bfloat16_are_plain_products(
    dtype: torch.dtype, length: int, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    real = {
        "plain_attention": attention.plain_attention,
        "sdpa_attention_forward": sdpa_attention_forward,
    }

    def noting(name: str) -> Any:
        return lambda *arguments, **options: (
            called.append(name) or real[name](*arguments, **options)
        )

    for name in real:
        monkeypatch.setattr(attention, name, noting(name))
    query, key, value = (torch.randn(1, heads, length, 8).to(dtype) for heads in (4, 2, 2))
    attention._packed_sdpa(
        Causal(), query, key, value, None, torch.arange(length)[None], scaling=8**-0.5
    )
    assert called == (["plain_attention"] if plain else ["sdpa_attention_forward"])


ROW = torch.cat(
    [
        torch.arange(begin, begin + many)
        for begin, many in ((0, 40), (0, 9), (9, 30), (9, 1), (0, 150), (100, 70))
    ]
)
"""Positions of samples alone and of two prompts that others continue."""


@pytest.mark.parametrize("window", [None, 16])
def test_flex_attention_sees_what_packed_sdpa_sees(window: int | None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(ROW), 16) for heads in (4, 2, 2)]
    options = {"scaling": 16**-0.5, "sliding_window": window}
    expected, _ = attention._packed_sdpa(Causal(), *inputs, None, ROW[None], **options)
    found, _ = attention._packed_flex(Causal(), *inputs, None, ROW[None], **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    inputs[2][0, :, 42] += 1.0
    changed, _ = attention._packed_flex(Causal(), *inputs, None, ROW[None], **options)
    seen = (changed - found).abs().amax((0, 2, 3)) > 1e-6
    assert (
        seen.nonzero()[:, 0].tolist() == [*range(42, 80)] if window is None else seen[42:58].any()
    )
    assert not seen[:42].any()
    assert not seen[80:].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it trains")
def test_flex_attention_scores_as_sdpa_and_refuses_to_train_on_a_cpu(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, played = (
        ModelSettings(path=str(tiny_vlm)),
        [item.trajectory for item in mixed_items(tiny_vlm)],
    )
    found = [FrozenScorer(model, FsdpSettings(dtype="float32")).logprobs(played)]
    monkeypatch.setenv("RAYLOOP_ATTENTION", "flex")
    scorer = FrozenScorer(model, FsdpSettings(dtype="float32"))
    found.append(scorer.logprobs(played))
    for one, other in zip(*found, strict=True):
        assert abs(one - other).max() < 1e-5
    assert (
        scorer._scorer.model.config.get_text_config()._attn_implementation == attention.PACKED_FLEX
    )
    with (
        pytest.raises(ConfigError, match="RAYLOOP_ATTENTION: flex has no backward pass on a CPU"),
        engine(tiny_vlm),
    ):
        pass
