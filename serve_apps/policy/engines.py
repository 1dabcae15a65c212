"""The live rollout actors of a run, found by their names, and requests to them that survive the
loss of one.
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

ROLE = "rollout-"
"""The beginning of the names of a run's engines (``cluster/services.py``)."""
LOOK = 1.0
"""Seconds between two searches for engines."""
HEALTH = 10.0
"""Seconds within which an engine must report its health; one that does not gets no requests, and is
asked again.
"""


@dataclass
class FoundEngine:
    """One engine: a ``number`` that is never used again, its handle, its weights, and the number of
    our requests to it.
    """

    number: int
    handle: Handle[RolloutActor]
    version: Version | None = None
    asked: int = 0
    silent: bool = False


class Engines:
    """The engines of the run in Ray's ``namespace``, watched inside ``async with``."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._found: dict[str, FoundEngine] = {}
        self._numbers = 0
        self._images = SentImages()
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.why = "engines were not searched for yet"
        """Why no engine serves; "" while one does."""

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    @property
    def serving(self) -> list[FoundEngine]:
        """The engines that serve weights; one that is being started or loaded does not."""
        return [
            engine
            for engine in self._found.values()
            if engine.version is not None and not engine.silent
        ]

    @property
    def version(self) -> Version | None:
        """The newest weights that an engine serves."""
        return max(
            (engine.version for engine in self.serving if engine.version is not None), default=None
        )

    async def sample(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One answer for each seed, from another engine after a loss.

        Waits for an engine. Raises the engine's errors.
        """
        answers: dict[int, Completion] = {}
        # Equal seeds give equal answers, so each is asked for once.
        while missing := [seed for seed in dict.fromkeys(seeds) if seed not in answers]:
            engine = await self._free()
            engine.asked += 1
            try:
                for seed, answer in zip(
                    missing, await self._ask(engine, prompt, missing, sampling), strict=True
                ):
                    if isinstance(answer, Completion):
                        answers[seed] = answer
                    elif not is_lost(answer):
                        raise cause(answer)
                    else:
                        self._lost(engine, answer)
            except Exception as error:
                if not (is_lost(error) or object_lost(error)):
                    raise cause(error) from error
                self._lost(engine, error)
            finally:
                engine.asked -= 1
        return [answers[seed] for seed in seeds]

    async def _ask(
        self, engine: FoundEngine, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion | RayTaskError]:
        def send(sent: TokenPrompt) -> Awaitable[list[Completion | RayTaskError] | MissingImages]:
            return submit(engine.handle, RolloutActor.generate_each, sent, seeds, sampling)

        return await self._images.exchange(engine.number, prompt, send, lambda _: None)

    async def _free(self) -> FoundEngine:
        """The engine with the fewest of our requests; waits until there is one."""
        while not (serving := self.serving):
            # Nothing is awaited between the look and ``wait``, so no change is missed.
            self._changed.clear()
            await self._changed.wait()
        return min(serving, key=lambda engine: (engine.asked, engine.number))

    def _lost(self, engine: FoundEngine, error: BaseException) -> None:
        logger.warning("engine %d is lost: %s", engine.number, brief(error))
        # Without a version it gets no requests until it reports its health again.
        engine.version, self.why = None, f"the last engine was lost: {brief(error)}"

    async def _look(self) -> None:
        while True:
            try:
                names = await in_thread(self._names, timeout=HEALTH)
                for gone in self._found.keys() - names:
                    del self._found[gone]
                for new in names - self._found.keys():
                    self._numbers += 1
                    self._found[new] = FoundEngine(
                        self._numbers, ray.get_actor(new, namespace=self._namespace)
                    )
                if not names:
                    self.why = "the run has no engine: it is starting, or has ended"
                await asyncio.gather(*map(self._ask_health, list(self._found.values())))
            except (
                Exception
            ) as error:  # whatever is wrong with the cluster, the next look may find it well
                self.why = f"{type(error).__name__}: {brief(error)}"
            if self.serving:
                self.why = ""
                self._changed.set()
            await asyncio.sleep(LOOK)

    def _names(self) -> set[str]:
        ours = (
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._namespace
        )
        return {name for name in ours if name.startswith(ROLE)}

    async def _ask_health(self, engine: FoundEngine) -> None:
        try:
            asked = submit(engine.handle, RolloutActor.health)
            engine.version = (await bounded(HEALTH, asked, DeadlineExceeded("no health"))).version
            engine.silent = False
        except (RayError, DeadlineExceeded) as error:
            engine.silent = True
            self.why = f"an engine does not answer: {brief(error)}"
