"""What a replica of the judge does between HTTP and its backend: limits, deadlines, the canary, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from prometheus_client import Counter, Gauge

from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure
from rayloop.core.threads import in_thread
from rayloop.judge.api import JudgeItem, JudgeUnscored, JudgeVerdict, JudgeVersion, NoVerdict, Result
from rayloop.judge.backend import Backend
from rayloop.judge.discovery import READ
from rayloop.judge.labelled import CANARY_IMAGE, canary
from rayloop.judge.prompt import IMAGES
from rayloop.judge.rubric import Rubric
from rayloop.serve_apps.judge.settings import JudgeSettings
from rayloop.serve_apps.metrics import RequestMetrics

T = TypeVar("T")


async def with_deadline(seconds: float, awaited: Awaitable[T]) -> T:
    """Await with a deadline. Raises DeadlineExceeded."""
    return await bounded(seconds, awaited, DeadlineExceeded(f"no answer within {seconds:g} s"))


class Overloaded(InfrastructureFailure):
    """The replica holds as many items as ``limits.held`` allows."""


class Answer(NamedTuple):
    """HTTP status and JSON body, both in OpenAI's form; ``retry_after`` as in the header of this name, "" without."""

    status: int
    body: Any
    retry_after: str = ""


class Chat(Protocol):
    """The model behind a backend, for chat completions."""

    name: str

    async def complete(self, body: Mapping[str, Any]) -> Answer:
        """Raises DeadlineExceeded, InfrastructureFailure."""
        ...

    def alive(self) -> None:
        """Raises InfrastructureFailure when it cannot come back in this process."""
        ...

    async def close(self) -> None: ...


class Metrics(RequestMetrics):
    """One replica's own: a scrape reaches any of them, so each series names its replica (sum over ``replica``)."""

    def __init__(self, replica: str) -> None:
        super().__init__("judge", {"replica": replica}, "Items that are being judged or wait.")
        self._verdicts = self._made(Counter, "verdicts", "Results of items.", "verdict", "decided_by")
        self.cache_hits: Counter = self._one(Counter, "cache_hits", "Verdicts that were known.")
        self.canary: Gauge = self._one(Gauge, "canary_ok", "1: the last canary was judged right, in time.")

    def results(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, JudgeVerdict):
                self._verdicts.labels(**self._owner, verdict=result.verdict, decided_by=result.decided_by).inc()
                self.cache_hits.inc(result.cached)
            else:
                self._verdicts.labels(**self._owner, verdict=result.kind, decided_by="nobody").inc()


class JudgeService:
    """``async with`` it: the canary is asked while the block runs, and the model's connections end with it."""

    def __init__(
        self, settings: JudgeSettings, backend: Backend, rubrics: Mapping[str, Rubric], chat: Chat | None, replica: str = ""
    ) -> None:
        self.settings, self.backend, self.chat = settings, backend, chat
        self._rubrics = {name: rubric.digest for name, rubric in rubrics.items()}
        self.metrics = Metrics(replica)
        self._roots = [Path(root).resolve() for root in settings.image_roots]
        self._known = canary(rubrics.values())
        self._held = 0
        self._unloaded, self._canary = "the canary was not judged yet", "was not judged yet"

    @property
    def version(self) -> JudgeVersion:
        return JudgeVersion(
            version=version("rayloop"), fingerprint=self.backend.fingerprint, backend=self.backend.label,
            model=self.backend.model, rubrics=self._rubrics,
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            if self.chat is not None:
                await self.chat.close()

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        """Raises Overloaded, DeadlineExceeded, InfrastructureFailure; DataFailure for a rubric or an image that is refused."""
        if any(item.images for item in items):
            items = await in_thread(self._checked, items, timeout=READ)
        else:
            items = self._checked(items)
        with self.metrics.request("judge"), self._holding(len(items)):
            results = await with_deadline(self.settings.limits.seconds, self.backend.judge(items))
        self.metrics.results(results)
        return results

    async def complete(self, chat: Chat, body: Mapping[str, Any]) -> Answer:
        """A chat completion. Raises like ``judge``."""
        with self.metrics.request("chat"), self._holding(1):
            return await with_deadline(self.settings.limits.seconds, chat.complete(body))

    def alive(self) -> None:
        """Raises InfrastructureFailure when only a new process can help."""
        if self.chat is not None:
            self.chat.alive()

    def failing(self) -> dict[str, str]:
        """Condition -> why it fails, among model, canary and queue; empty when the replica is ready. Asks no model."""
        limit = self.settings.limits.held
        conditions = {
            "model": self._unloaded,
            "canary": self._canary,
            "queue": f"{self._held} items are held, the limit is {limit}" if self._held >= limit else "",
        }
        return {name: why for name, why in conditions.items() if why}

    def _checked(self, items: Sequence[JudgeItem]) -> Sequence[JudgeItem]:
        """The items with their images' real paths, so that what is read is what was looked at. Raises DataFailure."""
        for item in items:
            if item.rubric not in self._rubrics:
                raise DataFailure(item.rubric, f"no such rubric; there are {', '.join(self._rubrics)}")
        found: list[JudgeItem] = []
        left = self.settings.limits.images
        for item in items:
            real = [self._checked_image(image) for image in item.images]
            left -= sum(size for _, size in real)
            if left < 0:
                raise DataFailure(item.images[0], f"the request's images have more than {self.settings.limits.images} bytes")
            found.append(item.model_copy(update={"images": tuple(path for path, _ in real)}))
        return found

    def _checked_image(self, image: str) -> tuple[str, int]:
        """Its real path and size in bytes. What lies outside of the roots is not touched."""
        if image == CANARY_IMAGE:
            return image, 0
        path, limit = Path(image), self.settings.limits.image
        try:
            real = path.resolve()
            if not path.is_absolute() or not any(real.is_relative_to(root) for root in self._roots):
                raise DataFailure(str(path), "no absolute path below one of the judge's image_roots; URLs are never fetched")
            size = real.stat().st_size
            fits = real.suffix.lower() in IMAGES and real.is_file() and size <= limit
        except (OSError, ValueError) as error:
            raise DataFailure(str(path), f"cannot be read: {error}") from error
        if not fits:
            raise DataFailure(str(path), f"no file of at most {limit} bytes named *{', *'.join(IMAGES)} where the judge runs")
        return str(real), size

    @contextmanager
    def _holding(self, items: int) -> Iterator[None]:
        """Room for a request's items. One that alone is larger than the limit gets in when nothing else is held."""
        limit = self.settings.limits.held
        if self._held and self._held + items > limit:
            raise Overloaded(f"this replica holds {self._held} items, the limit is {limit}")
        self._held += items
        self.metrics.held.set(self._held)
        try:
            yield
        finally:
            self._held -= items
            self.metrics.held.set(self._held)

    async def _watch(self) -> None:
        while True:
            self._unloaded, self._canary = await self._ask_canary()
            self.metrics.canary.set(not self._canary)
            await asyncio.sleep(self.settings.canary.every)

    async def _judged_canary(self) -> Sequence[Result]:
        await self.backend.refresh()
        return await self.backend.judge([known.item for known in self._known])

    async def _ask_canary(self) -> tuple[str, str]:
        """Why the model is not there, and why the canary fails; "" for neither."""
        try:
            results = await with_deadline(self.settings.canary.within, self._judged_canary())
        except DeadlineExceeded as error:
            return "", str(error)
        except Exception as error:  # the canary must outlive whatever is wrong with the backend, and say it
            return (why := f"{type(error).__name__}: {error}"), why
        for known, result in zip(self._known, results, strict=True):
            if isinstance(result, JudgeUnscored):
                gone = result.reason if result.kind is NoVerdict.UNAVAILABLE else ""
                return gone, f"{known.id}: {result.kind}: {result.reason}"
            if self.settings.canary.right and result.verdict != known.verdict:
                return "", f"{known.id}: {known.item.answer!r} for {known.item.reference!r} was judged {result.verdict}"
        return "", ""
