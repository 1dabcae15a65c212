"""What every generation engine owes: the model's own tokens and log-probs, whatever is loaded,
cancelled or damaged meanwhile.

One suite for all engines: transformers and the page's here, vLLM in its own environment (``make
test-vllm``). One of your own: add it to ``ENGINES`` (docs/bring_your_own/engine.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer

from rayloop.actors.failures import cause
from rayloop.actors.images import ImageCache
from rayloop.actors.rollout import RolloutActor
from rayloop.config.settings import Component, check_components
from rayloop.core.failures import DataFailure, WeightSyncError, WorkerLost
from rayloop.core.types import Completion, FinishReason, Sampling, TokenIds, TokenPrompt, Version
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import CustomEngine, EnginePlace, ModelSettings, build_engine
from rayloop.run.config import RunConfig
from rayloop.run.sections import RolloutSettings
from rayloop.transports.manifest import manifest
from tests.engines.prompts import (
    distributions,
    full_logprobs,
    hf_greedy,
    image,
    prompt,
    special,
    vision_tokens,
)
from tests.support.pages import write_snippets
from tests.support.runs import settings

pytestmark = pytest.mark.timeout(300)

VLLM_EXTRA = json.loads(os.environ.get("RAYLOOP_TEST_VLLM", '{"enforce_eager": true}'))
"""vLLM's own arguments; on a GPU `benchmarks/gpu` also asks for compilation and CUDA graphs."""
ENGINES = {
    "transformers": {"threads": 1},
    "page": {"use": "plain_engine.py:PlainEngine"},
    "vllm": {
        "kind": "vllm",
        "dtype": "float32",
        "extra": {"kv_cache_memory_bytes": 64 << 20, **VLLM_EXTRA},
    },
}
"""What stands in the configuration under ``rollout.engine``; ``page`` is that of
docs/bring_your_own/engine.md.
"""
TEXT_ONLY = ("page",)
GREEDY = Sampling(temperature=0.0, max_tokens=24)
START = Version(0, 0)
TOLERANCE = 1e-4


class Served:
    """A running engine on an event loop of its own.

    ``folder`` is the model that its first version is made of.
    """

    def __init__(self, kind: str, folder: Path, **settings: Any) -> None:
        self.kind, self.folder = kind, folder
        self.start = hf_state(load_model(ModelSettings(path=str(folder))))
        self._runner = asyncio.Runner()
        chosen = RolloutSettings.model_validate({"engine": {**ENGINES[kind], **settings}}).engine
        wanted = (
            CustomEngine(component=chosen, dtype="float32")
            if isinstance(chosen, Component)
            else chosen
        )
        self.engine: Any = build_engine(ModelSettings(path=str(folder)), wanted, EnginePlace())

    def run(self, test: Coroutine[Any, Any, Any]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(120):
                return await test

        return self._runner.run(within())

    async def load(self, tensors: Mapping[str, Tensor], version: Version = START) -> None:
        """As a rollout actor does it."""
        await self.engine.pause()
        try:
            await self.engine.load(manifest(version, tensors), tensors)
        finally:
            await self.engine.resume()

    def many(self, *requests: tuple[TokenPrompt, Sampling]) -> list[Completion]:
        """All at once."""

        async def go() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(*request) for request in requests))

        return self.run(go())

    def close(self) -> None:
        async def end() -> None:
            self.engine.close()

        if self.kind != "page":
            self.run(end())
        self._runner.close()


@pytest.fixture(
    scope="module", params=["transformers", "page", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "page":
            folder = write_snippets("bring_your_own/engine.md", tmp_path_factory.mktemp("page"))
            patch.setitem(ENGINES, "page", {"use": f"{folder}/{ENGINES['page']['use']}"})
        yield str(request.param)


@pytest.fixture(scope="module")
def pictures(kind: str, tiny_vlm: Path) -> Iterator[Served]:
    """Qwen2.5-VL, tied."""
    if kind in TEXT_ONLY:
        pytest.skip(f"{kind} is an engine for models of text")
    yield from serving(kind, tiny_vlm)


@pytest.fixture(scope="module")
def text(kind: str, tiny_text: Path) -> Iterator[Served]:
    """Qwen2, untied."""
    yield from serving(kind, tiny_text)


def serving(kind: str, folder: Path) -> Iterator[Served]:
    served = Served(kind, folder)
    with pytest.raises(WorkerLost, match="no weights"):
        served.many((prompt(folder, "too early"), GREEDY))
    served.run(served.load(served.start))
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(autouse=True)
def _weights_of_the_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test may load what it likes."""
    yield
    for name in {"pictures", "text"} & set(request.fixturenames):
        served = request.getfixturevalue(name)
        served.run(served.load(served.start))


def moved(served: Served, folder: Path) -> dict[str, Tensor]:
    """Other weights in every tensor, and a model folder with them."""
    noise = torch.Generator().manual_seed(0)
    other = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise)
        for name, tensor in served.start.items()
    }
    save_model(str(served.folder), folder, other)
    return other


def agree(
    served: Served, folder: Path, requests: list[TokenPrompt], sampling: Sampling
) -> list[Completion]:
    """Greedy tokens are those of transformers' own generate for the model of ``folder``, and so are
    their log-probs.
    """
    done = served.many(*((request, sampling) for request in requests))
    for request, completion in zip(requests, done, strict=True):
        assert list(completion.token_ids) == hf_greedy(
            folder, request, sampling.max_tokens, sampling.banned_tokens
        )
        close(folder, request, completion, sampling)
    return done


def close(folder: Path, request: TokenPrompt, done: Completion, sampling: Sampling) -> None:
    expected = full_logprobs(folder, request, done.token_ids, sampling)
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=TOLERANCE, rtol=0)


def questions(folder: Path) -> list[TokenPrompt]:
    """Sixteen, of several lengths."""
    return [prompt(folder, "What is 3 + 9? " * (i % 4) + f"Click {i}") for i in range(16)]


def looks(folder: Path) -> list[TokenPrompt]:
    """Four with images: shrunk, enlarged and as they are, one and several."""
    return [
        prompt(folder, "See ", image(84, 56), " and click"),
        prompt(folder, image(100, 70, seed=1), "zoom"),
        prompt(
            folder,
            image(56, 112, seed=2),
            "against",
            image(140, 84, seed=3),
            image(20, 20, seed=4),
            "?",
        ),
        prompt(folder, "twice", image(84, 56), "the same", image(84, 56)),
    ]


# The model's own tokens and log-probs -------------------------------------------------------------


def test_greedy_text_equals_generate(text: Served) -> None:
    done = agree(text, text.folder, questions(text.folder), GREEDY)
    assert {completion.finish for completion in done} == {FinishReason.LENGTH}
    assert {completion.version for completion in done} == {START}


def test_greedy_images_equal_generate(pictures: Served) -> None:
    sampling = dataclasses.replace(GREEDY, banned_tokens=vision_tokens(pictures.folder))
    requests = [*looks(pictures.folder), prompt(pictures.folder, "no image")]
    done = agree(pictures, pictures.folder, requests, sampling)
    assert len({completion.token_ids for completion in done}) > 1, (
        "what is said depends on what is shown"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    pictures: Served, temperature: float
) -> None:
    ends, banned = (
        special(pictures.folder, "<|im_end|>", "<|endoftext|>"),
        vision_tokens(pictures.folder),
    )
    sampling = Sampling(
        temperature, max_tokens=10, min_tokens=3, end_tokens=ends, banned_tokens=banned
    )
    requests = [
        dataclasses.replace(request, seed=seed)
        for seed, request in enumerate(looks(pictures.folder))
    ]
    done = pictures.many(*((request, sampling) for request in requests))
    assert all(3 <= len(one.token_ids) == len(one.logprobs) <= 10 for one in done)
    for request, one in zip(requests, done, strict=True):
        close(pictures.folder, request, one, sampling)


@pytest.mark.parametrize(
    "truncation",
    [
        {"top_p": 0.8},
        {"top_k": 5},
        {"top_p": 0.5, "top_k": 20, "temperature": 0.7},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_a_turn_comes_with_the_tokens_that_top_p_and_top_k_kept(
    text: Served, truncation: dict[str, Any]
) -> None:
    """The likeliest, as few as reach ``top_p`` among the ``top_k``; the log-probs are over them."""
    banned = vision_tokens(text.folder)
    sampling = Sampling(**{"max_tokens": 10, "banned_tokens": banned, **truncation})
    requests = [
        dataclasses.replace(request, seed=seed)
        for seed, request in enumerate(questions(text.folder)[:6])
    ]
    for request, done in zip(
        requests, text.many(*((request, sampling) for request in requests)), strict=True
    ):
        assert done.token_mask is not None
        every = distributions(text.folder, request, done.token_ids, sampling)
        for row, kept, token, logprob in zip(
            every, done.token_mask.padded().tolist(), done.token_ids, done.logprobs, strict=True
        ):
            left = sorted({*kept}, key=lambda one: float(row[one]))
            assert token in left
            assert not {*left} & {*banned}
            assert abs(float(row[token] - row[left].logsumexp(0)) - logprob) < 1e-5
            most = sampling.effective_top_k or 0
            likeliest = row.topk(most).values
            shares = (row[left] - likeliest.logsumexp(0)).exp()
            assert len(left) <= most
            assert float(row[left[0]]) >= float(likeliest[len(left) - 1]) - 1e-5, (
                "the likeliest are kept"
            )
            assert float(shares.sum()) > sampling.top_p - 1e-5
            assert float(shares[1:].sum()) < sampling.top_p + 1e-5, (
                "without the least likely one they do not reach it"
            )


def test_neighbours_that_keep_all_tokens_and_greedy_ones_are_not_truncated(text: Served) -> None:
    base = prompt(text.folder, "The answer is")
    samplings = [
        Sampling(0.0, 6, top_p=0.5, top_k=3),
        Sampling(max_tokens=6),
        Sampling(max_tokens=6, top_p=0.5),
    ]
    *whole, truncated = text.many(*((base, sampling) for sampling in samplings))
    for sampling, done in zip(samplings, whole, strict=False):
        assert done.token_mask is None
        close(text.folder, base, done, sampling)
    assert list(whole[0].token_ids) == hf_greedy(text.folder, base, 6)
    assert truncated.token_mask is not None


def test_requests_with_different_sampling_do_not_disturb_each_other(text: Served) -> None:
    base = prompt(text.folder, "The answer is")
    samplings = [
        Sampling(temperature, max_tokens=n)
        for n, temperature in enumerate((0.0, 0.5, 1.0, 0.0, 1.5), start=3)
    ]
    for sampling, done in zip(
        samplings, text.many(*((base, sampling) for sampling in samplings)), strict=True
    ):
        assert len(done.token_ids) == sampling.max_tokens
        close(text.folder, base, done, sampling)


def test_a_seed_fixes_the_tokens_and_turns_of_an_episode_differ(text: Served) -> None:
    sampling = Sampling(max_tokens=16)
    first = prompt(text.folder, "What is", seed=5)
    longer = dataclasses.replace(first, token_ids=first.token_ids + first.token_ids[-1:])
    once, again, other, later = text.many(
        (first, sampling),
        (first, sampling),
        (dataclasses.replace(first, seed=6), sampling),
        (longer, sampling),
    )
    assert once.token_ids == again.token_ids
    assert len({once.token_ids, other.token_ids, later.token_ids}) == 3


def test_banned_tokens_are_never_sampled(text: Served) -> None:
    base = prompt(text.folder, "The answer is")
    free = text.many(
        *((dataclasses.replace(base, seed=seed), Sampling(max_tokens=6)) for seed in range(8))
    )
    banned = tuple({token for completion in free for token in completion.token_ids})
    sampling = Sampling(max_tokens=6, banned_tokens=banned)
    done = text.many(*((dataclasses.replace(base, seed=seed), sampling) for seed in range(8)))
    assert not {token for completion in done for token in completion.token_ids} & set(banned)
    close(text.folder, base, done[0], sampling)


# Where a turn ends --------------------------------------------------------------------------------


def test_end_tokens_end_a_turn_but_not_before_min_tokens(text: Served) -> None:
    base, every = prompt(text.folder, "The answer is"), tuple(range(280))
    ends = Sampling(max_tokens=9, end_tokens=every)
    later = dataclasses.replace(ends, min_tokens=4)
    soon, held = text.many((base, ends), (base, later))
    assert soon.finish is held.finish is FinishReason.END_TOKEN
    assert soon.token_ids[-1] in every
    assert len(held.token_ids) == 5
    assert not set(held.token_ids[:4]) & set(every)
    close(text.folder, base, soon, ends)
    close(text.folder, base, held, later)


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(text: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text.folder)
    base = prompt(text.folder, "The answer is")
    [free] = text.many((base, GREEDY))
    stop = tokenizer.decode(free.token_ids)[len(tokenizer.decode(free.token_ids[:5])) - 1 :][:2]
    n = next(n for n in range(1, 25) if stop in tokenizer.decode(free.token_ids[:n]))
    assert n < 12
    [stopped] = text.many((base, dataclasses.replace(GREEDY, stop=("never this", stop))))
    assert stopped.token_ids == free.token_ids[:n]
    assert stopped.logprobs == pytest.approx(free.logprobs[:n], abs=TOLERANCE)
    assert stopped.finish is FinishReason.STOP_STRING


# Weights ------------------------------------------------------------------------------------------


def test_new_weights_answer_as_the_new_model(text: Served, tmp_path: Path) -> None:
    before, after, back = there_and_back(text, questions(text.folder), tmp_path)
    assert after != before == back


def test_new_weights_answer_as_the_new_model_with_images_and_a_tied_head(
    pictures: Served, tmp_path: Path
) -> None:
    before, after, back = there_and_back(pictures, looks(pictures.folder), tmp_path)
    assert after != before == back


def there_and_back(
    served: Served, requests: list[TokenPrompt], tmp_path: Path
) -> list[list[TokenIds]]:
    """What is said under the weights at first, under others and under the first again: each time
    what such a model says, so nothing that was cached under other weights is used.
    """
    sampling = dataclasses.replace(GREEDY, banned_tokens=vision_tokens(served.folder))
    before = agree(served, served.folder, requests, sampling)
    served.run(served.load(moved(served, tmp_path / "other"), Version(0, 1)))
    after = agree(served, tmp_path / "other", requests, sampling)
    assert (
        {completion.version for completion in after}
        == {served.engine.health().version}
        == {Version(0, 1)}
    )
    served.run(served.load(served.start, Version(1, 0)))
    back = agree(served, served.folder, requests, sampling)
    return [[completion.token_ids for completion in done] for done in (before, after, back)]


def test_weights_loaded_while_a_turn_is_sampled(text: Served, tmp_path: Path) -> None:
    """The turn keeps the version that it began with; each token is of one of the two models, none
    is lost or repeated.
    """
    other, sampling = (
        moved(text, tmp_path / "other"),
        dataclasses.replace(GREEDY, max_tokens=150 if text.kind == "page" else 600),
    )
    base = prompt(text.folder, "What is 3 + 9?")
    old = hf_greedy(text.folder, base, sampling.max_tokens)
    began = time.monotonic()
    assert list(text.many((base, sampling))[0].token_ids) == old
    duration = time.monotonic() - began

    async def load_meanwhile(after: float) -> tuple[Completion, Completion]:
        running = asyncio.create_task(text.engine.generate(base, sampling))
        await asyncio.sleep(after)
        await text.load(other, Version(0, 1))
        fresh = await text.engine.generate(base, GREEDY)
        return await running, fresh

    for share in (0.5, 0.2, 0.05):
        done, fresh = text.run(load_meanwhile(share * duration))
        assert (done.version, fresh.version) == (START, Version(0, 1))
        assert list(fresh.token_ids) == hf_greedy(tmp_path / "other", base, GREEDY.max_tokens)
        same = next(
            (i for i, (a, b) in enumerate(zip(done.token_ids, old, strict=True)) if a != b),
            len(old),
        )
        if 0 < same < len(old) or text.kind == "transformers":
            break
        text.run(text.load(text.start))
    if text.kind == "transformers":
        assert same == len(old), "its batches run to their end before a load"
        return
    assert 0 < same < len(old), "the load came while it was sampled"
    continued = dataclasses.replace(base, token_ids=base.token_ids + done.token_ids[:same])
    assert list(done.token_ids[same:]) == hf_greedy(tmp_path / "other", continued, len(old) - same)


def dropped(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name != "model.layers.1.mlp.up_proj.weight"
    }


def unknown(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {**tensors, "stray.weight": torch.zeros(2)}


def unknown_between(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Between two parts of a layer that an engine may merge."""
    given = list(tensors.items())
    at = 1 + list(tensors).index("model.layers.0.self_attn.q_proj.weight")
    return dict([*given[:at], ("stray.weight", torch.zeros(2)), *given[at:]])


def flipped(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    damaged = tensors["model.norm.weight"].clone()
    damaged.view(torch.uint8)[0] ^= 1
    return {**tensors, "model.norm.weight": damaged}


DAMAGE = [
    (dropped, False),
    (unknown, False),
    (flipped, False),
    (dropped, True),
    (unknown, True),
    (unknown_between, True),
]


@pytest.mark.parametrize(("damage", "sent_that_way"), DAMAGE)
def test_a_failed_load_serves_nothing_until_a_good_one(
    text: Served, damage: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], sent_that_way: bool
) -> None:
    """Damage on the way is found by the manifest; a weight update of another model by the engine's
    own names.
    """
    received = damage(text.start)
    sent = manifest(Version(0, 1), received if sent_that_way else text.start)

    async def test() -> None:
        await text.engine.pause()
        waiting = asyncio.create_task(text.engine.generate(prompt(text.folder, "What"), GREEDY))
        with pytest.raises(WeightSyncError, match=r"model\.norm|up_proj|stray"):
            await text.engine.load(sent, received)
        await text.engine.resume()
        assert text.engine.health().version is None
        with pytest.raises(WorkerLost, match="no weights"):
            await waiting
        await text.load(text.start, Version(0, 2))

    text.run(test())
    agree(text, text.folder, [prompt(text.folder, "What")], GREEDY)


# Requests -----------------------------------------------------------------------------------------


class Hosted(RolloutActor):
    """With an engine that there is."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.images = engine, ImageCache()
        self._without_logprobs = False


def test_samples_asked_for_together_are_those_asked_for_one_by_one(text: Served) -> None:
    """The first turn of a group: one request with a seed for each member."""
    base, sampling, seeds = (
        prompt(text.folder, "The answer is"),
        Sampling(max_tokens=12),
        [3, 9, 27, 3, 81],
    )
    hosted = Hosted(text.engine)
    together = text.run(hosted.generate_each(base, seeds, sampling))
    alone = [text.many((dataclasses.replace(base, seed=seed), sampling))[0] for seed in seeds]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in together}) == 4
    for one in together:
        close(text.folder, base, one, sampling)
    failed = text.run(hosted.generate_each(TokenPrompt(()), seeds[:2], sampling))
    assert [type(cause(one)) for one in failed] == [DataFailure] * 2, "each has its own answer"


def test_images_of_samples_asked_for_together(pictures: Served) -> None:
    base, seeds = looks(pictures.folder)[2], [5, 6]
    sampling = Sampling(max_tokens=6, banned_tokens=vision_tokens(pictures.folder))
    done = pictures.run(Hosted(pictures.engine).generate_each(base, seeds, sampling))
    assert len({one.token_ids for one in done}) == len(seeds)
    for seed, one in zip(seeds, done, strict=True):
        close(pictures.folder, dataclasses.replace(base, seed=seed), one, sampling)


def test_a_cancelled_request_leaves_the_rest(text: Served) -> None:
    base = prompt(text.folder, "What")

    async def test() -> None:
        doomed = asyncio.create_task(text.engine.generate(base, Sampling(max_tokens=4000)))
        kept = asyncio.create_task(text.engine.generate(base, GREEDY))
        await asyncio.sleep(0.2)
        doomed.cancel()
        assert len((await kept).token_ids) == GREEDY.max_tokens
        with pytest.raises(asyncio.CancelledError):
            await doomed
        async with asyncio.timeout(20):
            while text.engine.health().running:
                await asyncio.sleep(0.02)

    text.run(test())
    agree(text, text.folder, [base], GREEDY)


def test_prompts_that_cannot_be_used_fail_alone(pictures: Served, text: Served) -> None:
    good = prompt(pictures.folder, image(84, 56), "zoom")
    short = dataclasses.replace(good, token_ids=good.token_ids[:-8])

    async def outcomes() -> list[Any]:
        asked = [short, good, TokenPrompt(())]
        return await asyncio.gather(
            *(pictures.engine.generate(p, GREEDY) for p in asked), return_exceptions=True
        )

    broken, fine, empty = pictures.run(outcomes())
    assert isinstance(broken, DataFailure)
    assert isinstance(fine, Completion)
    assert isinstance(empty, DataFailure)
    with pytest.raises(DataFailure, match="text-only"):
        text.many((dataclasses.replace(prompt(text.folder, "x"), images=(image(56, 56),)), GREEDY))


# One of your own ----------------------------------------------------------------------------------


def test_the_page_s_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_snippets("bring_your_own/engine.md", tmp_path)))
    written = yaml.safe_load((tmp_path / "engine.yaml").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, **written))
    check_components(config)
    assert config.engine.label == "plain_engine:PlainEngine"
    assert config.engine.dtype == config.policy.engine.dtype


def test_an_engine_of_your_own_promises_no_determinism(tmp_path: Path) -> None:
    engine = {"use": "plain_engine:PlainEngine"}
    with pytest.raises(
        ValueError, match="decodes a group as its own batch, plain_engine:PlainEngine does not"
    ):
        RunConfig.model_validate(
            settings(tmp_path, tmp_path, rollout={"engine": engine, "deterministic": True})
        )
