"""A lease on a pooled worker, and generation through leases that outlives the loss of an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import RayTaskError

from rayloop.actors.failures import cause, is_lost, object_lost
from rayloop.actors.handles import Handle, submit
from rayloop.actors.images import MissingImages, SentImages
from rayloop.core.types import Cohort, Completion, ImagesSent, RolloutRequest, Sampling, TokenPrompt

logger = logging.getLogger(__name__)

PATIENCE = 0.5
"""Seconds that the first episodes of a call to ask their engine wait for the others, at least."""

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Lease(Generic[A_co]):
    """The right to use one worker: its serial number in the pool, its actor handle, its slot, which a replacement takes, and its
    node (Ray's id; "" where that is not known)."""

    worker: int
    handle: Handle[A_co]
    slot: int = 0
    node: str = ""


class Engine(Protocol):
    """What an episode asks of a rollout actor."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion | MissingImages:
        """Sample one turn. Images may be without their bytes; what is missing is the answer then."""
        ...

    async def generate_each(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion | RayTaskError] | MissingImages:
        """Sample one turn for each seed."""
        ...

    async def leave(self, cohort: str) -> None:
        """One episode of the cohort will ask for no more turns."""
        ...


class LeasesEngines(Protocol):
    """The actor that owns the pools: the driver, or an evaluation's."""

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[Engine]:
        """Another engine for an episode (``<trajectory>@<attempt>``) whose request failed on engine ``lost``."""
        ...


class FirstTurn:
    """The first turn of the episodes of one call: those that ask for the same, but for the seed, ask with one request.

    It is sent when all have asked; or, with some missing, when as much time has passed again as the first one took to ask, at
    least ``PATIENCE`` seconds. An episode that comes later asks alone. ``images`` are those that engines have had from here.
    """

    def __init__(self, episodes: int, images: SentImages) -> None:
        self._missing, self._images = episodes, images
        self._began = time.monotonic()
        self._asked: list[_Asked] = []
        self._sent: set[asyncio.Task[None]] = set()
        self._late: asyncio.TimerHandle | None = None

    def ask(
        self, lease: Lease[Engine], prompt: TokenPrompt, sampling: Sampling, count: Callable[[ImagesSent], None]
    ) -> Awaitable[Completion]:
        """The answer for one episode, which asks for the first time. Raises as a call of its own would.

        ``count`` of one of those that ask together gets the images that are sent.
        """
        loop = asyncio.get_running_loop()
        one = _Asked(lease, prompt, sampling, count, loop.create_future())
        self._asked.append(one)
        if self._late is None:
            self._late = loop.call_later(max(PATIENCE, time.monotonic() - self._began), self._send)
        self.without()
        return one.answer

    def without(self) -> None:
        """One episode less is waited for: it has asked, or will not."""
        self._missing -= 1
        if self._missing <= 0:
            self._send()

    def _send(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._missing = 0
        alike: dict[Any, list[_Asked]] = {}
        for one in self._asked:
            alike.setdefault(one.request, []).append(one)
        self._asked = []
        for asked in alike.values():
            sent = asyncio.ensure_future(_answer(asked, self._images))
            self._sent.add(sent)
            sent.add_done_callback(self._sent.discard)


@dataclass(frozen=True, slots=True)
class _Asked:
    lease: Lease[Engine]
    prompt: TokenPrompt
    sampling: Sampling
    count: Callable[[ImagesSent], None]
    answer: asyncio.Future[Completion]

    @property
    def request(self) -> Any:
        """What is the same for those that can ask together. Images are what their hashes say."""
        images = tuple(image.ref for image in self.prompt.images)
        return self.prompt.token_ids, images, self.prompt.cohort, self.sampling


async def _answer(asked: Sequence[_Asked], images: SentImages) -> None:
    """Send one request for all of these, and give each its answer, or what went wrong."""
    first, answers = asked[0], list[Completion | Exception]()
    seeds = [one.prompt.seed for one in asked]

    def send(sent: TokenPrompt) -> Awaitable[list[Completion | RayTaskError] | MissingImages]:
        return submit(first.lease.handle, Engine.generate_each, sent, seeds, first.sampling)

    try:
        said = await images.exchange(first.lease.worker, first.prompt, send, first.count)
        answers += [one.as_instanceof_cause() if isinstance(one, RayTaskError) else one for one in said]
    except Exception as error:
        answers += [error] * len(asked)
    for one, answer in zip(asked, answers, strict=True):
        if one.answer.done():  # nobody waits any more
            continue
        if isinstance(answer, Exception):
            one.answer.set_exception(answer)
        else:
            one.answer.set_result(answer)


class LeasedEngine:
    """Generation for one episode: on the leased engine, and when that is lost on the next one that the driver leases.

    With ``first``, its first request is one with those of the other episodes of its call.
    In deterministic mode (``request.cohort``) the requests of a group's first attempt are decoded as one batch; after a
    loss, or in a later attempt, the episode generates alone. ``images`` are those that engines have had from this process.
    """

    def __init__(
        self,
        request: RolloutRequest,
        lease: Lease[Engine],
        driver: Handle[LeasesEngines],
        timeout: float,
        images: SentImages,
        first: FirstTurn | None = None,
    ) -> None:
        self.sent = ImagesSent()
        self._lease, self._driver, self._timeout = lease, driver, timeout
        self._images, self._first = images, first
        self._key = f"{request.id}@{request.attempt}"
        self._cohort: Cohort | None = None
        if request.cohort is not None and request.attempt == 0:
            self._cohort = Cohort(str(request.id.group), request.cohort)

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; the same prompt and seed are sent again elsewhere when an engine is lost.

        Raises what the engine raises, and what ``driver.lease_engine`` raises when no engine is left. That call has no
        deadline here: the driver bounds the wait for a replacement.
        """
        while True:
            sent = dataclasses.replace(prompt, cohort=self._cohort)
            first, self._first = self._first, None
            try:
                async with asyncio.timeout(self._timeout):
                    if first is not None:
                        return await first.ask(self._lease, sent, sampling, self._count)
                    return await self._ask(sent, sampling)
            except Exception as error:
                if not (is_lost(error) or object_lost(error)):  # the answer, too, can be lost
                    raise
                logger.warning("episode %s lost engine %d: %r", self._key, self._lease.worker, error)
                self._cohort = None
                why = f"{type(cause(error)).__name__}: {cause(error)}".splitlines()[0]
                self._lease = await submit(self._driver, LeasesEngines.lease_engine, self._key, self._lease.worker, why)

    async def _ask(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        def send(sent: TokenPrompt) -> Awaitable[Completion | MissingImages]:
            return submit(self._lease.handle, Engine.generate, sent, sampling)

        return await self._images.exchange(self._lease.worker, prompt, send, self._count)

    def _count(self, sent: ImagesSent) -> None:
        self.sent += sent

    def leave(self) -> None:
        """The episode has ended: nobody waits for it any longer."""
        if self._first is not None:
            self._first.without()
        if self._cohort is not None:
            submit(self._lease.handle, Engine.leave, self._cohort.key)
