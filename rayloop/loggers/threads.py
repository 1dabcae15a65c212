"""The loggers of a run, each in a thread behind a bounded queue.

One that keeps failing, or blocks, is dropped with an event.
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

PATIENCE = 300.0
"""Seconds of failures in a row after which a logger that has worked is dropped: storage and
networks come back.
"""
TIMEOUT = 60.0
"""Seconds for one call of a logger, and for its end, before it is dropped.

The run does not wait meanwhile.
"""
WAITING = 1000
"""Records that may wait for a logger."""


class Logger(Protocol):
    """What a logger does.

    Its methods run in its thread; they may block, and raise anything. One that has ``rollouts(step,
    records)`` gets the recorded episodes (``rayloop.run.folder.RolloutRecord``) of each step, too.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of ``step``, by the names of docs/metrics.md.

        After a restore steps repeat.
        """

    def close(self) -> None:
        """Write what is still buffered; nothing is logged afterwards."""


class LoggerThread:
    """One logger and its thread, in which ``opening`` makes it.

    ``records``: method, step and argument; None closes it.
    """

    def __init__(self, settings: AnySettings, opening: Callable[[], Logger]) -> None:
        self.kind = name_of(settings)
        self.records: Queue[tuple[str, int, Any] | None] = Queue(WAITING)
        self._error: BaseException | None = None
        self._failing: tuple[float, Exception] | None = None
        self._works = False
        self._busy: float | None = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, args=(opening,), daemon=True, name=f"logger-{self.kind}"
        )
        self._thread.start()

    def problem(self) -> str | None:
        """Why the logger must be dropped; None while it works."""
        busy = self._busy
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        if busy is not None and time.monotonic() - busy > TIMEOUT:
            return f"a call has not returned for {TIMEOUT:g} s"
        return f"{WAITING} records wait for it" if self.records.full() else None

    async def ended(self) -> str | None:
        """Wait until the logger is closed, for at most the timeout. Returns its problem."""
        until = time.monotonic() + TIMEOUT
        while self._thread.is_alive():
            if time.monotonic() > until:
                return f"it could not be closed within {TIMEOUT:g} s"
            await asyncio.sleep(0.02)
        return self.problem()

    def _work(self, opening: Callable[[], Logger]) -> None:
        try:
            self._logger = opening()
            while (record := self._take()) is not None:
                try:
                    self._pass(opening, *record)
                except Exception as error:
                    self._fail(error)
            if self._failing is not None:
                raise self._failing[1]
            self._logger.close()
        except (
            BaseException
        ) as error:  # foreign code may raise SystemExit too; ``problem`` reports it
            self._error = error
        self._busy = None

    def _pass(self, opening: Callable[[], Logger], method: str, *arguments: Any) -> None:
        """One record, to a new logger when the last one failed: half of a record may be in its
        file. Raises what it raises.
        """
        if self._failing is not None:
            self._logger = opening()
        getattr(self._logger, method, lambda *_: None)(*arguments)
        self._failing, self._works = None, True

    def _fail(self, error: Exception) -> None:
        """A record is lost. Raises ``error`` when no other logger is worth a try."""
        now = time.monotonic()
        since = now if self._failing is None else self._failing[0]
        if not self._works or now - since >= PATIENCE:
            raise error
        self._failing = since, error
        logger.warning(
            "the logger %s failed, and is opened again for the next record: %s", self.kind, error
        )
        with suppress(Exception):
            self._logger.close()

    def _take(self) -> tuple[str, int, Any] | None:
        self._busy = None
        record = self.records.get()
        self._busy = time.monotonic()
        return record


class Loggers:
    """All loggers of a run.

    ``failed(kind, why)`` is called when one is dropped, by the thread that calls the methods here.
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
        """Pass ``metrics``, which no caller changes any more, to all loggers.

        Never waits, never raises.
        """
        self._put(("log", step, metrics))

    def rollouts(self, step: int, records: Any) -> None:
        """The same for the recorded episodes of ``step``."""
        self._put(("rollouts", step, records))

    async def close(self) -> None:
        """Close all loggers at once; each is waited for at most its timeout."""
        self._put(None)
        self._drop({worker: await worker.ended() for worker in self._workers})
        self._workers = []

    def _put(self, record: tuple[str, int, Any] | None) -> None:
        self._drop({worker: worker.problem() for worker in self._workers})
        for worker in self._workers:
            worker.records.put_nowait(record)

    def _drop(self, problems: Mapping[LoggerThread, str | None]) -> None:
        for worker, why in problems.items():
            if why is not None:
                self._workers.remove(worker)
                self._failed(worker.kind, why)
