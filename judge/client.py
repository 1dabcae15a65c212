"""The judge's client, one per process.

It asks each question once, waits through failures, and never turns a failure into a zero. Questions
that wait are sent together, at most ``batch`` per request and ``concurrency`` requests at a time;
while a request is free a question is sent at once, so batches form only under load.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from rayloop.config.settings import local_path
from rayloop.core.failures import InfrastructureFailure, RayloopError
from rayloop.judge import transport
from rayloop.judge.api import (
    MAX_ITEMS,
    JudgeItem,
    JudgeUnscored,
    JudgeVerdict,
    JudgeVersion,
    NoVerdict,
    Result,
)
from rayloop.judge.cache import VerdictCache, cache_key
from rayloop.judge.discovery import Find
from rayloop.judge.health import Breaker, BreakerState, Canary
from rayloop.judge.rubric import Labelled, canary
from rayloop.judge.transport import ConnectionSettings, JudgeConnection, JudgeRefused, Transient

logger = logging.getLogger(__name__)

MAX_ITEM_FAILURES = 8
"""Failures in a row of one item after which it has no verdict.

The item was sent alone each time, and the canary was judged right.
"""
_STATUSES_OF_BAD_ITEMS = (400, 413, 422)
_MAX_REASON = 1024


class ClientSettings(ConnectionSettings):
    """Settings of the client of one process. Times are in seconds."""

    concurrency: int = Field(16, ge=1)
    """Requests at a time, per reward actor.

    Raise it when the judge's queue is empty and steps wait for rewards.
    """
    batch: int = Field(16, ge=1, le=MAX_ITEMS)
    """Items per request; at most what the server takes."""
    backoff: float = Field(0.25, gt=0)
    """Seconds before the second try; they double, with jitter, up to ``backoff_max``.

    A longer ``Retry-After`` is honoured.
    """
    backoff_max: float = Field(15.0, gt=0)
    """Seconds between two tries at most. Lower it when a judge comes back quickly."""
    breaker_failures: int = Field(5, ge=1)
    """Failures in a row after which nothing is sent until the canary is judged right."""
    probe_interval: float = Field(2.0, gt=0)
    """Seconds between two canaries while the breaker is open."""
    canary: bool = True
    """Whether the canary's verdicts must be right.

    Off only for judges whose verdicts are noise (tests of the path).
    """
    cache_size: int = Field(100_000, ge=1)
    """Verdicts kept in memory. Raise it when questions repeat over more than that."""
    cache_file: str = ""
    """SQLite file that keeps verdicts between runs; "" for none.

    Other processes of this machine share it.
    """


@dataclass(eq=False)
class _Question:
    """A distinct item without a verdict, and the number of callers that wait for it.

    ``alone``: it is sent in a request without other items.
    """

    item: JudgeItem
    key: str = ""
    alone: bool = False
    future: asyncio.Future[Result] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    waiters: int = 0


class JudgeClient:
    """The client for one event loop; the constructor may run outside of the loop.

    ``fingerprint`` is the judge's, "" before an answer.
    """

    def __init__(
        self,
        settings: ClientSettings,
        find: Find | None = None,
        known: Sequence[Labelled] | None = None,
    ) -> None:
        """Make a client that sends nothing yet.

        ``known``: items that a judge in good health judges right; the shipped ones by default.
        """
        self.settings = settings
        self.connection = JudgeConnection(settings, find)
        canary_items = canary() if known is None else known
        self.canary = Canary(canary_items, self.connection, settings.canary, self._count)
        cache_file = local_path(settings.cache_file) if settings.cache_file else None
        self.cache = VerdictCache(settings.cache_size, cache_file)
        self.breaker = Breaker(
            settings.breaker_failures, settings.probe_interval, self.canary.ask, self._note
        )
        self.fingerprint = ""
        self.fingerprints: list[str] = []
        """The fingerprints of all judges that answered, oldest first."""
        self.last_error: Exception | None = None
        self._questions: dict[str, _Question] = {}
        self._queue: deque[_Question] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._introduction: asyncio.Task[None] | None = None

    async def judge(self, item: JudgeItem, patience: float) -> Result:
        """The verdict, or after ``patience`` seconds the reason for its absence.

        Raises ConfigError for an unusable key file.
        """
        deadline = asyncio.get_running_loop().time() + patience
        # The keys of the cache's file have the fingerprint.
        if not self.fingerprint and self.settings.cache_file:
            self._introduction = self._introduction or asyncio.create_task(self._introduce())
            # ``wait`` leaves the task alone when this caller gives up: others wait for it too.
            await asyncio.wait({self._introduction}, timeout=patience)
        if item.fresh:
            return await self._wait(self._ask(item), deadline)
        verdict = self.cache.get(cache_key(item, self.fingerprint))
        if verdict is not None:
            transport.CACHE_HITS.labels("known").inc()
            return verdict

        key = cache_key(item, "")
        question = self._questions.get(key)
        if question is not None and not question.future.done():
            transport.CACHE_HITS.labels("in_flight").inc()
            return await self._wait(question, deadline)
        question = self._ask(item, key)
        self._questions[key] = question
        question.future.add_done_callback(lambda _: self._forget(question))
        return await self._wait(question, deadline)

    async def version(self) -> JudgeVersion:
        """The judge's own description. Raises InfrastructureFailure."""
        body = await self.connection.get("/version")
        try:
            return JudgeVersion.model_validate_json(body)
        except ValidationError as error:
            raise InfrastructureFailure(
                f"{self.connection.url}/version is not a judge's: {error}"
            ) from error

    async def close(self) -> None:
        """End all requests; callers that still wait get no verdict."""
        tasks = list(self._senders)
        if self._introduction is not None:
            tasks.append(self._introduction)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The connection closes last: the others send requests over it.
        await self.breaker.close()
        await self.canary.close()
        await self.connection.close()
        self.cache.close()

    async def _introduce(self) -> None:
        """Ask for the fingerprint, once.

        A judge that does not answer now gives its fingerprint with its first verdict.
        """
        try:
            version = await self.version()
        except InfrastructureFailure as error:
            self._note(error)
        else:
            self._record_fingerprint(version.fingerprint)

    def _ask(self, item: JudgeItem, key: str = "") -> _Question:
        question = _Question(item, key)
        self._queue.append(question)
        self._start_sender()
        return question

    def _start_sender(self) -> None:
        """Start one more sender, unless all requests are in use."""
        if len(self._senders) < self.settings.concurrency:
            self._senders.add(asyncio.create_task(self._send_all()))

    def _forget(self, question: _Question) -> None:
        if self._questions.get(question.key) is question:
            del self._questions[question.key]

    async def _wait(self, question: _Question, deadline: float) -> Result:
        question.waiters += 1
        transport.WAITING.set(len(self._questions))
        remaining = max(deadline - asyncio.get_running_loop().time(), 0.0)
        try:
            # ``wait`` does not cancel the future when this caller gives up: others may share it.
            done, _ = await asyncio.wait({question.future}, timeout=remaining)
            return question.future.result() if done else self._unscored()
        finally:
            question.waiters -= 1
            if not question.waiters and not question.future.done():
                question.future.cancel()
                # At once: a new caller must not get the cancelled question.
                self._forget(question)
            transport.WAITING.set(len(self._questions))

    def _unscored(self) -> JudgeUnscored:
        """Why a question has no verdict in time: the last error, if there was one."""
        error = self.last_error
        timed_out = error is None or (isinstance(error, Transient) and error.reason == "timeout")
        kind = NoVerdict.TIMEOUT if timed_out else NoVerdict.UNAVAILABLE
        reason = str(error) if error else f"{self.connection.url}: no verdict in time"
        if self.breaker.state is not BreakerState.CLOSED:
            reason += " (the breaker is open)"
        return JudgeUnscored(kind=kind, reason=reason[:_MAX_REASON])

    async def _send_all(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while True:
                batch = self._next_batch()
                if not batch:
                    break
                try:
                    await self._send(batch)
                except Exception as error:
                    for question in _open(batch):
                        question.future.set_exception(error)
        finally:
            # At once: the next caller must see that a sender is free.
            self._senders.discard(task)

    def _next_batch(self) -> list[_Question]:
        """Take questions from the queue: one to be sent alone, or up to a full request."""
        batch: list[_Question] = []
        while self._queue and len(batch) < self.settings.batch:
            if self._queue[0].alone and batch:
                break
            batch += _open([self._queue.popleft()])
            if batch and batch[-1].alone:
                break
        return batch

    async def _send(self, batch: list[_Question]) -> None:
        """Send a batch until each item has a verdict, is refused, or no caller waits for it.

        A batch that fails twice in the same way is sent item by item. The failure of a single item
        is not the judge's while the canary is right; after MAX_ITEM_FAILURES of them the item has
        no verdict.
        """
        tries = 0
        item_failures = 0
        last_reason = ""
        while batch:
            await self.breaker.closed()
            # Callers may have given up while the breaker was open.
            batch = _open(batch)
            try:
                retries, failure = await self._send_once(batch)
            except JudgeRefused as error:
                self._note(error)
                # One bad item is enough for a judge to refuse a batch.
                if len(batch) > 1 and error.status in _STATUSES_OF_BAD_ITEMS:
                    return self._queue_one_by_one(batch)
                return _no_verdict(batch, NoVerdict.UNAVAILABLE, str(error))

            if failure is None:
                self.last_error = None
                self.breaker.succeeded()
                return
            self._note(failure)
            transport.RETRIES.labels(failure.reason).inc()
            whole_batch_failed = len(retries) == len(batch)
            same_failure = failure.perhaps_an_item and failure.reason == last_reason
            if whole_batch_failed and len(batch) > 1 and same_failure:
                return self._queue_one_by_one(batch)

            if whole_batch_failed:
                # The first failure is not yet the item's: the judge may have been unwell.
                if tries and await self._is_fault_of_item(batch, failure):
                    item_failures += 1
                    # The item is to blame, so the judge's row of failures ends here.
                    self.breaker.succeeded()
                else:
                    item_failures = 0
                    self.breaker.failed(failure)
            if item_failures >= MAX_ITEM_FAILURES:
                reason = f"a judge that is right about its canary fails on this item: {failure}"
                return _no_verdict(batch, NoVerdict.INVALID, reason)

            last_reason = failure.reason
            await asyncio.sleep(self._pause(tries, failure))
            tries += 1
            batch = _open(retries)

    def _pause(self, tries: int, failure: Transient) -> float:
        """Seconds before the next try."""
        pause = min(self.settings.backoff * 2.0**tries, self.settings.backoff_max)
        # With jitter: clients that failed together must not come back together.
        return max(failure.retry_after, pause * random.uniform(0.5, 1.0))

    async def _send_once(self, batch: list[_Question]) -> tuple[list[_Question], Transient | None]:
        """Send a batch once.

        Returns the questions without a result, and the failure that makes another try necessary.
        """
        if not batch:
            return [], None
        try:
            results = await self.connection.judge([question.item for question in batch])
        except Transient as error:
            return batch, error
        self._count(results)
        retries = []
        failure = None
        for question, result in zip(batch, results, strict=True):
            if isinstance(result, JudgeUnscored) and result.kind is not NoVerdict.INVALID:
                retries.append(question)
                reason = "timeout" if result.kind is NoVerdict.TIMEOUT else "unavailable"
                failure = Transient(reason, f"{self.connection.url}: {result.reason}")
            else:
                self._settle(question, result)
        return retries, failure

    def _queue_one_by_one(self, batch: list[_Question]) -> None:
        """Put the questions back to the front of the queue, each to be sent alone."""
        # In reverse, since each goes to the front of the queue.
        for question in reversed(_open(batch)):
            question.alone = True
            self._queue.appendleft(question)
            self._start_sender()

    async def _is_fault_of_item(self, batch: list[_Question], failure: Transient) -> bool:
        """Whether the only item of a request is the cause of its failure.

        It is when the canary is judged right at the same time.
        """
        if len(batch) > 1 or not failure.perhaps_an_item:
            return False
        try:
            await self.canary.recent()
        except RayloopError:
            return False
        return True

    def _settle(self, question: _Question, result: Result) -> None:
        if isinstance(result, JudgeVerdict) and not question.item.fresh:
            self.cache.put(cache_key(question.item, result.fingerprint), result)
        for open_question in _open([question]):
            open_question.future.set_result(result)

    def _count(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, JudgeVerdict):
                transport.VERDICTS.labels(result.verdict, result.decided_by).inc()
                self._record_fingerprint(result.fingerprint)
            else:
                transport.VERDICTS.labels(result.kind, "").inc()

    def _record_fingerprint(self, fingerprint: str) -> None:
        """Keep the judge's fingerprint; report a change of model, rubric or version of the code."""
        if fingerprint not in self.fingerprints:
            if self.fingerprints:
                transport.CHANGES.inc()
                logger.warning(
                    "the judge at %s changed in mid-run: its fingerprint was %s and is now %s;"
                    " verdicts before and after may differ",
                    self.connection.url,
                    self.fingerprint,
                    fingerprint,
                )
            self.fingerprints.append(fingerprint)
        self.fingerprint = fingerprint

    def _note(self, error: Exception) -> None:
        self.last_error = error


def _no_verdict(batch: Sequence[_Question], kind: NoVerdict, reason: str) -> None:
    for question in _open(batch):
        question.future.set_result(JudgeUnscored(kind=kind, reason=reason[:_MAX_REASON]))


def _open(questions: Sequence[_Question]) -> list[_Question]:
    """The questions that callers still wait for."""
    return [question for question in questions if not question.future.done()]
