"""Sends an image once per engine.

A request names its images by hash, and carries the bytes that its engine has not had.
``SentImages`` is the half of the process that calls engines, ``ImageCache`` is the half of a
rollout actor.
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

KEPT_IMAGE_BYTES = 1 << 30
"""Bytes of images that a rollout actor keeps, besides the images of running requests.

It is enough for 64 episodes of 15 screenshots of 1 MB.
"""
REMEMBERED_IMAGES = 1 << 15
"""Images that a process remembers to have sent or had, in some 10 MB.

An image that is forgotten is sent again.
"""
ARRIVAL_TIMEOUT_S = 2.0
"""Seconds that a request waits for an image that another one carries."""


@dataclass(frozen=True)
class MissingImages:
    """The answer to a request with images that the engine lacks: their hashes."""

    sha256: frozenset[str]


class ImageCache:
    """A rollout actor's images by hash.

    It keeps ``limit`` bytes and the images of running requests, and drops the least recently used.
    """

    def __init__(self, limit: int = KEPT_IMAGE_BYTES) -> None:
        self._running: Counter[str] = Counter()
        self._images: Cache[str, bytes] = Cache(limit, len, self._running.__contains__)
        self._came: Cache[str, bool] = Cache(REMEMBERED_IMAGES)
        self._changed = asyncio.Event()

    @property
    def used(self) -> int:
        """The bytes in use."""
        return self._images.used

    @asynccontextmanager
    async def whole(self, prompt: TokenPrompt) -> AsyncIterator[TokenPrompt | MissingImages]:
        """The prompt with the bytes of all images that have no path; or the missing images.

        The images are kept during the block.
        """
        names = [image.ref.sha256 for image in prompt.images]

        # Before anything is awaited: the cache must not drop these images in that time.
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
            missing = await self._missing(lacking)
            if missing:
                yield MissingImages(missing)
            else:
                images = tuple(
                    replace(image, data=self._images.get(image.ref.sha256) or image.data)
                    for image in prompt.images
                )
                yield replace(prompt, images=images)
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
        """The images that the cache lacks.

        An image that never came is on its way with another request, and is awaited.
        """
        missing = self._lacked_of(names)
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
                while missing:
                    # An image that came and was dropped will not
                    # come by itself: the sender must be asked.
                    if any(self._came.get(name) for name in missing):
                        break
                    self._changed.clear()
                    await self._changed.wait()
                    missing = self._lacked_of(names)
        return missing

    def _lacked_of(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(name for name in names if self._images.get(name) is None)


class SentImages:
    """The images that each engine, by its serial number, has had from this process."""

    def __init__(self, limit: int = REMEMBERED_IMAGES) -> None:
        self._had: Cache[tuple[int, str], bool] = Cache(limit)

    async def exchange(
        self,
        engine: int,
        prompt: TokenPrompt,
        send: Callable[[TokenPrompt], Awaitable[R | MissingImages]],
        count: Callable[[ImagesSent], None],
    ) -> R:
        """The engine's answer to the prompt, which ``send`` sends.

        It is sent again with missing bytes when the engine asks for them. ``count`` gets the
        numbers of images sent. Raises InfrastructureFailure when the engine lacks images that were
        sent.
        """
        images = {image.ref.sha256 for image in prompt.images if image.data is not None}
        had = {name for name in images if self._had.get((engine, name))}
        repeated = 0
        while True:
            request = _without(prompt, had)
            data = [image.data for image in request.images if image.data is not None]
            count(ImagesSent(len(data), sum(map(len, data)), repeated))
            # A later request only names them, and the engine waits for their bytes.
            for name in images:
                self._had.put((engine, name), True)
            answer = await send(request)
            if not isinstance(answer, MissingImages):
                return answer
            if not had & answer.sha256:
                raise InfrastructureFailure(
                    f"engine {engine} lacks {len(answer.sha256)} images that it was sent"
                )
            had -= answer.sha256
            repeated = len(answer.sha256)


def _without(prompt: TokenPrompt, had: Collection[str]) -> TokenPrompt:
    """The prompt without the bytes in ``had``, and with the bytes of any other image once."""
    carried = set(had)
    images = []
    for image in prompt.images:
        images.append(replace(image, data=None) if image.ref.sha256 in carried else image)
        carried.add(image.ref.sha256)
    return replace(prompt, images=tuple(images))
