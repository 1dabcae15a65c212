"""What only the transformers engine does: batches, shared prefill, cohorts.

What all owe: tests/contracts/test_engine.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rayloop.core.failures import DataFailure, InfrastructureFailure, WorkerLost
from rayloop.core.types import Cohort, Completion, FinishReason, Sampling, TokenPrompt, Version
from rayloop.engines.generation import transformers
from rayloop.engines.generation.decoding import Decoder, DecodeRequest
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import ModelSettings
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine, full_logprobs, image, prompt, vision_tokens

GREEDY = Sampling(temperature=0.0, max_tokens=12)


def many(folder: Path, **settings: object) -> Callable[..., list[Completion]]:
    """Decode requests together on a fresh engine."""

    def run(*requests: tuple[TokenPrompt, Sampling]) -> list[Completion]:
        async def go() -> list[Completion]:
            served = await engine(folder, **settings)
            try:
                return await asyncio.gather(*(served.generate(*request) for request in requests))
            finally:
                served.close()

        return asyncio.run(go())

    return run


def close(left: Completion, right: Completion) -> bool:
    return left.token_ids == right.token_ids and np.allclose(
        left.logprobs, right.logprobs, atol=1e-4
    )


def test_image_features_that_enter_many_layers(tiny_vlm: Path, tmp_path: Path) -> None:
    """Qwen3-VL mixes image features into several layers: its images go through the model's own
    forward.
    """
    folder = shutil.copytree(tiny_vlm, tmp_path / "qwen3_vl")
    base = AutoConfig.from_pretrained(folder)
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    grid = {"patch_size": 14, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": base.text_config.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10.0,
                "mrope_section": [4, 6, 6],
            },
            "initializer_range": 0.1,
        },
        vision_config={**vision, **grid, "initializer_range": 0.1},
        image_token_id=base.image_token_id,
        video_token_id=base.video_token_id,
        vision_start_token_id=base.vision_start_token_id,
        vision_end_token_id=base.vision_end_token_id,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    sampling = Sampling(max_tokens=6, banned_tokens=vision_tokens(folder))
    requests = [
        prompt(folder, image(84, 56), "zoom"),
        prompt(folder, "text only"),
        prompt(folder, image(84, 56), "zoom"),
    ]
    for request, done in zip(
        requests, many(folder)(*((r, sampling) for r in requests)), strict=True
    ):
        expected = full_logprobs(folder, request, done.token_ids, sampling)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


def test_an_image_changes_the_logprobs(tiny_vlm: Path) -> None:
    sampling = dataclasses.replace(GREEDY, banned_tokens=vision_tokens(tiny_vlm))
    one, other = (prompt(tiny_vlm, "See ", image(84, 56, seed=seed)) for seed in (1, 2))
    left, right = many(tiny_vlm)((one, sampling), (other, sampling))
    assert not np.allclose(left.logprobs, right.logprobs, atol=1e-3)


def test_a_group_shares_prefill_and_equals_separate_requests(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_tokens=8, banned_tokens=vision_tokens(tiny_vlm))
    group = [prompt(tiny_vlm, image(84, 56), "what?", seed=seed) for seed in range(5)]
    stranger = prompt(tiny_vlm, "another and longer prompt, to pad the group", seed=9)
    alone = [many(tiny_vlm)((request, sampling))[0] for request in [*group, stranger]]

    encoded, prefilled = [], []
    model_type = type(load_model(ModelSettings(path=str(tiny_vlm))))
    encode, forward = model_type.get_image_features, model_type.forward

    def counting(self: Any, pixels: Tensor, grid: Tensor, **kwargs: Any) -> Any:
        encoded.append(len(grid))
        return encode(self, pixels, grid, **kwargs)

    def measuring(self: Any, **kwargs: Any) -> Any:
        prefilled.append(kwargs["position_ids"].shape[1:])
        return forward(self, **kwargs)

    monkeypatch.setattr(model_type, "get_image_features", counting)
    monkeypatch.setattr(model_type, "forward", measuring)
    together = many(tiny_vlm)(*((request, sampling) for request in [*group, stranger]))
    assert all(close(*pair) for pair in zip(alone, together, strict=True))
    assert len({completion.token_ids for completion in together[:5]}) > 1
    assert encoded == [1]
    assert prefilled == [(2, len(stranger.token_ids))] + [(6, 1)] * 7


def test_later_turns_reuse_the_image_until_the_weights_change(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = type(load_model(ModelSettings(path=str(tiny_vlm))))
    encode = model_type.get_image_features
    encoded = []

    def counting(self: Any, pixels: Tensor, grid: Tensor, **kwargs: Any) -> Any:
        encoded.append(grid.tolist())
        return encode(self, pixels, grid, **kwargs)

    monkeypatch.setattr(model_type, "get_image_features", counting)

    async def test(engine: TransformersEngine) -> None:
        first = prompt(tiny_vlm, image(84, 56), "zoom")
        await engine.generate(first, GREEDY)
        await engine.generate(
            prompt(tiny_vlm, image(84, 56), "zoom ok", image(56, 56), "and?"), GREEDY
        )
        assert encoded == [[[1, 4, 6]], [[1, 4, 4]]]
        await engine.load(manifest(Version(0, 1), weights(tiny_vlm)), weights(tiny_vlm))
        await engine.generate(first, GREEDY)
        assert len(encoded) == 3

    served(tiny_vlm, test)


def test_samples_follow_the_distribution(tiny_text: Path) -> None:
    """First tokens over many seeds against the model's probabilities: chi-square within 5 standard
    deviations.
    """
    sampling = Sampling(temperature=1.3, max_tokens=1)
    base = prompt(tiny_text, "What is 3 + 9?")
    n = 3000
    done = many(tiny_text, max_sequences=n)(
        *((dataclasses.replace(base, seed=seed), sampling) for seed in range(n))
    )
    model = load_model(ModelSettings(path=str(tiny_text)))
    with torch.no_grad():
        logits = model(torch.tensor([base.token_ids])).logits[0, -1]
    expected = n * torch.softmax(logits / sampling.temperature, -1).double().numpy()
    counts = np.bincount([completion.token_ids[0] for completion in done], minlength=len(expected))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    predicted = np.append(expected[common], expected[~common].sum())
    chi_square = float(((observed - predicted) ** 2 / predicted).sum())
    degrees = len(observed) - 1
    assert degrees > 50
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(tiny_text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_text)
    base = prompt(tiny_text, "The answer is")
    free, *_ = many(tiny_text)((base, GREEDY))
    text = tokenizer.decode(free.token_ids)
    stop = text[len(tokenizer.decode(free.token_ids[:5])) - 1 :][:2]
    n = next(n for n in range(1, 13) if stop in tokenizer.decode(free.token_ids[:n]))
    assert n < 12
    stopped, held = many(tiny_text)(
        (base, dataclasses.replace(GREEDY, stop=("never this", stop))),
        (base, dataclasses.replace(GREEDY, stop=(stop,), min_tokens=n + 2)),
    )
    assert stopped.token_ids == free.token_ids[:n]
    assert stopped.finish is FinishReason.STOP_STRING
    assert held.token_ids == free.token_ids[: n + 2]


def test_requests_keep_their_own_budget_and_the_batch_shrinks(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [prompt(tiny_vlm, "See", image(56, 56, seed=i), "x" * i, seed=i) for i in range(4)]
    budgets = [2, 12, 3, 7]
    alone = [
        many(tiny_vlm)((r, Sampling(max_tokens=n, banned_tokens=vision_tokens(tiny_vlm))))[0]
        for r, n in zip(base, budgets, strict=True)
    ]
    sizes: list[int] = []
    model_type = type(load_model(ModelSettings(path=str(tiny_vlm))))
    forward = model_type.forward

    def measuring(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["position_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(model_type, "forward", measuring)
    done = many(tiny_vlm)(
        *(
            (r, Sampling(max_tokens=n, banned_tokens=vision_tokens(tiny_vlm)))
            for r, n in zip(base, budgets, strict=True)
        )
    )
    assert [len(completion.token_ids) for completion in done] == budgets
    assert all(close(*pair) for pair in zip(alone, done, strict=True))
    assert sizes[0] == 4
    assert sizes[-1] == 1


def test_bfloat16_is_close_to_float32(tiny_vlm: Path) -> None:
    request = prompt(tiny_vlm, "See ", image(84, 56))
    sampling = dataclasses.replace(GREEDY, max_tokens=1, banned_tokens=vision_tokens(tiny_vlm))
    half = many(tiny_vlm, dtype="bfloat16")((request, sampling))[0]
    expected = full_logprobs(tiny_vlm, request, half.token_ids, sampling)
    torch.testing.assert_close(torch.tensor(half.logprobs), expected, atol=0.1, rtol=0)


def test_one_broken_prompt_does_not_harm_the_others(tiny_vlm: Path) -> None:
    good, bad = (
        prompt(tiny_vlm, "See ", image(84, 56)),
        prompt(tiny_vlm, "See ", image(84, 56, seed=1)),
    )
    corrupt = dataclasses.replace(
        bad, images=(dataclasses.replace(bad.images[0], data=b"not an image"),)
    )
    stray = dataclasses.replace(good, images=())

    async def go() -> None:
        served = await engine(tiny_vlm)
        answers = await asyncio.gather(
            *(served.generate(p, GREEDY) for p in (corrupt, good, stray)), return_exceptions=True
        )
        assert isinstance(answers[0], DataFailure)
        assert isinstance(answers[1], Completion)
        assert isinstance(answers[2], DataFailure)
        served.close()

    asyncio.run(go())


def test_text_model_refuses_images(tiny_text: Path) -> None:
    with pytest.raises(DataFailure, match="text-only"):
        many(tiny_text)(
            (dataclasses.replace(prompt(tiny_text, "x"), images=(image(56, 56),)), GREEDY)
        )


def served(
    folder: Path,
    test: Callable[[TransformersEngine], Coroutine[Any, Any, None]],
    **settings: object,
) -> None:
    """Run ``test`` with an engine that serves version 0.0."""

    async def go() -> None:
        started = await engine(folder, **settings)
        try:
            await asyncio.wait_for(test(started), 30)
        finally:
            started.close()

    asyncio.run(go())


def test_cancelling_a_request_leaves_the_rest(tiny_text: Path) -> None:
    async def test(engine: TransformersEngine) -> None:
        base = prompt(tiny_text, "What")
        doomed = asyncio.create_task(engine.generate(base, Sampling(max_tokens=200)))
        kept = asyncio.create_task(engine.generate(base, Sampling(max_tokens=20)))
        await asyncio.sleep(0.05)
        doomed.cancel()
        assert len((await kept).token_ids) == 20
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert len((await engine.generate(base, GREEDY)).token_ids) == 12

    served(tiny_text, test)


def test_turns_are_delivered_as_they_end(tiny_text: Path) -> None:
    async def test(engine: TransformersEngine) -> None:
        base = prompt(tiny_text, "What")
        slow = asyncio.create_task(engine.generate(base, Sampling(max_tokens=400)))
        assert len((await engine.generate(base, Sampling(max_tokens=1))).token_ids) == 1
        assert not slow.done()
        assert engine.health().running == 1
        slow.cancel()

    served(tiny_text, test)


def test_requests_that_trickle_in_share_a_batch(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    decode = Decoder.decode

    def counting(self: Decoder, rows: Sequence[DecodeRequest]) -> None:
        batches.append(len(rows))
        decode(self, rows)

    monkeypatch.setattr(Decoder, "decode", counting)

    async def test(engine: TransformersEngine) -> None:
        waiting = []
        for seed in range(9):
            waiting.append(
                asyncio.create_task(engine.generate(prompt(tiny_text, "What", seed=seed), GREEDY))
            )
            await asyncio.sleep(0.1)
        await asyncio.gather(*waiting)
        assert batches == [8, 1]

    monkeypatch.setattr(transformers, "FIRST_WAIT_S", 0.5)
    served(tiny_text, test, max_sequences=8)


def test_a_batch_waits_twice_as_long_as_requests_kept_it_waiting_lately() -> None:
    measured = transformers.Arrivals()
    assert measured.wait == transformers.FIRST_WAIT_S, "nothing is known"
    measured.decoded([0.5], 0.4)
    assert measured.wait == transformers.FIRST_WAIT_S, "one alone shows nothing"
    measured.decoded([1.0, 1.01, 1.015], 0.4)
    assert measured.wait == pytest.approx(0.02)
    measured.decoded([2.0] * 8, 0.4)
    assert measured.wait == pytest.approx(0.02), "the one before counts still"
    measured.decoded([2.04], 0.4)
    assert measured.wait == pytest.approx(0.08), "it came 40 ms too late for the batch before"
    measured.decoded([3.0, 3.2], 0.4)
    assert measured.wait == pytest.approx(0.08), "what is far apart belongs to another batch"
    measured.decoded([4.0, 4.09], 0.4)
    assert measured.wait == pytest.approx(0.1), "no more than a quarter of what a batch takes"
    for start in range(transformers.COUNTED_BATCHES):
        measured.decoded([5.0 + start] * 2, 0.4)
    assert measured.wait == transformers.SHORTEST_WAIT_S


def test_pause_waits_for_the_batch_and_holds_the_next(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: TransformersEngine) -> None:
        base = prompt(tiny_text, "What")
        running = asyncio.create_task(engine.generate(base, Sampling(max_tokens=200)))
        while not engine.health().running:
            await asyncio.sleep(0.001)
        await engine.pause()
        assert running.done()
        held = asyncio.create_task(engine.generate(base, GREEDY))
        await asyncio.sleep(0.1)
        assert not held.done()
        assert engine.health().waiting == 1
        await engine.resume()
        await held

    monkeypatch.setattr(transformers, "FIRST_WAIT_S", 0.0)
    served(tiny_text, test)


def test_a_cohort_is_one_batch_whatever_arrives_beside_it(tiny_text: Path) -> None:
    """Bit-equal log-probs in any order of arrival, with strangers about."""
    sampling = Sampling(max_tokens=10)
    members = [
        dataclasses.replace(prompt(tiny_text, "What " + "is " * i, seed=i), cohort=Cohort("g", 3))
        for i in range(3)
    ]
    stranger = prompt(tiny_text, "Click the red button below the dialog and wait", seed=9)

    def decode(order: list[int], strangers: int) -> dict[int, Completion]:
        done: dict[int, Completion] = {}

        async def test(engine: TransformersEngine) -> None:
            async def play(i: int) -> None:
                done[i] = await engine.generate(members[i], sampling)

            beside = [
                asyncio.create_task(engine.generate(stranger, sampling)) for _ in range(strangers)
            ]
            waiting = []
            for i in order:
                waiting.append(asyncio.create_task(play(i)))
                await asyncio.sleep(0.03)
            await asyncio.gather(*waiting, *beside)

        served(tiny_text, test)
        return done

    assert decode([0, 1, 2], 0) == decode([2, 0, 1], 4)


def test_a_cohort_waits_for_its_members_until_they_leave_and_fails_without_them(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def member(seed: int, key: str) -> TokenPrompt:
        return dataclasses.replace(prompt(tiny_text, "What", seed=seed), cohort=Cohort(key, 2))

    async def patient(engine: TransformersEngine) -> None:
        first = asyncio.create_task(engine.generate(member(0, "a"), GREEDY))
        await asyncio.sleep(0.2)
        assert not first.done()
        await engine.leave("a")
        await first
        await engine.generate(member(0, "a"), GREEDY)

    async def hasty(engine: TransformersEngine) -> None:
        with pytest.raises(
            InfrastructureFailure, match=r"1 of group b did not come within 0.2 s.*Give"
        ) as raised:
            await engine.generate(member(0, "b"), GREEDY)
        assert not isinstance(raised.value, WorkerLost), "the engine is well"
        await engine.generate(prompt(tiny_text, "What"), GREEDY)

    served(tiny_text, patient)
    monkeypatch.setattr(transformers, "COHORT_TIMEOUT_S", 0.2)
    served(tiny_text, hasty)


def weights(folder: Path) -> dict[str, Tensor]:
    return hf_state(load_model(ModelSettings(path=str(folder))))


def test_load_replaces_the_weights_and_a_tied_head_follows(tiny_vlm: Path) -> None:
    request = prompt(tiny_vlm, "See ", image(84, 56))
    sampling = dataclasses.replace(GREEDY, banned_tokens=vision_tokens(tiny_vlm))

    async def test(engine: TransformersEngine) -> None:
        before = await engine.generate(request, sampling)
        for part in ("embed_tokens", "layers.1.mlp.up_proj", "visual.blocks.0", "visual.merger"):
            changed = {
                name: tensor * 1.5 if part in name else tensor
                for name, tensor in weights(tiny_vlm).items()
            }
            await engine.load(manifest(Version(0, 1), changed), changed)
            after = await engine.generate(request, sampling)
            assert after.version == engine.health().version == Version(0, 1)
            assert after.logprobs != before.logprobs, part
        await engine.load(manifest(Version(1, 1), weights(tiny_vlm)), weights(tiny_vlm))
        assert dataclasses.replace(before, version=Version(1, 1)) == await engine.generate(
            request, sampling
        )
        scaled = {
            name: tensor * 0.5 if "embed" in name else tensor
            for name, tensor in weights(tiny_vlm).items()
        }
        await engine.load(manifest(Version(1, 2), scaled), scaled)
        model = engine._model
        assert torch.equal(model.lm_head.weight, scaled["model.embed_tokens.weight"])

    served(tiny_vlm, test)


def test_a_crash_while_decoding_reaches_the_callers_and_the_next_batch_runs(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: TransformersEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                type(engine._model),
                "forward",
                lambda *args, **kwargs: torch.zeros(2) + torch.zeros(3),
            )
            with pytest.raises(WorkerLost, match="must match"):
                await engine.generate(prompt(tiny_text, "What"), GREEDY)
        await engine.generate(prompt(tiny_text, "What"), GREEDY)

    served(tiny_text, test)
