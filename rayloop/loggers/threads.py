"""The loggers of a run, each in a thread behind a bounded queue.

A logger that keeps failing, or blocks, is dropped with an event.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import Any, Protocol

from rayloop.loggers.settings import AnySettings, name_of

logger = logging.getLogger(__name__)

MOST_FAILING_S = 300.0
"""Seconds of consecutive failures after which a logger that has worked is dropped.

Storage and networks may recover before that.
"""
CALL_TIMEOUT_S = 60.0
"""Seconds for one call of a logger, and for its end, before it is dropped.

The run does not wait for the call.
"""
MOST_WAITING_RECORDS = 1000
"""Records that may wait for a logger."""
_ALIVE_CHECK_INTERVAL_S = 0.02


class Logger(Protocol):
    """The interface of a logger.

    Its methods run in its thread; they may block, and raise anything. A logger that has
    ``rollouts(step, records)`` also gets the recorded episodes of each step
    (``rayloop.run.records.rollouts.RolloutRecord``).
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of ``step``, by the names of docs/metrics.md.

        After a restore steps repeat.
        """

    def close(self) -> None:
        """Write buffered data; nothing is logged afterwards."""


class LoggerThread:
    """One logger and its thread, in which ``opening`` constructs it.

    ``records``: method, step and argument; None closes it.
    """

    def __init__(self, settings: AnySettings, opening: Callable[[], Logger]) -> None:
        self.kind = name_of(settings)
        self.records: Queue[tuple[str, int, Any] | None] = Queue(MOST_WAITING_RECORDS)
        self._error: BaseException | None = None
        self._failing_since: float | None = None
        self._last_failure: Exception | None = None
        self._has_worked = False
        self._busy_since: float | None = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, args=(opening,), daemon=True, name=f"logger-{self.kind}"
        )
        self._thread.start()

    def problem(self) -> str | None:
        """Why the logger must be dropped; None while it works."""
        # Read once: the logger's thread may set it to None at any time.
        busy_since = self._busy_since
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        if busy_since is not None and time.monotonic() - busy_since > CALL_TIMEOUT_S:
            return f"a call has not returned for {CALL_TIMEOUT_S:g} s"
        return f"{MOST_WAITING_RECORDS} records wait for it" if self.records.full() else None

    async def ended(self) -> str | None:
        """Wait until the logger is closed, for at most the timeout. Returns its problem."""
        until = time.monotonic() + CALL_TIMEOUT_S
        while self._thread.is_alive():
            if time.monotonic() > until:
                return f"it could not be closed within {CALL_TIMEOUT_S:g} s"
            await asyncio.sleep(_ALIVE_CHECK_INTERVAL_S)
        return self.problem()

    def _work(self, opening: Callable[[], Logger]) -> None:
        try:
            self._logger = opening()
            while True:
                record = self._take()
                if record is None:
                    break
                try:
                    self._pass(opening, *record)
                except Exception as error:
                    self._fail(error)
            if self._last_failure is not None:
                raise self._last_failure
            self._logger.close()
        except BaseException as error:
            # Foreign code may raise SystemExit too; ``problem`` reports it.
            self._error = error
        self._busy_since = None

    def _pass(self, opening: Callable[[], Logger], method: str, *arguments: Any) -> None:
        """Pass one record to the logger. Raises its errors.

        After a failure the logger is new: half of a record may be in the file of the last one.
        """
        if self._last_failure is not None:
            self._logger = opening()
        getattr(self._logger, method, lambda *_: None)(*arguments)
        self._failing_since = None
        self._last_failure = None
        self._has_worked = True

    def _fail(self, error: Exception) -> None:
        """Note that a record is lost. Raises ``error`` when the logger must not be opened again."""
        now = time.monotonic()
        since = now if self._failing_since is None else self._failing_since
        if not self._has_worked or now - since >= MOST_FAILING_S:
            raise error
        self._failing_since = since
        self._last_failure = error
        logger.warning(
            "the logger %s failed, and is opened again for the next record: %s", self.kind, error
        )
        with suppress(Exception):
            self._logger.close()

    def _take(self) -> tuple[str, int, Any] | None:
        self._busy_since = None
        record = self.records.get()
        self._busy_since = time.monotonic()
        return record


class Loggers:
    """All loggers of a run.

    ``failed(kind, why)`` is called when a logger is dropped, by the thread that calls these
    methods.
    """

    def __init__(
        self,
        chosen: Iterable[AnySettings],
        opening: Callable[[AnySettings], Logger],
        failed: Callable[[str, str], None],
    ) -> None:
        self._workers = [LoggerThread(settings, partial(opening, settings)) for settings in chosen]
        self._failed = failed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass ``metrics``, which the caller must not change any more, to all loggers.

        It never waits and never raises.
        """
        self._put(("log", step, metrics))

    def rollouts(self, step: int, records: Any) -> None:
        """Pass the recorded episodes of ``step`` to all loggers, as ``log`` does with metrics."""
        self._put(("rollouts", step, records))

    async def close(self) -> None:
        """Close all loggers at once, and wait for each for at most its timeout."""
        self._put(None)
        self._drop({worker: await worker.ended() for worker in self._workers})
        self._workers = []

    def _put(self, record: tuple[str, int, Any] | None) -> None:
        self._drop({worker: worker.problem() for worker in self._workers})
        for worker in self._workers:
            worker.records.put_nowait(record)

    def _drop(self, problems: Mapping[LoggerThread, str | None]) -> None:
        for worker, problem in problems.items():
            if problem is not None:
                self._workers.remove(worker)
                self._failed(worker.kind, problem)
