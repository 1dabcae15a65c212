"""One replica of the judge between HTTP and its grader: limits, deadlines, the canary, metrics."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge

from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded
from rayloop.core.threads import in_thread
from rayloop.judge.api import (
    JudgeItem,
    JudgeUnscored,
    JudgeVerdict,
    JudgeVersion,
    NoVerdict,
    Result,
)
from rayloop.judge.discovery import READ
from rayloop.judge.grader import Grader
from rayloop.judge.prompt import IMAGES
from rayloop.judge.rubric import CANARY_IMAGE, canary
from rayloop.serve_apps.judge.openai_model import ChatAnswer, CompletionModel
from rayloop.serve_apps.settings import JudgeSettings
from rayloop.web import RequestMetrics

T = TypeVar("T")


class JudgeMetrics(RequestMetrics):
    """The metrics of one replica.

    A scrape reaches any replica, so each series has the label ``replica``.
    """

    def __init__(self, replica: str, limit: int) -> None:
        super().__init__("judge", {"replica": replica}, "items", limit)
        self._verdicts = self.made(
            Counter, "verdicts", "Results of items.", "verdict", "decided_by"
        )
        self.cache_hits: Counter = self.one(Counter, "cache_hits", "Verdicts that were known.")
        self.canary: Gauge = self.one(
            Gauge, "canary_ok", "1: the last canary was judged right, in time."
        )

    def results(self, results: Sequence[Result]) -> None:
        """Count the results of one request."""
        for result in results:
            verdict, by = (
                (result.verdict, result.decided_by)
                if isinstance(result, JudgeVerdict)
                else (result.kind, "nobody")
            )
            self._verdicts.labels(**self._owner, verdict=verdict, decided_by=by).inc()
            self.cache_hits.inc(isinstance(result, JudgeVerdict) and result.cached)


class JudgeService:
    """Judges and chats within the limits.

    Inside ``running`` the canary is asked again and again.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        grader: Grader,
        chat: CompletionModel | None,
        replica: str = "",
    ) -> None:
        self.settings, self.grader, self.chat = settings, grader, chat
        self.metrics = JudgeMetrics(replica, settings.limits.held)
        self._roots = [Path(root).resolve() for root in settings.image_roots]
        self._known = canary(grader.rubrics.values())
        self._unloaded, self._canary = "the canary was not judged yet", "was not judged yet"

    @property
    def version(self) -> JudgeVersion:
        """The body of ``GET /version``."""
        rubrics = {name: rubric.digest for name, rubric in self.grader.rubrics.items()}
        return JudgeVersion(
            version=version("rayloop"),
            fingerprint=self.grader.fingerprint,
            backend=self.grader.label,
            model=self.grader.model,
            rubrics=rubrics,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask the canary while the block runs, and close the model's connections at its end."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            # The canary's request must have ended before its connections close.
            with suppress(asyncio.CancelledError):
                await watch
            if self.chat is not None:
                await self.chat.close()

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        """Raises Overloaded, DeadlineExceeded, InfrastructureFailure; DataFailure for a rubric or
        an image that is refused.
        """
        if any(item.images for item in items):
            items = await in_thread(self._checked, items, timeout=READ)
        else:
            items = self._checked(items)
        with self.metrics.request("judge"), self.metrics.holding(len(items)):
            results = await _within(self.settings.limits.seconds, self.grader.judge(items))
        self.metrics.results(results)
        return results

    async def complete(self, chat: CompletionModel, body: Mapping[str, Any]) -> ChatAnswer:
        """A chat completion. Raises like ``judge``."""
        with self.metrics.request("chat"), self.metrics.holding(1):
            return await _within(self.settings.limits.seconds, chat.complete(body))

    def failing(self) -> dict[str, str]:
        """Each of model, canary and queue that fails, and why; empty when the replica is ready.

        Asks no model.
        """
        conditions = {"model": self._unloaded, "canary": self._canary, "queue": self.metrics.full()}
        return {name: why for name, why in conditions.items() if why}

    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.text()

    def _checked(self, items: Sequence[JudgeItem]) -> Sequence[JudgeItem]:
        """The items with the real paths of their images: the checked file is the one that is read.

        Raises DataFailure.
        """
        for item in items:
            if item.rubric not in self.grader.rubrics:
                raise DataFailure(
                    item.rubric, f"no such rubric; there are {', '.join(self.grader.rubrics)}"
                )
        found: list[JudgeItem] = []
        left = self.settings.limits.images
        for item in items:
            real = [self._checked_image(image) for image in item.images]
            left -= sum(size for _, size in real)
            if left < 0:
                raise DataFailure(
                    item.images[0],
                    f"the request's images have more than {self.settings.limits.images} bytes",
                )
            found.append(item.model_copy(update={"images": tuple(path for path, _ in real)}))
        return found

    def _checked_image(self, image: str) -> tuple[str, int]:
        """The image's real path and its size in bytes.

        A file outside of the roots is not touched. Raises DataFailure.
        """
        if image == CANARY_IMAGE:
            return image, 0
        path, limit = Path(image), self.settings.limits.image
        try:
            real = path.resolve()
            if not path.is_absolute() or not any(real.is_relative_to(root) for root in self._roots):
                raise DataFailure(
                    str(path),
                    "no absolute path below one of the judge's image_roots; URLs are never fetched",
                )
            size = real.stat().st_size
            fits = real.suffix.lower() in IMAGES and real.is_file() and size <= limit
        except (OSError, ValueError) as error:
            raise DataFailure(str(path), f"cannot be read: {error}") from error
        if not fits:
            raise DataFailure(
                str(path),
                f"no file of at most {limit} bytes named *{', *'.join(IMAGES)} where the judge"
                " runs",
            )
        return str(real), size

    async def _watch(self) -> None:
        while True:
            self._unloaded, self._canary = await self._ask_canary()
            self.metrics.canary.set(not self._canary)
            await asyncio.sleep(self.settings.canary.every)

    async def _judged_canary(self) -> Sequence[Result]:
        await self.grader.refresh()
        return await self.grader.judge([known.item for known in self._known])

    async def _ask_canary(self) -> tuple[str, str]:
        """Why the model does not answer, and why the canary fails; "" for neither."""
        try:
            results = await _within(self.settings.canary.within, self._judged_canary())
        except DeadlineExceeded as error:
            return "", str(error)
        except Exception as error:  # the canary must outlive any error of the grader, and report it
            return (why := f"{type(error).__name__}: {error}"), why
        for known, result in zip(self._known, results, strict=True):
            if isinstance(result, JudgeUnscored):
                gone = result.reason if result.kind is NoVerdict.UNAVAILABLE else ""
                return gone, f"{known.id}: {result.kind}: {result.reason}"
            if self.settings.canary.right and result.verdict != known.verdict:
                return (
                    "",
                    (
                        f"{known.id}: {known.item.answer!r} for {known.item.reference!r} was judged"
                        f" {result.verdict}"
                    ),
                )
        return "", ""


async def _within(seconds: float, awaited: Awaitable[T]) -> T:
    """Await for at most so many seconds. Raises DeadlineExceeded."""
    return await bounded(seconds, awaited, DeadlineExceeded(f"no answer within {seconds:g} s"))
