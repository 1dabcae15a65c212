"""Images travel once per engine: what is sent, what is asked for again, and that an engine always
gets whole prompts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from rayloop.actors.handles import Handle
from rayloop.actors.images import ImageCache, MissingImages, SentImages
from rayloop.actors.lease import Engine, FirstTurn, Lease, LeasedEngine
from rayloop.actors.rollout import RolloutActor
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component, SettingsModel
from rayloop.core.failures import Diverged, InfrastructureFailure, WorkerLost
from rayloop.core.types import (
    Cohort,
    Completion,
    FinishReason,
    ImageRef,
    ImagesSent,
    PromptImage,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.engines.settings import CustomEngine
from rayloop.transports.settings import ObjectStoreTransport
from tests.support.local import LocalActor

DONE = Completion((1,), (-0.1,), FinishReason.END_TOKEN, Version(0, 0))


class Recorder:
    """An engine that keeps what it was asked, and refuses what is not whole; with a ``gate`` it
    answers when that opens.
    """

    Settings = SettingsModel

    def __init__(self, *made: Any) -> None:
        self.prompts: list[TokenPrompt] = []
        self.gate: asyncio.Event | None = None
        self.fault: Exception | None = None

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        for image in prompt.images:
            assert (
                image.ref.path or hashlib.sha256(image.data or b"").hexdigest() == image.ref.sha256
            )
        self.prompts.append(prompt)
        if self.fault is not None:
            raise self.fault
        await (self.gate.wait() if self.gate else asyncio.sleep(0))
        return DONE

    async def leave(self, cohort: str) -> None: ...


class Server:
    """A real rollout actor with a cache of ``limit`` bytes around that engine."""

    def __init__(self, limit: int = 1000) -> None:
        engine = CustomEngine(component=Component(use=f"{__name__}:Recorder"), dtype="float32")
        self.actor = RolloutActor(ModelSettings(path=""), engine, ObjectStoreTransport(), "")
        self.actor.images = ImageCache(limit)
        self.engine = cast(Recorder, self.actor.engine)

    def lease(self, serial: int = 1) -> Lease[Engine]:
        return Lease(serial, cast(Handle[Engine], LocalActor(self.actor)))

    @property
    def bytes(self) -> int:
        return self.actor.images.used


class Driver:
    """Leases the next engine to who lost one."""

    def __init__(self, *leases: Lease[Engine]) -> None:
        self._leases = list(leases)

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[Engine]:
        return self._leases.pop(0)


def episode(
    lease: Lease[Engine],
    had: SentImages,
    driver: Driver | None = None,
    cohort: int | None = None,
    first: FirstTurn | None = None,
) -> LeasedEngine:
    request = RolloutRequest(Task("t", ()), TrajectoryId(3, 1), 0, 42, Sampling(), cohort)
    return LeasedEngine(request, lease, cast(Any, LocalActor(driver or Driver())), 5.0, had, first)


def image(name: str, size: int = 100) -> PromptImage:
    """One whose bytes are the name again and again."""
    data = (name * size)[:size].encode()
    return PromptImage(ImageRef(hashlib.sha256(data).hexdigest(), 28, 28, (1, 2, 2), 1), data)


def prompt(*images: PromptImage) -> TokenPrompt:
    return TokenPrompt((1, 2, 3), images)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(within())


async def turns(asking: LeasedEngine, *shown: Sequence[PromptImage]) -> None:
    for images in shown:
        assert await asking.generate(prompt(*images), Sampling()) == DONE


A, B, C, D = (image(name) for name in "ABCD")


def test_each_image_is_sent_with_the_first_turn_that_shows_it() -> None:
    server = Server()
    asking = episode(server.lease(), SentImages(), cohort=4)
    run(turns(asking, [A], [A, B], [A, B, C], [A, B, C]))
    assert asking.sent == ImagesSent(images=3, bytes=300)
    cohort = Cohort("3", 4)
    assert server.engine.prompts == [
        replace(prompt(*images), cohort=cohort) for images in ([A], [A, B], [A, B, C], [A, B, C])
    ]
    assert server.bytes == 300


def test_episodes_of_a_process_share_what_was_sent_and_processes_do_not() -> None:
    server = Server()
    one, other = SentImages(), SentImages()
    asking = [episode(server.lease(), had) for had in (one, one, other)]

    async def go() -> None:
        for each in asking:
            await turns(each, [A, B])

    run(go())
    assert [each.sent.images for each in asking] == [2, 0, 2]
    assert server.bytes == 200, "of two equal images one is kept"


def test_what_was_forgotten_is_asked_for_again() -> None:
    server, had = Server(limit=250), SentImages()
    asking = episode(server.lease(), had)
    run(turns(asking, [A], [B], [C], [A]))
    assert asking.sent == ImagesSent(images=4, bytes=400, again=1)
    run(turns(asking, [C, A], [B, C, D]))
    assert asking.sent == ImagesSent(images=4 + 1 + 2, bytes=700, again=2), "B again, and D twice"
    assert server.engine.prompts[-1] == prompt(B, C, D)
    assert server.bytes <= 250


def test_a_request_that_lacks_images_says_so_and_reaches_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayloop.actors.images.ARRIVAL_TIMEOUT_S", 0.05)
    server = Server()
    bare = replace(A, data=None)
    assert run(server.actor.generate(prompt(bare, B), Sampling())) == MissingImages(
        frozenset({A.ref.sha256})
    )
    assert server.engine.prompts == []
    assert run(server.actor.generate(prompt(A, replace(B, data=None)), Sampling())) == DONE, (
        "what came is kept"
    )


def test_an_image_on_its_way_is_waited_for() -> None:
    """Requests may overtake each other: one that only names what another one carries."""
    server = Server()
    bare = prompt(replace(A, data=None), replace(B, data=None))

    async def go() -> None:
        waiting = [asyncio.create_task(server.actor.generate(bare, Sampling())) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert server.engine.prompts == []
        for each in (A, B):
            assert await server.actor.generate(prompt(each), Sampling()) == DONE
        assert await asyncio.gather(*waiting) == [DONE] * 3

    run(go())
    assert server.engine.prompts.count(prompt(A, B)) == 3
    assert server.bytes == 200


def test_who_asks_at_the_same_moment_sends_once() -> None:
    server, had = Server(), SentImages()
    asking = [episode(server.lease(), had) for _ in range(8)]

    async def go() -> None:
        await asyncio.gather(*(turns(each, [A], [A, B]) for each in asking))

    run(go())
    assert sum((each.sent for each in asking), ImagesSent()) == ImagesSent(images=2, bytes=200)


@pytest.mark.parametrize("limit", [0, 1000])
def test_the_first_turn_of_a_group_carries_its_images_once(limit: int) -> None:
    """One request for all; what was forgotten since is asked for, once for all."""
    server, had = Server(limit), SentImages()

    async def go() -> ImagesSent:
        for _ in range(2):
            first = FirstTurn(4, had)
            asking = [episode(server.lease(), had, first=first) for _ in range(4)]
            await asyncio.gather(*(turns(each, [A, B]) for each in asking))
        return sum((each.sent for each in asking), ImagesSent())

    assert run(go()) == (ImagesSent(images=2, bytes=200, again=2) if limit == 0 else ImagesSent())
    assert server.engine.prompts == [prompt(A, B)] * 8


def test_the_first_turn_is_not_kept_back_as_long_as_its_episode_waited_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two asks an hour after the call has come, and the other does not ask."""
    now, server, had = [0.0], Server(), SentImages()
    monkeypatch.setattr(
        "rayloop.actors.lease.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    )

    async def go() -> Completion:
        one = episode(server.lease(), had, first=FirstTurn(2, had))
        now[0] = 3600.0
        one.begins()
        async with asyncio.timeout(30):
            return await one.generate(prompt(A), Sampling())

    assert replace(run(go()), times=DONE.times) == DONE


def test_what_was_on_its_way_and_never_came_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.actors.images.ARRIVAL_TIMEOUT_S", 0.05)
    server, had = Server(), SentImages()

    async def go() -> LeasedEngine:
        async def dropped(sent: TokenPrompt) -> Completion:
            raise WorkerLost("the request went nowhere")

        with pytest.raises(WorkerLost):
            await had.exchange(1, prompt(A), dropped, lambda sent: None)
        asking = episode(server.lease(), had)
        await turns(asking, [A])
        return asking

    assert run(go()).sent == ImagesSent(images=1, bytes=100, again=1)
    assert server.engine.prompts == [prompt(A)]


def test_images_of_running_requests_stay_and_are_forgotten_afterwards() -> None:
    """A waiting prompt keeps its bytes whatever comes meanwhile, and its images need not be sent to
    others.
    """
    server, had = Server(limit=150), SentImages()

    async def go() -> None:
        server.engine.gate = asyncio.Event()
        waiting = asyncio.create_task(turns(episode(server.lease(), had), [A, B]))
        await asyncio.sleep(0.05)
        others = [
            asyncio.create_task(turns(episode(server.lease(), had), [each])) for each in (C, D)
        ]
        await asyncio.sleep(0.05)
        assert server.bytes == 400
        bare = prompt(*(replace(each, data=None) for each in (A, B)))
        named = asyncio.create_task(server.actor.generate(bare, Sampling()))
        await asyncio.sleep(0.05)
        server.engine.gate.set()
        assert await named == DONE
        await asyncio.gather(waiting, *others)

    run(go())
    assert server.engine.prompts == [
        prompt(A, B),
        prompt(C),
        prompt(D),
        prompt(A, B),
    ], "the last only named them"
    assert server.bytes <= 150


def test_a_cancelled_request_holds_nothing() -> None:
    server = Server(limit=50)

    async def go() -> None:
        server.engine.gate = asyncio.Event()
        waiting = asyncio.create_task(server.actor.generate(prompt(A, B), Sampling()))
        await asyncio.sleep(0.05)
        assert server.bytes == 200
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(go())
    assert server.bytes == 0


def test_a_replaced_engine_begins_empty() -> None:
    lost, spare, had = Server(), Server(), SentImages()

    async def go() -> LeasedEngine:
        asking = episode(lost.lease(1), had, Driver(spare.lease(2)))
        await turns(asking, [A], [A, B])
        lost.engine.fault = WorkerLost("gone")
        await turns(asking, [A, B, C], [A, B, C])
        return asking

    asking = run(go())
    assert asking.sent == ImagesSent(images=2 + 1 + 3, bytes=600)
    assert lost.engine.prompts == [prompt(A), prompt(A, B), prompt(A, B, C)]
    assert spare.engine.prompts == [prompt(A, B, C)] * 2


def test_what_the_engine_reads_from_a_path_stays_a_path() -> None:
    server = Server()
    file = PromptImage(replace(A.ref, path="/data/a.png"))
    asking = episode(server.lease(), SentImages())
    run(turns(asking, [file], [file, B]))
    assert asking.sent == ImagesSent(images=1, bytes=100)
    assert server.engine.prompts[-1] == prompt(file, B)
    assert server.bytes == 100


def test_an_image_that_is_shown_twice_is_sent_once() -> None:
    server = Server(limit=0)
    asking = episode(server.lease(), SentImages())
    run(turns(asking, [A, A], [A, A, B, B]))
    assert asking.sent == ImagesSent(images=1 + 2 + 1, bytes=400, again=1), (
        "nothing is kept: B came, and A was asked for with it"
    )
    assert server.engine.prompts == [prompt(A, A), prompt(A, A, B, B)]


def test_a_process_forgets_what_it_sent_longest_ago() -> None:
    server, had = Server(), SentImages(limit=2)
    asking = episode(server.lease(), had)
    run(turns(asking, [A], [B], [C], [C], [B], [A]))
    assert asking.sent == ImagesSent(images=4, bytes=400)


def test_an_engine_that_keeps_nothing_of_what_it_is_sent_is_no_endless_loop() -> None:
    class Sieve:
        async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> MissingImages:
            return MissingImages(frozenset(image.ref.sha256 for image in prompt.images))

    asking = episode(Lease(1, cast(Any, LocalActor(Sieve()))), SentImages())
    with pytest.raises(InfrastructureFailure, match="lacks 2 images that it was sent"):
        run(turns(asking, [A, B]))


@pytest.mark.parametrize("limit", [0, 150, 450, 50_000])
def test_many_episodes_at_once_get_whole_prompts_whatever_is_forgotten(limit: int) -> None:
    """Two processes, one engine, groups that begin with one image, six turns: the engine itself
    checks the bytes.
    """
    server, processes, draw = Server(limit), [SentImages(), SentImages()], random.Random(limit)
    asked: list[tuple[LeasedEngine, list[PromptImage]]] = []

    async def play(number: int) -> None:
        asking = episode(server.lease(), draw.choice(processes))
        asked.append((asking, images := [image(f"group {number % 4}")]))
        for turn in range(6):
            await turns(asking, images)
            await asyncio.sleep(draw.random() / 200)
            images.append(image(f"{number} {turn}"))
        images.pop()

    async def go() -> None:
        await asyncio.gather(*(play(number) for number in range(24)))

    run(go())
    sent = sum((asking.sent for asking, _ in asked), ImagesSent())
    distinct = {each.ref.sha256 for _, images in asked for each in images}
    assert len(distinct) == 4 + 24 * 5
    assert len(server.engine.prompts) == 24 * 6
    assert server.bytes <= limit
    assert sent.bytes == 100 * sent.images
    if limit == 50_000:
        assert sent.again == 0
        assert len(distinct) <= sent.images <= len(distinct) + 20, (
            "members that begin at the same moment, in two processes"
        )
    else:
        assert sent.again > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_not_finite_are_no_turn(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine is: vLLM and SGLang return NaN, too, where the logits are."""
    monkeypatch.setitem(
        globals(), "DONE", Completion((1, 2), (-0.1, value), FinishReason.END_TOKEN, Version(3, 17))
    )
    actor, prompt = Server().actor, TokenPrompt((1, 2), ())
    why = "log-probs are not finite for 1 of 2 sampled tokens, with the weights of version 3.17"
    with pytest.raises(Diverged, match=why):
        asyncio.run(actor.generate(prompt, Sampling()))
    both = asyncio.run(actor.generate_each(prompt, [1, 2], Sampling()))
    assert isinstance(both, list)
    assert len(both) == 2
    for one in both:
        assert isinstance(one, RayTaskError)
        assert isinstance(one.cause, Diverged)
