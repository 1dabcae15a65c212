"""The judge's client, one per process: it asks each question once, waits through failures, and
never makes one a zero. Questions that wait are sent together, at most ``batch`` per request and
``concurrency`` requests at a time; while a request is free a question is sent at once, so batches
form only under load.
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

ENOUGH = 8
"""Failures in a row of one item alone, the canary being right each time, after which it has no
verdict.
"""


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
    """Whether the canary's verdicts must be right; off only for judges whose verdicts are noise
    (tests of the path).
    """
    cache_size: int = Field(100_000, ge=1)
    """Verdicts kept in memory. Raise it when questions repeat over more than that."""
    cache_file: str = ""
    """SQLite file that keeps verdicts between runs and for other processes of this machine; "" for
    none.
    """


@dataclass(eq=False)
class _Question:
    """A distinct item without a verdict, and the number of callers that wait for it.

    ``alone``: it is sent by itself.
    """

    item: JudgeItem
    key: str = ""
    alone: bool = False
    future: asyncio.Future[Result] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    waiters: int = 0


class JudgeClient:
    """The client for one event loop, outside of which it may be made.

    ``fingerprint`` is the judge's, "" before an answer.
    """

    def __init__(
        self,
        settings: ClientSettings,
        find: Find | None = None,
        known: Sequence[Labelled] | None = None,
    ) -> None:
        """``known``: items that a judge in good health judges right; the shipped ones by default."""
        self.settings = settings
        self.connection = JudgeConnection(settings, find)
        self.canary = Canary(
            canary() if known is None else known, self.connection, settings.canary, self._count
        )
        self.cache = VerdictCache(
            settings.cache_size, local_path(settings.cache_file) if settings.cache_file else None
        )
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
        """The verdict, or after ``patience`` seconds the reason why there is none.

        Raises ConfigError for an unusable key file.
        """
        deadline = asyncio.get_running_loop().time() + patience
        if not self.fingerprint and self.settings.cache_file:  # the keys of the cache need it
            self._introduction = self._introduction or asyncio.create_task(self._introduce())
            # ``wait`` leaves the task alone when this caller gives up: others wait for it too.
            await asyncio.wait({self._introduction}, timeout=patience)
        if item.fresh:
            return await self._wait(self._ask(item), deadline)
        if (known := self.cache.get(cache_key(item, self.fingerprint))) is not None:
            transport.CACHE_HITS.labels("known").inc()
            return known
        key = cache_key(item, "")
        question = self._questions.get(key)
        if question is not None and not question.future.done():
            transport.CACHE_HITS.labels("in_flight").inc()
            return await self._wait(question, deadline)
        question = self._questions[key] = self._ask(item, key)
        question.future.add_done_callback(lambda _: self._forget(question))
        return await self._wait(question, deadline)

    async def version(self) -> JudgeVersion:
        """The judge's own description. Raises InfrastructureFailure."""
        try:
            return JudgeVersion.model_validate_json(await self.connection.get("/version"))
        except ValidationError as error:
            raise InfrastructureFailure(
                f"{self.connection.url}/version is not a judge's: {error}"
            ) from error

    async def close(self) -> None:
        """End all requests; callers that still wait get no verdict."""
        tasks = [*self._senders, *([self._introduction] if self._introduction else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The connection closes after all that sends requests over it.
        await self.breaker.close()
        await self.canary.close()
        await self.connection.close()
        self.cache.close()

    async def _introduce(self) -> None:
        """Ask for the fingerprint, once.

        A judge that does not answer now shows it with its first verdict.
        """
        try:
            self._met((await self.version()).fingerprint)
        except InfrastructureFailure as error:
            self._note(error)

    def _ask(self, item: JudgeItem, key: str = "") -> _Question:
        question = _Question(item, key)
        self._queue.append(question)
        self._more_senders()
        return question

    def _more_senders(self) -> None:
        if len(self._senders) < self.settings.concurrency:
            self._senders.add(asyncio.create_task(self._send_all()))

    def _forget(self, question: _Question) -> None:
        if self._questions.get(question.key) is question:
            del self._questions[question.key]

    async def _wait(self, question: _Question, deadline: float) -> Result:
        question.waiters += 1
        transport.WAITING.set(len(self._questions))
        try:
            # A caller that gives up or is cancelled must not cancel a question of others.
            done, _ = await asyncio.wait(
                {question.future}, timeout=max(deadline - asyncio.get_running_loop().time(), 0.0)
            )
            return question.future.result() if done else self._none()
        finally:
            question.waiters -= 1
            if not question.waiters and not question.future.done():
                question.future.cancel()
                self._forget(question)  # at once: a new caller must not get the cancelled question
            transport.WAITING.set(len(self._questions))

    def _none(self) -> JudgeUnscored:
        error = self.last_error
        late = error is None or (isinstance(error, Transient) and error.reason == "timeout")
        reason = str(error) if error else f"{self.connection.url}: no verdict in time"
        state = "" if self.breaker.state is BreakerState.CLOSED else " (the breaker is open)"
        return JudgeUnscored(
            kind=NoVerdict.TIMEOUT if late else NoVerdict.UNAVAILABLE,
            reason=f"{reason}{state}"[:1024],
        )

    async def _send_all(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while batch := self._take():
                try:
                    await self._send(batch)
                except Exception as error:
                    for question in _open(batch):
                        question.future.set_exception(error)
        finally:
            self._senders.discard(task)  # at once: the next caller must see that a sender is free

    def _take(self) -> list[_Question]:
        batch: list[_Question] = []
        while self._queue and len(batch) < self.settings.batch:
            if self._queue[0].alone and batch:
                break
            batch += _open([self._queue.popleft()])
            if batch and batch[-1].alone:
                break
        return batch

    async def _send(self, batch: list[_Question]) -> None:
        """Send a batch until each item has a verdict, is refused, or no caller waits for it any
        more. A batch that fails twice in the same way is sent item by item. The failure of a single
        item is not the judge's while the canary is right; after ENOUGH of them the item has no
        verdict.
        """
        tries, blamed, before = 0, 0, ""
        while batch:
            await self.breaker.closed()
            # Callers may have given up while the breaker was open.
            batch = _open(batch)
            try:
                again, failure = await self._send_once(batch)
            except JudgeRefused as error:
                self._note(error)
                if len(batch) > 1 and error.status in (400, 413, 422):
                    return self._one_by_one(batch)  # a bad item spoils a batch
                return _no_verdict(batch, NoVerdict.UNAVAILABLE, str(error))

            if failure is None:
                self.last_error = None
                self.breaker.succeeded()
                return
            self._note(failure)
            transport.RETRIES.labels(failure.reason).inc()
            if (
                len(again) == len(batch) > 1
                and failure.perhaps_an_item
                and failure.reason == before
            ):
                return self._one_by_one(batch)

            if len(again) == len(batch):
                blamed = blamed + 1 if tries and await self._its_own_doing(batch, failure) else 0
                # The item is to blame, so the judge's row of failures ends here.
                if blamed:
                    self.breaker.succeeded()
                else:
                    self.breaker.failed(failure)
            if blamed >= ENOUGH:
                reason = f"a judge that is right about its canary fails on this item: {failure}"
                return _no_verdict(batch, NoVerdict.INVALID, reason)

            before = failure.reason
            pause = min(self.settings.backoff * 2.0**tries, self.settings.backoff_max)
            # With jitter: clients that failed together must not come back together.
            await asyncio.sleep(max(failure.retry_after, pause * random.uniform(0.5, 1.0)))
            tries += 1
            batch = _open(again)

    async def _send_once(self, batch: list[_Question]) -> tuple[list[_Question], Transient | None]:
        """Send a batch once.

        Returns the questions without a result, and the failure because of which they are sent
        again.
        """
        if not batch:
            return [], None
        try:
            results = await self.connection.judge([question.item for question in batch])
        except Transient as error:
            return batch, error
        self._count(results)
        again, failure = [], None
        for question, result in zip(batch, results, strict=True):
            if isinstance(result, JudgeUnscored) and result.kind is not NoVerdict.INVALID:
                again.append(question)
                reason = "timeout" if result.kind is NoVerdict.TIMEOUT else "unavailable"
                failure = Transient(reason, f"{self.connection.url}: {result.reason}")
            else:
                self._settle(question, result)
        return again, failure

    def _one_by_one(self, batch: list[_Question]) -> None:
        """Put the questions back to the front of the queue, each to be sent alone."""
        # In reverse, since each goes to the front of the queue.
        for question in reversed(_open(batch)):
            question.alone = True
            self._queue.appendleft(question)
            self._more_senders()

    async def _its_own_doing(self, batch: list[_Question], failure: Transient) -> bool:
        """Whether the only item of a request is the cause of its failure: the canary is judged
        right at the same time.
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
                self._met(result.fingerprint)
            else:
                transport.VERDICTS.labels(result.kind, "").inc()

    def _met(self, fingerprint: str) -> None:
        """Report a change of the judge: another model, rubric or version of the code."""
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
        question.future.set_result(JudgeUnscored(kind=kind, reason=reason[:1024]))


def _open(questions: Sequence[_Question]) -> list[_Question]:
    """The questions that callers still wait for."""
    return [question for question in questions if not question.future.done()]
