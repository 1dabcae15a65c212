"""The live rollout actors of a run, found by their names.

Requests to them survive the loss of an engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Self

import ray
from ray.exceptions import RayError, RayTaskError

from rayloop.actors.failures import brief, cause, is_lost, object_lost
from rayloop.actors.handles import Handle, submit
from rayloop.actors.images import MissingImages, SentImages
from rayloop.actors.rollout import RolloutActor
from rayloop.core.deadlines import bounded
from rayloop.core.failures import DeadlineExceeded
from rayloop.core.threads import in_thread
from rayloop.core.types import Completion, Sampling, TokenPrompt, Version

logger = logging.getLogger(__name__)

_NAME_PREFIX = "rollout-"
"""The beginning of the names of a run's engines (``cluster/services.py``)."""
_SEARCH_INTERVAL_S = 1.0
"""Seconds between two searches for engines."""
_HEALTH_TIMEOUT_S = 10.0
"""Seconds within which an engine must report its health.

One that does not gets no requests, and is asked again.
"""


@dataclass
class ServedEngine:
    """One engine with its handle and its weights."""

    number: int
    """A number that is never used for another engine."""
    handle: Handle[RolloutActor]
    version: Version | None = None
    requests: int = 0
    """Requests of this endpoint that it is answering."""
    silent: bool = False
    """Whether it did not report its health in time."""


class Engines:
    """The engines of the run in Ray's ``namespace``, watched inside ``async with``."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._engines: dict[str, ServedEngine] = {}
        self._last_number = 0
        self._images = SentImages()
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.why = "engines were not searched for yet"
        """Why no engine serves; "" while one does."""

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._watch_engines())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    @property
    def serving(self) -> list[ServedEngine]:
        """The engines that serve weights; one that is being started or loaded does not."""
        return [
            engine
            for engine in self._engines.values()
            if engine.version is not None and not engine.silent
        ]

    @property
    def version(self) -> Version | None:
        """The newest weights that an engine serves."""
        versions = [engine.version for engine in self.serving if engine.version is not None]
        return max(versions, default=None)

    async def sample(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One answer for each seed, from another engine after a loss.

        Waits for an engine. Raises the engine's errors.
        """
        answers: dict[int, Completion] = {}
        # Equal seeds give equal answers, so each is asked for once.
        missing = list(dict.fromkeys(seeds))
        while missing:
            engine = await self._least_busy()
            engine.requests += 1
            try:
                replies = await self._ask(engine, prompt, missing, sampling)
                for seed, reply in zip(missing, replies, strict=True):
                    if isinstance(reply, Completion):
                        answers[seed] = reply
                    elif is_lost(reply):
                        self._mark_lost(engine, reply)
                    else:
                        raise cause(reply)
            except Exception as error:
                if not (is_lost(error) or object_lost(error)):
                    raise cause(error) from error
                self._mark_lost(engine, error)
            finally:
                engine.requests -= 1
            missing = [seed for seed in missing if seed not in answers]
        return [answers[seed] for seed in seeds]

    async def _ask(
        self, engine: ServedEngine, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion | RayTaskError]:
        def send(
            prompt_to_send: TokenPrompt,
        ) -> Awaitable[list[Completion | RayTaskError] | MissingImages]:
            return submit(
                engine.handle, RolloutActor.generate_each, prompt_to_send, seeds, sampling
            )

        return await self._images.exchange(engine.number, prompt, send, lambda _: None)

    async def _least_busy(self) -> ServedEngine:
        """The engine with the fewest of our requests; waits until there is one."""
        while not self.serving:
            # Nothing is awaited between this check and ``wait``, so no change is missed.
            self._changed.clear()
            await self._changed.wait()
        return min(self.serving, key=lambda engine: (engine.requests, engine.number))

    def _mark_lost(self, engine: ServedEngine, error: BaseException) -> None:
        logger.warning("engine %d is lost: %s", engine.number, brief(error))
        # Without a version it gets no requests until it reports its health again.
        engine.version = None
        self.why = f"the last engine was lost: {brief(error)}"

    async def _watch_engines(self) -> None:
        while True:
            try:
                await self._update_engines()
            # Whatever is wrong with the cluster, it may be well at the next search.
            except Exception as error:
                self.why = f"{type(error).__name__}: {brief(error)}"
            if self.serving:
                self.why = ""
                self._changed.set()
            await asyncio.sleep(_SEARCH_INTERVAL_S)

    async def _update_engines(self) -> None:
        """Search for engines, and ask all of them for their health."""
        names = await in_thread(self._names, timeout=_HEALTH_TIMEOUT_S)
        for name in self._engines.keys() - names:
            del self._engines[name]
        for name in names - self._engines.keys():
            self._last_number += 1
            handle = ray.get_actor(name, namespace=self._namespace)
            self._engines[name] = ServedEngine(self._last_number, handle)
        if not names:
            self.why = "the run has no engine: it is starting, or has ended"
        await asyncio.gather(*map(self._ask_health, list(self._engines.values())))

    def _names(self) -> set[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = (actor["name"] for actor in actors if actor["namespace"] == self._namespace)
        return {name for name in names if name.startswith(_NAME_PREFIX)}

    async def _ask_health(self, engine: ServedEngine) -> None:
        timeout_error = DeadlineExceeded("no health")
        try:
            answer = submit(engine.handle, RolloutActor.health)
            health = await bounded(_HEALTH_TIMEOUT_S, answer, timeout_error)
            engine.version = health.version
            engine.silent = False
        except (RayError, DeadlineExceeded) as error:
            engine.silent = True
            self.why = f"an engine does not answer: {brief(error)}"
