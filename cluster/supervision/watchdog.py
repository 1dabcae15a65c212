"""Watching what hangs: the stall watchdog and silent actors (in the driver), and Ray itself (in the
``train`` process). Without its head, Ray ends the process after a while. A head that was started
again knows nothing of the run.
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

LOOK = 1.0
"""Seconds between two looks."""
ANSWER = 5.0
"""Seconds that an actor, or the head, has to answer.

A process that is stopped, or holds the interpreter's lock, cannot.
"""
ASKED = 2
"""Questions that an actor must leave unanswered before it is given up: one is too few, as the
asking process may itself have been stopped.

They are asked of a thread that does nothing else, so it answers during a step, however long that
is: torch's operations, collectives and waits for a GPU release the interpreter's lock. What holds
it, or stops every thread, takes seconds: pickling a large object, the import of a library from slow
storage, pages that come back from swap. ``recovery.health_timeout`` (30 s) is the patience that
idle actors get for the same; where pages or libraries need longer, it must be raised for both.
"""
SHOWN = 8
"""Waits that a report names, the oldest first."""
LATE = 4.0
"""Seconds that a call is awaited before its actor is checked."""
ROUND = 4.0
"""Seconds between two rounds of checks."""
SILENCE = 50.0
"""Seconds of the head's silence after which the run gives it up. Ray itself waits 60."""
NOTED = 10.0
"""Seconds of the head's silence after which a line says so."""
PERIOD = 2.0
"""Seconds between two checks of the head."""


async def watch(
    settings: RecoverySettings, phase: Callable[[], str], emit: Emit, folder: Path
) -> None:
    """Report a stall (nothing that the driver waits for ends) after ``stall_report`` seconds, after
    twice as long, and so on, with the stacks in ``folder``/stall-<n>.txt (or printed when the disk
    is full). Raises Stalled at ``stall_timeout``.
    """
    # Time before the watch began is not a stall.
    WAITS.moved, due = time.monotonic(), settings.stall_report
    for number in itertools.count(1):
        while (quiet := time.monotonic() - WAITS.moved) < min(due, settings.stall_timeout):
            # Something moved, so the next stall is reported early again.
            if quiet < settings.stall_report:
                due = settings.stall_report
            await asyncio.sleep(LOOK)
        waiting = await _first_of_each_actor()
        named = "; ".join(map(str, waiting[:SHOWN])) or "nothing that is known"
        named += f"; load {os.getloadavg()[0]:.0f} on {cores()} cores of {socket.gethostname()}"
        if quiet >= settings.stall_timeout:
            raise Stalled(f"nothing moved for {quiet:.0f} s in phase {phase()}, awaited: {named}")
        file = folder / f"stall-{number}.txt"
        written = _written(file, await _stacks(waiting[:SHOWN]))
        emit(incidents.StalledEvent(phase(), round(quiet, 1), awaited=named, stacks=written))
        due = 2 * due


async def watch_liveness(emit: Emit, patience: float = math.inf) -> None:
    """Emit ``Silent`` once for each awaited actor that answers nothing, and again only after it
    answered; after ``patience`` seconds of that it is given up (``Waits.give_up``). An actor
    answers while it computes (``GROUPS`` of actors/base.py). An actor that is still starting is not
    asked.
    """
    asked = dict[Handle[Actor], int]()
    while True:
        await asyncio.sleep(ROUND)
        # The newest first: in the mapping below the oldest
        # wait of an actor then replaces the others.
        waits = sorted(WAITS.open.values(), key=lambda wait: wait.since, reverse=True)
        late = [wait for wait in waits if time.monotonic() - wait.since > LATE and not wait.starts]
        oldest = {wait.actor: wait for wait in late if wait.actor is not None}
        there = await asyncio.gather(*(_answers(actor) for actor in oldest))
        silent = {
            actor: wait
            for (actor, wait), here in zip(oldest.items(), there, strict=True)
            if not here
        }
        asked = {actor: asked.get(actor, 0) + 1 for actor in silent}
        for actor, wait in silent.items():
            if asked[actor] == 1:
                emit(
                    incidents.Silent(
                        _name(wait.what), round(time.monotonic() - wait.since, 1), awaited=wait.what
                    )
                )
            # The clock does not say how long the actor was silent: this process may have been
            # stopped meanwhile. Rounds do.
            quiet = asked[actor] * (ROUND + ANSWER) - ROUND
            if asked[actor] >= ASKED and quiet >= patience:
                WAITS.give_up(
                    actor,
                    f"gave no sign of life for {quiet:.0f} s: its process or machine is stopped or"
                    " hangs",
                )


async def _answers(actor: Handle[Actor]) -> bool:
    """False when there is no answer in ``ANSWER`` seconds.

    An error counts as one: the call that is awaited raises it, too.
    """
    with suppress(Exception):
        try:
            async with asyncio.timeout(ANSWER):
                await submit(actor, Actor.host)
        except TimeoutError:
            return False
    return True


def _name(awaited: str) -> str:
    """The actor in what is awaited from it: ``rollout 0`` of ``health of rollout 0``."""
    found = re.search(r"(policy rank|\w+) \d+$", awaited)
    return found[0] if found else awaited


def _written(file: Path, stacks: str) -> str:
    """The path below the run folder; "" when the storage refuses it, and then the stacks are
    printed.
    """
    try:
        file.write_text(stacks, encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s):\n%s", file, error, stacks)
        return ""
    return f"{file.parent.name}/{file.name}"


@dataclass(frozen=True, slots=True)
class _Stalled:
    """The oldest call of an actor, how many more of its calls are awaited, and what the actor
    itself waits for.
    """

    oldest: Awaited
    more: int
    elsewhere: list[tuple[str, Any]]

    def __str__(self) -> str:
        more = f" and {self.more} more of its calls" if self.more else ""
        elsewhere = f" ({', '.join(what for what, _ in self.elsewhere)})" if self.elsewhere else ""
        return (
            f"{self.oldest.what} for {time.monotonic() - self.oldest.since:.0f} s{more}{elsewhere}"
        )


async def _first_of_each_actor() -> list[_Stalled]:
    """The open waits, the oldest first, those for one actor together."""
    by_actor: dict[Any, list[Awaited]] = {}
    for wait in WAITS.oldest():
        by_actor.setdefault(wait.actor or wait, []).append(wait)
    waits = list(by_actor.values())
    found = await asyncio.gather(*(_elsewhere(one[0].actor) for one in waits))
    return [
        _Stalled(one[0], len(one) - 1, elsewhere)
        for one, elsewhere in zip(waits, found, strict=True)
    ]


async def _elsewhere(actor: Handle[Actor] | None) -> list[tuple[str, Any]]:
    """What the actor waits for itself; nothing when it does not answer."""
    with suppress(Exception):
        async with asyncio.timeout(ANSWER):
            return [] if actor is None else await submit(actor, Actor.awaits)
    return []


async def _stacks(waiting: list[_Stalled]) -> str:
    """The stacks of the awaited actors, then of those for which they wait, then of the driver."""
    actors = {one.oldest.actor: one.oldest.what for one in waiting if one.oldest.actor is not None}
    for one in waiting:
        for what, actor in one.elsewhere:
            if actor is not None:
                actors.setdefault(actor, f"{one.oldest.what}: {what}")
    found = await asyncio.gather(*(_ask(actor) for actor in actors))
    parts = [
        f"=== awaited: {what} ===\n{text}"
        for what, text in zip(actors.values(), found, strict=True)
    ]
    tasks = "\n".join(repr(task) for task in asyncio.all_tasks())
    return "\n\n".join([*parts, f"=== driver ===\n{dump()}\n\ntasks\n{tasks}"]) + "\n"


async def _ask(actor: Handle[Actor]) -> str:
    try:
        async with asyncio.timeout(ANSWER):
            return await submit(actor, Actor.stacks)
    except Exception as error:
        return f"does not answer: {type(error).__name__} {error}".splitlines()[0]


class RayGone(MachineFailed):
    """Ray has ended where a run needs it: no actor can be started."""


class HeadGone(RayGone):
    """The head of the cluster has ended, or was started again: none of its actors will answer."""


class NodeGone(RayGone):
    """Ray on the node of this process has ended.

    The driver runs there and nowhere else, since it ends with this process.
    """


class HeadWatch:
    """``ask`` is ``ask_head``, and ``lives`` is ``node_lives``; ``note`` shows a line to the user;
    ``gone`` is why no actor can be started any more, or None.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        ask: Callable[[float], None] = ask_head,
        lives: Callable[[], bool] = node_lives,
    ) -> None:
        self._note, self._ask, self._lives = note, ask, lives
        self._answered, self._noted = time.monotonic(), False
        self.gone: RayGone | None = None

    def look(self) -> bool:
        """Ask once. Returns whether it is decided: the head listens, or Ray has ended here."""
        try:
            self._ask(ANSWER)
            lives = self._lives()
        except AuthenticationError as error:
            why = str(error).partition("..")[0]
            self.gone = HeadGone(
                "the head of the Ray cluster was started again, and knows nothing of this run"
                f" ({why})"
            )
        except Exception as error:
            silent = time.monotonic() - self._answered
            if silent > NOTED and not self._noted:
                self._note(f"the head does not listen ({error}): waiting, {SILENCE:g} s at most")
                self._noted = True
            if silent > SILENCE:
                self.gone = HeadGone(
                    f"the head of the Ray cluster has not listened for {silent:.0f} s"
                )
            return self.gone is not None
        else:
            self._answered, self._noted = time.monotonic(), False
            if not lives:
                self.gone = NodeGone(
                    f"Ray on {socket.gethostname()} has ended (its raylet, or an agent that takes"
                    " it along: was one killed for memory?), so that no driver can run beside this"
                    " process"
                )
        return True

    def decide(self) -> None:
        """Wait until it is known whether the head is there. Raises RayGone."""
        while not self.gone and not self.look():
            time.sleep(PERIOD / 4)
        self.check()

    def check(self) -> None:
        """Raises RayGone when Ray has ended here."""
        if self.gone is not None:
            raise self.gone


@contextmanager
def watched(note: Callable[[str], None]) -> Iterator[HeadWatch]:
    """A thread checks the head while the block lasts."""
    watch, over = HeadWatch(note), threading.Event()

    def keep() -> None:
        while not over.wait(PERIOD) and not watch.gone:
            watch.look()

    thread = threading.Thread(target=keep, name="head-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        # Bounded: a look that hangs must not hold up the end of the run.
        thread.join(ANSWER)
