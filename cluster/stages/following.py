"""Following a driver: its reports are shown, and its silence is judged, until it ends."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayloop.actors.failures import is_lost
from rayloop.actors.handles import Handle, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.supervision.watchdog import UNANSWERED_QUESTIONS, HeadWatch
from rayloop.core import incidents
from rayloop.core.failures import NotSaved, WorkerLost
from rayloop.run.folder import RunFolder
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.origin import Origin
from rayloop.view.formatting import describe
from rayloop.view.progress import Progress

POLL_INTERVAL_S = 0.5
"""Seconds between two looks at the driver."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds for the driver's first and last answer."""
SILENCE_REPORT_AFTER_S = 10.0
"""Seconds after which a driver that does not answer in between is reported."""
LIVENESS_TIMEOUT_S = 5.0
"""Seconds in which the thread for questions of a silent driver must show that its process runs."""


@dataclass
class Following:
    """Shows the reports of a driver until it ends.

    ``until`` returns the time (``time.monotonic``) at which it must have ended.
    """

    driver: Handle[DriverActor]
    progress: Progress
    recovery: RecoverySettings
    until: Callable[[], float]
    origin: Origin
    folder: RunFolder
    head: HeadWatch
    _reports_seen: int = 0
    _answered: float = field(default_factory=time.monotonic)
    _report_silence_after: float = field(default_factory=lambda: ANSWER_TIMEOUT_S)
    _has_answered: bool = False
    _frozen_s: float = 0.0
    _questions: int = 0

    def follow(self) -> dict[str, Any]:
        """Return the driver's result.

        Raises its error, RunTaken, RayDead, WorkerLost when its process gives no sign of life for
        ``health_timeout`` seconds or its loop for ``stall_timeout``, and NotSaved when it has not
        ended at the time ``until()``.
        """
        running = submit(self.driver, DriverActor.main)
        while True:
            self.folder.lock.check()
            self.head.check()
            ended, _ = ray.wait([running], timeout=POLL_INTERVAL_S)
            updates, doing = self._ask_updates(ended=bool(ended))
            if not ended and time.monotonic() > self.until():
                raise NotSaved(
                    "the run was not saved within preemption.grace. Raise it (and what the"
                    " scheduler allows) above the time of a step and a checkpoint;"
                    f" {self.origin.again()}"
                )
            for kind, record in updates:
                self._show(kind, record)
            self.progress.doing(doing)
            if ended:
                result: dict[str, Any] = ray.get(running)
                return result

    def _ask_updates(self, *, ended: bool) -> tuple[list[tuple[str, Any]], str]:
        """The driver's new reports, and its present activity."""
        # A driver that has ended still has its last reports, which are worth a longer wait.
        patience = ANSWER_TIMEOUT_S
        if not ended:
            patience = max(POLL_INTERVAL_S, min(SILENCE_REPORT_AFTER_S, self._seconds_left()))
        try:
            question = submit(self.driver, DriverActor.updates, self._reports_seen)
            self._reports_seen, updates, doing = ray.get(question, timeout=patience)
        except GetTimeoutError:
            self._note_silence(patience)
            return [], "waiting for the driver"
        except RayError as error:
            if not is_lost(error):
                raise
            # The call of ``main`` raises it.
            return [], ""
        self._answered = time.monotonic()
        self._report_silence_after = SILENCE_REPORT_AFTER_S
        self._has_answered = True
        self._frozen_s = 0.0
        self._questions = 0
        return updates, doing

    def _note_silence(self, patience: float) -> None:
        """Report a driver that does not answer. Raises WorkerLost when it is given up."""
        silent = time.monotonic() - self._answered
        # A driver that is still being started is not frozen. Only the waits are counted: the time
        # that has passed may be a stop of this process (Ctrl-Z), and the driver's answers are only
        # late then.
        if self._has_answered and not self._process_runs():
            self._frozen_s += patience + LIVENESS_TIMEOUT_S
            self._questions += 1
        else:
            self._frozen_s = 0.0
            self._questions = 0

        if self._frozen_s:
            left = self.recovery.health_timeout - self._frozen_s
        else:
            left = self.recovery.stall_timeout - silent
        if left <= 0 and (not self._frozen_s or self._questions >= UNANSWERED_QUESTIONS):
            raise WorkerLost(f"the driver has not answered for {silent:.0f} s") from None
        if silent > self._report_silence_after:
            event = incidents.DriverSilent(round(silent, 1), left=round(max(0.0, left), 1))
            self.progress.note(describe(event.record()))
            # In a thread, since storage that hangs must not hold up this process too.
            write = threading.Thread(
                target=self.folder.events.beside, args=(event.record(),), daemon=True
            )
            write.start()
            self._report_silence_after = 2 * silent

    def _process_runs(self) -> bool:
        timeout = min(LIVENESS_TIMEOUT_S, max(POLL_INTERVAL_S, self._seconds_left()))
        return _lives(self.driver, timeout)

    def _seconds_left(self) -> float:
        return self.until() - time.monotonic()

    def _show(self, kind: str, record: Any) -> None:
        """Show one report."""
        if kind == "step":
            self.progress.step(record)
        elif kind == "samples":
            self.progress.samples(record)
        elif record["event"] != "failed":
            # A failure is raised at the end.
            self.progress.note(describe(record))


def _lives(driver: Handle[DriverActor], within: float) -> bool:
    """Whether the driver's process runs, even if its loop is held up.

    An actor has a thread for questions (actors/base.py).
    """
    answers, _ = ray.wait([submit(driver, DriverActor.host)], timeout=within)
    return bool(answers)
