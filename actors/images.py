"""An image is sent once per engine: a request names its images by hash, and carries the bytes that
its engine has not had. ``SentImages`` is the half of the process that calls engines, ``ImageCache``
that of a rollout actor.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from rayloop.core.failures import InfrastructureFailure
from rayloop.core.threads import Cache
from rayloop.core.types import ImagesSent, TokenPrompt

R = TypeVar("R")

KEPT = 1 << 30
"""Bytes of images that a rollout actor keeps, beside those of running requests: 64 episodes of 15
screenshots of 1 MB.
"""
REMEMBERED = 1 << 15
"""Images that a process remembers to have sent or had, in some 10 MB. One that is forgotten is sent
again.
"""
ARRIVING = 2.0
"""Seconds that a request waits for an image that another one carries."""


@dataclass(frozen=True, slots=True)
class MissingImages:
    """The answer to a request with images that the engine lacks: their hashes."""

    sha256: frozenset[str]


class ImageCache:
    """A rollout actor's images by hash: ``limit`` bytes, and those of running requests; drops the
    least recently used.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self._running: Counter[str] = Counter()
        self._images: Cache[str, bytes] = Cache(limit, len, self._running.__contains__)
        self._came: Cache[str, bool] = Cache(REMEMBERED)
        self._changed = asyncio.Event()

    @property
    def used(self) -> int:
        """Bytes."""
        return self._images.used

    @asynccontextmanager
    async def whole(self, prompt: TokenPrompt) -> AsyncIterator[TokenPrompt | MissingImages]:
        """The prompt with the bytes of all images that have no path, which are kept during the
        block; or the missing images.
        """
        names = [image.ref.sha256 for image in prompt.images]

        # Before anything is awaited: the cache must not drop these images in the meantime.
        self._running.update(names)
        try:
            for image in prompt.images:
                if image.data is not None:
                    self._keep(image.ref.sha256, image.data)
            lacking = {
                image.ref.sha256
                for image in prompt.images
                if image.data is None and image.ref.path is None
            }
            if missing := await self._missing(lacking):
                yield MissingImages(missing)
            else:
                kept = self._images.get
                yield replace(
                    prompt,
                    images=tuple(
                        replace(i, data=kept(i.ref.sha256) or i.data) for i in prompt.images
                    ),
                )
        finally:
            self._running.subtract(names)
            # A Counter keeps zeros, and would grow by each image of the run.
            for name in names:
                if not self._running[name]:
                    del self._running[name]
            self._images.shrink()

    def _keep(self, name: str, data: bytes) -> None:
        if self._images.get(name) is None:
            self._images.put(name, data)
            self._came.put(name, True)
            self._changed.set()

    async def _missing(self, names: Collection[str]) -> frozenset[str]:
        """The images that are not there.

        One that never came is on its way with another request, and is awaited.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVING):
                while missing := frozenset(
                    name for name in names if self._images.get(name) is None
                ):
                    # An image that came and was dropped will not
                    # come by itself: the sender must be asked.
                    if any(self._came.get(name) for name in missing):
                        break
                    self._changed.clear()
                    await self._changed.wait()
        return missing


class SentImages:
    """The images that each engine, by its serial number, has had from this process."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._had: Cache[tuple[int, str], bool] = Cache(limit)

    async def exchange(
        self,
        engine: int,
        prompt: TokenPrompt,
        send: Callable[[TokenPrompt], Awaitable[R | MissingImages]],
        count: Callable[[ImagesSent], None],
    ) -> R:
        """The engine's answer to the prompt, which ``send`` sends, again with missing bytes when
        the engine asks for them. ``count`` gets the numbers of images sent. Raises
        InfrastructureFailure when the engine lacks images that were sent.
        """
        images = {image.ref.sha256 for image in prompt.images if image.data is not None}
        had, again = {name for name in images if self._had.get((engine, name))}, 0
        while True:
            sent = _without(prompt, had)
            carried = [image.data for image in sent.images if image.data is not None]
            count(ImagesSent(len(carried), sum(map(len, carried)), again))
            for (
                name
            ) in images:  # a later request only names them, and the engine waits for their bytes
                self._had.put((engine, name), True)
            answer = await send(sent)
            if not isinstance(answer, MissingImages):
                return answer
            if not had & answer.sha256:
                raise InfrastructureFailure(
                    f"engine {engine} lacks {len(answer.sha256)} images that it was sent"
                )
            had, again = had - answer.sha256, len(answer.sha256)


def _without(prompt: TokenPrompt, had: Collection[str]) -> TokenPrompt:
    """The prompt without the bytes in ``had``, and with those of any other image once."""
    carried, images = set(had), []
    for image in prompt.images:
        images.append(replace(image, data=None) if image.ref.sha256 in carried else image)
        carried.add(image.ref.sha256)
    return replace(prompt, images=tuple(images))
