"""Profiles of chosen steps (``profile.steps``): torch's in each actor that computes with it, and
the timeline of all actors.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rayloop.actors.failures import brief
from rayloop.actors.handles import Handle, submit
from rayloop.actors.policy import PolicyRank
from rayloop.core.deadlines import WAITS, Span, with_deadline
from rayloop.run.config import RunConfig
from rayloop.run.records.timeline import chrome

PATIENCE = 600.0
"""Seconds for an actor to begin a profile, and to write one."""


class Profiles:
    """Below the run's ``folder``, of the actors of ``services`` (cluster/services.py).

    ``warn`` is called with why one failed.
    """

    def __init__(
        self, config: RunConfig, folder: Path, services: Any, warn: Callable[[str], None]
    ) -> None:
        self._steps, self._folder, self._services, self._warn = (
            config.profile.steps,
            folder / "profile",
            services,
            warn,
        )

    @asynccontextmanager
    async def step(self, number: int) -> AsyncIterator[None]:
        """Profile what happens in the block, if ``number`` is to be.

        A profile that fails never ends the run.
        """
        if number not in self._steps:
            yield
            return

        folder = self._folder / f"step_{number:06d}"
        for made in (self._folder, folder):
            await self._safely(asyncio.to_thread(made.mkdir, exist_ok=True))
        await self._everywhere(None)

        spans: list[Span] = []
        WAITS.spans = spans
        try:
            yield
            for wait in WAITS.open.values():
                WAITS.did(f"{wait.what} (goes on)", wait.since)
        finally:
            # Also after an error: the list would grow to the end of the run.
            WAITS.spans = None

        await self._everywhere(folder)
        text = json.dumps(chrome(spans))
        await self._safely(
            asyncio.to_thread((folder / "timeline.json").write_text, text, encoding="utf-8")
        )

    async def _everywhere(self, folder: Path | None) -> None:
        """Begin a profile in each actor that computes with torch; with ``folder``, end it, and
        write it there.
        """

        def call(name: str, actor: Handle[PolicyRank]) -> Awaitable[None]:
            answer = submit(
                actor, PolicyRank.profile, None if folder is None else f"{folder}/{name}.json.gz"
            )
            return self._safely(with_deadline(PATIENCE, answer, f"profile of {name}", actor))

        await asyncio.gather(*(call(*each) for each in self._actors()))

    def _actors(self) -> Iterator[tuple[str, Handle[PolicyRank]]]:
        """Name and handle; all have the method ``profile``."""
        for rank, handle in enumerate(self._services.policy.ranks):
            yield f"policy-{rank}", handle
        for pool in filter(None, (self._services.rollout, self._services.reference)):
            for worker in pool.workers.values():
                yield f"{pool.role}-{worker.slot}", worker.handle

    async def _safely(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except Exception as error:
            self._warn(f"a profile below {self._folder} is not whole: {brief(error)}")
