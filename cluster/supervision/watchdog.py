"""Watching for hangs: the stall watchdog, silent actors, and Ray itself.

The first two run in the driver, the last one in the ``train`` process. Without its head, Ray ends
the process after a while. A head that was started again knows nothing of the run.
"""

import asyncio
import itertools
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import AuthenticationError

from rayloop.actors.base import Actor, dump
from rayloop.actors.handles import Handle, submit
from rayloop.cluster.session import ask_head, node_lives
from rayloop.core import incidents
from rayloop.core.deadlines import WAITS, Awaited
from rayloop.core.events import Emit
from rayloop.core.failures import MachineFailed, Stalled
from rayloop.engines.machine import cores
from rayloop.run.lifetime import RecoverySettings

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Seconds between two looks."""
ANSWER_TIMEOUT_S = 5.0
"""Seconds that an actor, or the head, has to answer.

A process that is stopped, or holds the interpreter's lock, cannot.
"""
UNANSWERED_QUESTIONS = 2
"""Questions that an actor must leave unanswered before it is given up.

One is too few, as the asking process may itself have been stopped.

They are asked of a thread that does nothing else, so it answers during a step, however long that
is: torch's operations, collectives and waits for a GPU release the interpreter's lock. What holds
it, or stops every thread, takes seconds: pickling a large object, the import of a library from slow
storage, pages that come back from swap. ``recovery.health_timeout`` (30 s) is the patience that
idle actors get for the same; where pages or libraries need longer, it must be raised for both.
"""
REPORTED_WAITS = 8
"""Waits that a report names, the oldest first."""
LATE_CALL_AFTER_S = 4.0
"""Seconds that a call is awaited before its actor is checked."""
ROUND_INTERVAL_S = 4.0
"""Seconds between two rounds of checks."""
HEAD_LOST_AFTER_S = 50.0
"""Seconds of the head's silence after which the run gives it up. Ray itself waits 60."""
HEAD_SILENCE_REPORT_AFTER_S = 10.0
"""Seconds of the head's silence after which a line says so."""
HEAD_CHECK_INTERVAL_S = 2.0
"""Seconds between two checks of the head."""


async def watch(
    settings: RecoverySettings, phase: Callable[[], str], emit: Emit, folder: Path
) -> None:
    """Report a stall: nothing that the driver waits for ends.

    It is reported after ``stall_report`` seconds, after twice as long, and so on, with the stacks
    in ``folder``/stall-<n>.txt (or printed when the disk is full). Raises Stalled at
    ``stall_timeout``.
    """
    # Time before the watch began is not a stall.
    WAITS.moved = time.monotonic()
    report_after = settings.stall_report
    for number in itertools.count(1):
        while True:
            quiet = time.monotonic() - WAITS.moved
            if quiet >= min(report_after, settings.stall_timeout):
                break
            # Something moved, so the next stall is reported early again.
            if quiet < settings.stall_report:
                report_after = settings.stall_report
            await asyncio.sleep(LOOK_INTERVAL_S)
        waiting = await _first_of_each_actor()
        awaited = "; ".join(map(str, waiting[:REPORTED_WAITS])) or "nothing that is known"
        awaited += f"; load {os.getloadavg()[0]:.0f} on {cores()} cores of {socket.gethostname()}"
        if quiet >= settings.stall_timeout:
            raise Stalled(f"nothing moved for {quiet:.0f} s in phase {phase()}, awaited: {awaited}")
        file = folder / f"stall-{number}.txt"
        path = _write_stacks(file, await _stacks(waiting[:REPORTED_WAITS]))
        emit(incidents.StalledEvent(phase(), round(quiet, 1), awaited=awaited, stacks=path))
        report_after *= 2


async def watch_liveness(emit: Emit, patience: float = math.inf) -> None:
    """Emit ``Silent`` once for each awaited actor that does not answer.

    It is emitted again only after the actor has answered. After ``patience`` seconds of silence the
    actor is given up (``Waits.give_up``). An actor answers while it computes (``GROUPS`` of
    actors/base.py). An actor that is still starting is not asked.
    """
    silent_rounds = dict[Handle[Actor], int]()
    while True:
        await asyncio.sleep(ROUND_INTERVAL_S)
        # The newest first: in the mapping below the oldest
        # wait of an actor then replaces the others.
        waits = sorted(WAITS.open.values(), key=lambda wait: wait.since, reverse=True)
        overdue = [wait for wait in waits if _is_overdue(wait)]
        oldest = {wait.actor: wait for wait in overdue if wait.actor is not None}
        answers = await asyncio.gather(*(_answers(actor) for actor in oldest))
        silent = {
            actor: wait
            for (actor, wait), answered in zip(oldest.items(), answers, strict=True)
            if not answered
        }
        silent_rounds = {actor: silent_rounds.get(actor, 0) + 1 for actor in silent}
        for actor, wait in silent.items():
            rounds = silent_rounds[actor]
            if rounds == 1:
                seconds = round(time.monotonic() - wait.since, 1)
                emit(incidents.Silent(_name(wait.what), seconds, awaited=wait.what))
            # The rounds show how long the actor was silent. The clock
            # does not: this process may have been stopped in that time.
            quiet = rounds * (ROUND_INTERVAL_S + ANSWER_TIMEOUT_S) - ROUND_INTERVAL_S
            if rounds >= UNANSWERED_QUESTIONS and quiet >= patience:
                WAITS.give_up(
                    actor,
                    f"gave no sign of life for {quiet:.0f} s: its process or machine is stopped or"
                    " hangs",
                )


def _is_overdue(wait: Awaited) -> bool:
    """Whether the actor of a wait is checked."""
    return time.monotonic() - wait.since > LATE_CALL_AFTER_S and not wait.starts


async def _answers(actor: Handle[Actor]) -> bool:
    """Whether the actor answers within ``ANSWER_TIMEOUT_S``.

    An error counts as an answer: the call that is awaited raises it, too.
    """
    with suppress(Exception):
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await submit(actor, Actor.host)
        except TimeoutError:
            return False
    return True


def _name(awaited: str) -> str:
    """The actor in the description of a wait: ``rollout 0`` of ``health of rollout 0``."""
    match = re.search(r"(policy rank|\w+) \d+$", awaited)
    return match[0] if match else awaited


def _write_stacks(file: Path, stacks: str) -> str:
    """Write the stacks, and return the path below the run folder.

    When the storage refuses them, they are printed, and the path is "".
    """
    try:
        file.write_text(stacks, encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s):\n%s", file, error, stacks)
        return ""
    return f"{file.parent.name}/{file.name}"


@dataclass(frozen=True)
class _Stalled:
    """The waits for one actor.

    ``oldest``: its oldest call; ``more``: how many more of its calls are awaited; ``elsewhere``:
    the waits of the actor itself.
    """

    oldest: Awaited
    more: int
    elsewhere: list[tuple[str, Any]]

    def __str__(self) -> str:
        more = f" and {self.more} more of its calls" if self.more else ""
        waits = ", ".join(what for what, _ in self.elsewhere)
        elsewhere = f" ({waits})" if self.elsewhere else ""
        seconds = time.monotonic() - self.oldest.since
        return f"{self.oldest.what} for {seconds:.0f} s{more}{elsewhere}"


async def _first_of_each_actor() -> list[_Stalled]:
    """The open waits, the oldest first, those for one actor together."""
    by_actor: dict[Any, list[Awaited]] = {}
    for wait in WAITS.oldest():
        by_actor.setdefault(wait.actor or wait, []).append(wait)
    groups = list(by_actor.values())
    waits_elsewhere = await asyncio.gather(*(_elsewhere(waits[0].actor) for waits in groups))
    return [
        _Stalled(waits[0], len(waits) - 1, elsewhere)
        for waits, elsewhere in zip(groups, waits_elsewhere, strict=True)
    ]


async def _elsewhere(actor: Handle[Actor] | None) -> list[tuple[str, Any]]:
    """The waits of the actor itself; none when it does not answer."""
    with suppress(Exception):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return [] if actor is None else await submit(actor, Actor.awaits)
    return []


async def _stacks(waiting: list[_Stalled]) -> str:
    """The stacks of the awaited actors, then of those for which they wait, then of the driver."""
    awaited = [stalled.oldest for stalled in waiting]
    actors = {wait.actor: wait.what for wait in awaited if wait.actor is not None}
    for stalled in waiting:
        for what, actor in stalled.elsewhere:
            if actor is not None:
                actors.setdefault(actor, f"{stalled.oldest.what}: {what}")
    stacks = await asyncio.gather(*(_ask(actor) for actor in actors))
    parts = [
        f"=== awaited: {what} ===\n{text}"
        for what, text in zip(actors.values(), stacks, strict=True)
    ]
    tasks = "\n".join(repr(task) for task in asyncio.all_tasks())
    return "\n\n".join([*parts, f"=== driver ===\n{dump()}\n\ntasks\n{tasks}"]) + "\n"


async def _ask(actor: Handle[Actor]) -> str:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await submit(actor, Actor.stacks)
    except Exception as error:
        return f"does not answer: {type(error).__name__} {error}".splitlines()[0]


class RayDead(MachineFailed):
    """Ray has ended where a run needs it: no actor can be started."""


class HeadDead(RayDead):
    """The head of the cluster has ended, or was started again: none of its actors will answer."""


class NodeDead(RayDead):
    """Ray on the node of this process has ended.

    The driver runs there and nowhere else, since it ends with this process.
    """


class HeadWatch:
    """Checks whether actors can still be started.

    ``ask`` is ``ask_head``, and ``lives`` is ``node_lives``; ``note`` shows a line to the user;
    ``death`` is the reason why no actor can be started any more, or None.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        ask: Callable[[float], None] = ask_head,
        lives: Callable[[float], bool] = node_lives,
    ) -> None:
        self._note = note
        self._ask = ask
        self._lives = lives
        self._answered = time.monotonic()
        self._noted = False
        self.death: RayDead | None = None

    def look(self) -> bool:
        """Ask once. Returns whether it is decided: the head listens, or Ray has ended here."""
        try:
            self._ask(ANSWER_TIMEOUT_S)
            lives = self._lives(ANSWER_TIMEOUT_S)
        except AuthenticationError as error:
            reason = str(error).partition("..")[0]
            self.death = HeadDead(
                "the head of the Ray cluster was started again, and knows nothing of this run"
                f" ({reason})"
            )
        except Exception as error:
            silent = time.monotonic() - self._answered
            if silent > HEAD_SILENCE_REPORT_AFTER_S and not self._noted:
                self._note(
                    f"the head does not listen ({error}): waiting, {HEAD_LOST_AFTER_S:g} s at most"
                )
                self._noted = True
            if silent > HEAD_LOST_AFTER_S:
                self.death = HeadDead(
                    f"the head of the Ray cluster has not listened for {silent:.0f} s"
                )
            return self.death is not None
        else:
            self._answered = time.monotonic()
            self._noted = False
            if not lives:
                self.death = NodeDead(
                    f"Ray on {socket.gethostname()} has ended (its raylet, or an agent that takes"
                    " it along: was one killed for memory?), so that no driver can run next to this"
                    " process"
                )
        return True

    def decide(self) -> None:
        """Wait until it is known whether the head lives. Raises RayDead."""
        while not self.death and not self.look():
            time.sleep(HEAD_CHECK_INTERVAL_S / 4)
        self.check()

    def check(self) -> None:
        """Raises RayDead when Ray has ended here."""
        if self.death is not None:
            raise self.death


@contextmanager
def watched(note: Callable[[str], None]) -> Iterator[HeadWatch]:
    """A thread checks the head while the block lasts."""
    watch = HeadWatch(note)
    over = threading.Event()

    def look_repeatedly() -> None:
        while not over.wait(HEAD_CHECK_INTERVAL_S) and not watch.death:
            watch.look()

    thread = threading.Thread(target=look_repeatedly, name="head-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        # Bounded: a look that hangs must not hold up the end of the run.
        thread.join(ANSWER_TIMEOUT_S)
