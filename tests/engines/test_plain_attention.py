"""Attention as plain products: what SDPA gives, and up to which length it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn
from transformers import Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rayloop.engines import plain_attention
from rayloop.engines.plain_attention import UNMEASURED, _sdpa, choose, chosen, plain_is_faster
from rayloop.engines.timing import ROUNDS, timed

CONFIG = Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, SDPA attends")


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    before = dict(plain_attention._limits)
    plain_attention._measured.cache_clear()
    yield
    plain_attention._limits.update(before)
    plain_attention._measured.cache_clear()


class Causal(nn.Module):
    is_causal, num_key_value_groups = True, 2


@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_sdpa(masked: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2)]
    mask = (torch.rand(3, 1, 5, 5) < 0.7) | torch.eye(5, dtype=torch.bool) if masked else None
    outputs = [
        attention(Causal(), *inputs, mask, scaling=8**-0.5, dropout=0.0)[0]
        for attention in (plain_attention.plain_attention, sdpa_attention_forward)
    ]
    if not masked:
        outputs.append(_sdpa(*inputs))
    weights = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
    ours, *others = ([output, *torch.autograd.grad((output * weights).sum(), inputs)] for output in outputs)
    for theirs in others:
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("wins", "limit"), [((), 0), ((32, 128), 128), ((32, 512), 32), ((32, 128, 512, 2048), 2048)])
def test_the_limit_is_the_last_length_before_the_first_that_sdpa_wins(
    wins: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter(plain_attention.LENGTHS)

    def took(ways: Mapping[str, Callable[[], object]], until: float) -> dict[str, float]:
        return {"plain": 1.0 if next(lengths) in wins else 2.0, "sdpa": 1.5}

    monkeypatch.setattr(plain_attention, "timed", took)
    choose(CONFIG, BF16, "auto")
    query = torch.zeros(1, dtype=BF16)
    assert [length for length in plain_attention.LENGTHS if plain_is_faster(query, length)] == [
        length for length in plain_attention.LENGTHS if length <= limit
    ]
    assert chosen(BF16) == (f"plain attention up to {limit} tokens" if limit else "sdpa attention")


def test_named_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention, "timed", None)
    plain_attention._limits[BF16] = 0
    choose(CONFIG, BF16, "torch")
    assert plain_attention._limits[BF16] == UNMEASURED[BF16]


def test_a_timing_draws_nothing() -> None:
    before = torch.get_rng_state()
    choose(CONFIG, torch.float32, "auto")
    assert torch.equal(before, torch.get_rng_state())


def test_ways_run_in_turn_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    assert set(timed(ways, until=0.0)) == {"a", "b"}
    assert calls == ["a", "b"] * 3
    calls.clear()
    timed(ways, until=float("inf"))
    assert calls == ["a", "b"] * ROUNDS
