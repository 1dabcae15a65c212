"""A lease on a pooled worker, and generation that continues on another engine when one is lost."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import RayTaskError

from rayloop.actors.failures import cause, is_lost, object_lost
from rayloop.actors.handles import Handle, submit
from rayloop.actors.images import MissingImages, SentImages
from rayloop.core.types import Cohort, Completion, ImagesSent, RolloutRequest, Sampling, TokenPrompt

logger = logging.getLogger(__name__)

MIN_GATHERING_S = 0.5
"""Minimum seconds that the first requests of a call's episodes wait for the others."""

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class Lease(Generic[A_co]):
    """The right to use one worker.

    ``worker``: its serial number; ``node``: Ray's id of its node, "" when unknown.
    """

    worker: int
    handle: Handle[A_co]
    slot: int = 0
    node: str = ""


class Engine(Protocol):
    """The methods of a rollout actor that episodes call."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion | MissingImages:
        """Sample one turn, or return the missing images."""

    async def generate_each(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion | RayTaskError] | MissingImages:
        """Sample one turn for each seed."""

    async def leave(self, cohort: str) -> None:
        """One episode of the cohort has ended, and asks for no more turns."""


class LeasesEngines(Protocol):
    """The actor that owns the pools: the driver, or an evaluation's."""

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[Engine]:
        """Lease another engine for an episode (``<trajectory>@<attempt>``).

        A request of the episode failed on engine ``lost``.
        """


class FirstTurn:
    """The first turn of the episodes of one call.

    Episodes with the same prompt, except for the seed, share one request. It is sent when all
    have asked. If they have not, it is sent when twice the time has passed that the first episode
    took to ask, and not before ``MIN_GATHERING_S`` after that.
    """

    def __init__(self, episodes: int, images: SentImages) -> None:
        self._missing = episodes
        self._images = images
        self._began: float | None = None
        self._asked: list[_AskedTurn] = []
        self._sent: set[asyncio.Task[None]] = set()
        self._late: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        """An episode begins, now that its actor has room for it.

        The time that it waited for room says nothing about how long the others will take.
        """
        if self._began is None:
            self._began = time.monotonic()

    def ask(
        self,
        lease: Lease[Engine],
        prompt: TokenPrompt,
        sampling: Sampling,
        count: Callable[[ImagesSent], None],
    ) -> Awaitable[Completion]:
        """The answer for one episode.

        Raises as a separate call would. Of the episodes that share a request, the ``count`` of the
        first gets the images that were sent.
        """
        loop = asyncio.get_running_loop()
        turn = _AskedTurn(lease, prompt, sampling, count, loop.create_future())
        self._asked.append(turn)
        if self._late is None:
            seconds = 0.0 if self._began is None else time.monotonic() - self._began
            self._late = loop.call_later(max(MIN_GATHERING_S, seconds), self._send)
        self.without()
        return turn.answer

    def without(self) -> None:
        """Wait for one episode less: it has asked, or will not."""
        self._missing -= 1
        if self._missing <= 0:
            self._send()

    def _send(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._missing = 0
        turns_by_request: dict[Any, list[_AskedTurn]] = {}
        for turn in self._asked:
            turns_by_request.setdefault(turn.request, []).append(turn)
        self._asked = []
        for turns in turns_by_request.values():
            task = asyncio.ensure_future(_answer(turns, self._images))
            # asyncio keeps weak references to tasks: without
            # the set one may be collected before it ends.
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)


@dataclass(frozen=True)
class _AskedTurn:
    """The first turn of one episode."""

    lease: Lease[Engine]
    prompt: TokenPrompt
    sampling: Sampling
    count: Callable[[ImagesSent], None]
    answer: asyncio.Future[Completion]

    @property
    def request(self) -> Any:
        """The key of the turns that share a request. Images are compared by hash."""
        return (
            self.prompt.token_ids,
            tuple(image.ref for image in self.prompt.images),
            self.prompt.cohort,
            self.sampling,
        )


async def _answer(turns: Sequence[_AskedTurn], images: SentImages) -> None:
    """Send one request for all of these turns, and set the answer or the error of each."""
    first = turns[0]
    seeds = [turn.prompt.seed for turn in turns]

    def send(prompt: TokenPrompt) -> Awaitable[list[Completion | RayTaskError] | MissingImages]:
        return submit(first.lease.handle, Engine.generate_each, prompt, seeds, first.sampling)

    answers: list[Completion | Exception] = []
    try:
        results = await images.exchange(first.lease.worker, first.prompt, send, first.count)
        for result in results:
            if isinstance(result, RayTaskError):
                answers.append(result.as_instanceof_cause())
            else:
                answers.append(result)
    except Exception as error:
        answers = [error] * len(turns)
    for turn, answer in zip(turns, answers, strict=True):
        # A turn that was cancelled is done.
        if turn.answer.done():
            continue
        if isinstance(answer, Exception):
            turn.answer.set_exception(answer)
        else:
            turn.answer.set_result(answer)


class LeasedEngine:
    """Generation for one episode, on another leased engine when one is lost.

    With ``first``, its first request is shared. A group's first attempt is decoded as one batch in
    deterministic mode (``request.cohort``), but not after a loss.
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
        self.generates = False
        """Whether the episode waits for a turn."""
        self._lease = lease
        self._driver = driver
        self._timeout = timeout
        self._images = images
        self._first = first
        self._key = f"{request.id}@{request.attempt}"
        self._cohort: Cohort | None = None
        if request.cohort is not None and request.attempt == 0:
            self._cohort = Cohort(str(request.id.group), request.cohort)

    def begins(self) -> None:
        """The episode begins, now that its actor has room for it."""
        if self._first is not None:
            self._first.begins()

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn, on another engine when one is lost.

        Raises what the engine and ``driver.lease_engine`` raise.
        """
        began = time.time()
        self.generates = True
        try:
            completion = await self._generate(prompt, sampling)
        finally:
            self.generates = False
        return replace(completion, times=(began, time.time()))

    @property
    def lease(self) -> Lease[Engine]:
        """The engine that it has now."""
        return self._lease

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        while True:
            prompt = replace(prompt, cohort=self._cohort)
            # Only the first request of an episode is shared; after a lost engine it is separate.
            first = self._first
            self._first = None
            try:
                async with asyncio.timeout(self._timeout):
                    if first is not None:
                        return await first.ask(self._lease, prompt, sampling, self._count)
                    return await self._ask(prompt, sampling)
            except Exception as error:
                # An answer may be lost, too.
                if not (is_lost(error) or object_lost(error)):
                    raise
                logger.warning(
                    "episode %s lost engine %d: %r", self._key, self._lease.worker, error
                )
                self._cohort = None
                origin = cause(error)
                reason = f"{type(origin).__name__}: {origin}".splitlines()[0]
                self._lease = await submit(
                    self._driver, LeasesEngines.lease_engine, self._key, self._lease.worker, reason
                )

    async def _ask(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        def send(prompt: TokenPrompt) -> Awaitable[Completion | MissingImages]:
            return submit(self._lease.handle, Engine.generate, prompt, sampling)

        return await self._images.exchange(self._lease.worker, prompt, send, self._count)

    def _count(self, sent: ImagesSent) -> None:
        self.sent += sent

    def leave(self) -> None:
        """The episode has ended: no other episode waits for it."""
        if self._first is not None:
            self._first.without()
        if self._cohort is not None:
            # Not awaited: the episode has ended, and an engine that was lost needs no notice.
            submit(self._lease.handle, Engine.leave, self._cohort.key)
