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
from rayloop.judge.discovery import READ_TIMEOUT_S
from rayloop.judge.grader import Grader
from rayloop.judge.prompt import IMAGES
from rayloop.judge.rubric import CANARY_IMAGE, canary
from rayloop.serve_apps.judge.openai_model import ChatAnswer, CompletionModel
from rayloop.serve_apps.settings import JudgeSettings
from rayloop.web import RequestMetrics

T = TypeVar("T")

_NOT_JUDGED_YET = "was not judged yet"


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
        labels: dict[str, str]
        for result in results:
            if isinstance(result, JudgeVerdict):
                labels = {"verdict": result.verdict, "decided_by": result.decided_by}
                self.cache_hits.inc(result.cached)
            else:
                labels = {"verdict": result.kind, "decided_by": "nobody"}
            self._verdicts.labels(**self._owner, **labels).inc()


class JudgeService:
    """Judges and chats within the limits.

    Inside ``running`` the canary is asked at regular intervals.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        grader: Grader,
        chat: CompletionModel | None,
        replica: str = "",
    ) -> None:
        self.settings = settings
        self.grader = grader
        self.chat = chat
        self.metrics = JudgeMetrics(replica, settings.limits.held)
        self._roots = [Path(root).resolve() for root in settings.image_roots]
        self._canary_items = canary(grader.rubrics.values())
        self._model_failure = f"the canary {_NOT_JUDGED_YET}"
        self._canary_failure = _NOT_JUDGED_YET

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
        """One result for each item, in order.

        Raises Overloaded, DeadlineExceeded, InfrastructureFailure; DataFailure for a rubric or an
        image that is refused.
        """
        if any(item.images for item in items):
            items = await in_thread(self._checked, items, timeout=READ_TIMEOUT_S)
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
        failures = {
            "model": self._model_failure,
            "canary": self._canary_failure,
            "queue": self.metrics.full(),
        }
        return {name: reason for name, reason in failures.items() if reason}

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
        checked: list[JudgeItem] = []
        limit = self.settings.limits.images
        total = 0
        for item in items:
            images = [self._checked_image(image) for image in item.images]
            total += sum(size for _, size in images)
            if total > limit:
                raise DataFailure(
                    item.images[0], f"the request's images have more than {limit} bytes"
                )
            paths = tuple(path for path, _ in images)
            checked.append(item.model_copy(update={"images": paths}))
        return checked

    def _checked_image(self, image: str) -> tuple[str, int]:
        """The image's real path and its size in bytes.

        A file outside of the roots is not touched. Raises DataFailure.
        """
        if image == CANARY_IMAGE:
            return image, 0
        path = Path(image)
        limit = self.settings.limits.image
        try:
            real_path = path.resolve()
            is_below_root = any(real_path.is_relative_to(root) for root in self._roots)
            if not path.is_absolute() or not is_below_root:
                raise DataFailure(
                    str(path),
                    "no absolute path below one of the judge's image_roots; URLs are never fetched",
                )
            size = real_path.stat().st_size
            is_image_file = real_path.suffix.lower() in IMAGES and real_path.is_file()
        except (OSError, ValueError) as error:
            raise DataFailure(str(path), f"cannot be read: {error}") from error
        if not is_image_file or size > limit:
            raise DataFailure(
                str(path),
                f"no file of at most {limit} bytes named *{', *'.join(IMAGES)} where the judge"
                " runs",
            )
        return str(real_path), size

    async def _watch(self) -> None:
        while True:
            self._model_failure, self._canary_failure = await self._ask_canary()
            self.metrics.canary.set(not self._canary_failure)
            await asyncio.sleep(self.settings.canary.every)

    async def _judge_canary(self) -> Sequence[Result]:
        await self.grader.refresh()
        return await self.grader.judge([labelled.item for labelled in self._canary_items])

    async def _ask_canary(self) -> tuple[str, str]:
        """Why the model does not answer, and why the canary fails; "" for neither."""
        try:
            results = await _within(self.settings.canary.within, self._judge_canary())
        except DeadlineExceeded as error:
            return "", str(error)
        # The canary must outlive any error of the grader, and report it.
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            return failure, failure
        for labelled, result in zip(self._canary_items, results, strict=True):
            if isinstance(result, JudgeUnscored):
                model_failure = result.reason if result.kind is NoVerdict.UNAVAILABLE else ""
                return model_failure, f"{labelled.id}: {result.kind}: {result.reason}"
            if self.settings.canary.right and result.verdict != labelled.verdict:
                item = labelled.item
                mistake = f"{item.answer!r} for {item.reference!r} was judged {result.verdict}"
                return "", f"{labelled.id}: {mistake}"
        return "", ""


async def _within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Await for at most ``seconds``. Raises DeadlineExceeded."""
    return await bounded(seconds, awaitable, DeadlineExceeded(f"no answer within {seconds:g} s"))
