"""Profiles of selected steps (``profile.steps``).

They are torch's profiles of each actor that computes with it, and the timeline of all actors.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rayloop.actors.failures import brief
from rayloop.actors.handles import Handle, submit
from rayloop.actors.policy import PolicyRank
from rayloop.core.deadlines import WAITS, Span, with_deadline
from rayloop.run.records.timeline import chrome

PROFILE_TIMEOUT_S = 600.0
"""Seconds for an actor to begin a profile, and to write one."""


class Profiles:
    """The profiles of ``steps`` below a run's ``folder``.

    They are of the actors of ``services`` (cluster/services.py). ``warn`` is called with the reason
    why one failed.
    """

    def __init__(
        self, steps: Collection[int], folder: Path, services: Any, warn: Callable[[str], None]
    ) -> None:
        self._steps = steps
        self._folder = folder / "profile"
        self._services = services
        self._warn = warn

    @asynccontextmanager
    async def step(self, number: int) -> AsyncIterator[None]:
        """Profile the block, if step ``number`` is selected.

        A profile that fails never ends the run.
        """
        if number not in self._steps:
            yield
            return

        folder = self._folder / f"step_{number:06d}"
        for new_folder in (self._folder, folder):
            await self._safely(asyncio.to_thread(new_folder.mkdir, exist_ok=True))
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
        file = folder / "timeline.json"
        await self._safely(asyncio.to_thread(file.write_text, text, encoding="utf-8"))

    async def _everywhere(self, folder: Path | None) -> None:
        """Begin a profile in each actor that computes with torch.

        With ``folder``, end it, and write it there.
        """

        def call(name: str, actor: Handle[PolicyRank]) -> Awaitable[None]:
            path = None if folder is None else f"{folder}/{name}.json.gz"
            answer = submit(actor, PolicyRank.profile, path)
            return self._safely(
                with_deadline(PROFILE_TIMEOUT_S, answer, f"profile of {name}", actor)
            )

        await asyncio.gather(*(call(name, actor) for name, actor in self._actors()))

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
            self._warn(f"a profile below {self._folder} is not complete: {brief(error)}")
