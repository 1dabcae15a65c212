"""Where a step's metrics go besides metrics.jsonl: Prometheus (through Ray), TensorBoard, Weights & Biases.

Each logger works in a thread of its own behind a bounded queue: it can neither delay a run nor stop it. One that fails or
blocks is dropped with an event.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

from rayloop.run.folder import RunFolder
from rayloop.run.loggers import AnySettings, PrometheusSettings, TensorBoardSettings, WandbSettings
from rayloop.run.metrics import prometheus

WAITING = 1000
"""Records that may wait for a logger."""
REPEAT = 3.0
"""Seconds between two exports of the gauges: Ray forgets one that was not set since its last report, which it makes every 10 s."""


class Logger(Protocol):
    """What a logger does. Its constructor, ``log`` and ``close`` run in its thread; they may block, and raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of ``step``, which has them all under the names of docs/metrics.md. After a restore steps repeat."""

    def close(self) -> None:
        """Write what is still buffered; nothing is logged afterwards."""


class Prometheus:
    """Gauges of ``ray.util.metrics``, named by ``rayloop.run.metrics.prometheus``, with the label ``run``.

    A metric keeps its value until a step has a new one.
    """

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._run, self._make, self._gauges = run, Gauge, dict[str, Any]()
        self._newest: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._repeat, daemon=True, name="prometheus-repeat").start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._export(metrics)
        self._newest = self._newest | dict(metrics)

    def close(self) -> None:
        self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT):
            self._export(self._newest)

    def _export(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            row, labels = prometheus(name)
            if row.prometheus not in self._gauges:
                self._gauges[row.prometheus] = self._make(row.prometheus, row.meaning, ("run", *labels))
            self._gauges[row.prometheus].set(value, {"run": self._run, **labels})


class TensorBoard:
    """Scalars in an event file of its own below ``folder``, which TensorBoard reads together with those of earlier drivers."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._next: int | None = None
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step != self._next:  # a new file, or a restore: the reader forgets this step and later ones
            self._write(step=step, session_log=self._session(status=self._session.START))
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items() if tag != "step"]
        self._write(step=step, summary=self._summary(value=values))
        self._next = step + 1

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


class Wandb:
    """One run of Weights & Biases for all drivers of a rayloop run. After a restore W&B shows the repeated steps twice."""

    def __init__(self, settings: WandbSettings, name: str, config: Mapping[str, Any], folder: RunFolder) -> None:
        import wandb

        folder.wandb.mkdir(exist_ok=True)
        known = folder.wandb / "id"
        if not known.exists():
            known.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=settings.project, entity=settings.entity, mode=settings.mode, name=name, config=dict(config),
            id=known.read_text(encoding="utf-8"), resume="allow", dir=str(folder.path),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})  # W&B's own step only counts up: it would refuse a repeated one

    def close(self) -> None:
        self._run.finish()


def open_logger(settings: AnySettings, name: str, config: Mapping[str, Any], folder: RunFolder) -> Logger:
    """The logger of the run ``name``; ``config`` is what W&B shows as its configuration. Raises whatever its package raises."""
    match settings:
        case PrometheusSettings():
            return Prometheus(name)
        case TensorBoardSettings():
            return TensorBoard(folder.tensorboard)
        case WandbSettings():
            return Wandb(settings, name, config, folder)


class LoggerThread:
    """One logger and its thread, in which ``opening`` makes it."""

    def __init__(self, settings: AnySettings, opening: Callable[[], Logger]) -> None:
        self.kind, self._timeout = settings.kind, settings.timeout
        self._records: Queue[tuple[int, Mapping[str, float]] | None] = Queue(WAITING)
        self._error: BaseException | None = None
        self._busy: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(opening,), daemon=True, name=f"logger-{self.kind}")
        self._thread.start()

    def problem(self) -> str | None:
        """Why the logger must be dropped; None while it works."""
        busy = self._busy
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        if busy is not None and time.monotonic() - busy > self._timeout:
            return f"a call has not returned for {self._timeout:g} s"
        return f"{WAITING} records wait for it" if self._records.full() else None

    def put(self, record: tuple[int, Mapping[str, float]] | None) -> None:
        """Hand over a step's metrics, or None to close the logger. Only while there is no ``problem``."""
        self._records.put_nowait(record)

    async def ended(self) -> str | None:
        """Wait until the logger is closed, for at most the timeout. Returns its problem."""
        until = time.monotonic() + self._timeout
        while self._thread.is_alive():
            if time.monotonic() > until:
                return f"it could not be closed within {self._timeout:g} s"
            await asyncio.sleep(0.02)
        return self.problem()

    def _work(self, opening: Callable[[], Logger]) -> None:
        try:
            logger = opening()
            while (record := self._take()) is not None:
                logger.log(*record)
            logger.close()
        except BaseException as error:  # foreign code may raise SystemExit too; ``problem`` tells it
            self._error = error
        self._busy = None

    def _take(self) -> tuple[int, Mapping[str, float]] | None:
        self._busy = None
        record = self._records.get()
        self._busy = time.monotonic()
        return record


class Loggers:
    """All loggers of a run. ``failed(kind, why)`` is called when one is dropped, by the thread that calls the methods here."""

    def __init__(
        self,
        chosen: Iterable[AnySettings],
        opening: Callable[[AnySettings], Logger],
        failed: Callable[[str, str], None],
    ) -> None:
        self._workers = [LoggerThread(settings, partial(opening, settings)) for settings in chosen]
        self._failed = failed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand ``metrics``, which nobody changes any more, to all loggers. Never waits, never raises."""
        self._drop({worker: worker.problem() for worker in self._workers})
        for worker in self._workers:
            worker.put((step, metrics))

    async def close(self) -> None:
        """Close all loggers at once; each is waited for at most its timeout."""
        self._drop({worker: worker.problem() for worker in self._workers})
        for worker in self._workers:
            worker.put(None)
        self._drop({worker: await worker.ended() for worker in self._workers})
        self._workers = []

    def _drop(self, problems: Mapping[LoggerThread, str | None]) -> None:
        for worker, why in problems.items():
            if why is not None:
                self._workers.remove(worker)
                self._failed(worker.kind, why)
