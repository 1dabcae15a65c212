"""The stall watchdog: when nothing moves it says what is awaited, and since when, and ends the run at last. Beside it: which actors
do not answer at all, soon after they stopped to."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from rayloop.actors.base import Actor, dump
from rayloop.actors.handles import Handle, submit
from rayloop.core import incidents
from rayloop.core.deadlines import WAITS, Awaited
from rayloop.core.events import Emit
from rayloop.core.failures import Stalled
from rayloop.run.lifetime import RecoverySettings

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two looks."""
ANSWER = 5.0
"""Seconds an actor has to show its stacks. One that is stopped, or holds the interpreter's lock, cannot."""
SHOWN = 8
"""Waits that a report names, the oldest first."""
LATE, ROUND = 4.0, 4.0
"""Seconds that something is awaited from an actor before it is asked whether it is there, and between two rounds of questions."""


async def watch(
    settings: RecoverySettings, phase: Callable[[], str], emit: Emit, folder: Path
) -> None:  # fmt: skip
    """Report a stall after ``stall_report`` seconds, again after twice as long, and so on.

    A stall is: of all that the driver waits for, nothing ended. The stacks of the awaited actors and of the driver go to
    ``folder``/stall-<n>.txt (what a full disk refuses is printed), everything else into the event ``stalled``. Raises Stalled at
    ``stall_timeout``.
    """
    WAITS.moved, due = time.monotonic(), settings.stall_report
    for number in itertools.count(1):
        while (quiet := time.monotonic() - WAITS.moved) < min(due, settings.stall_timeout):
            if quiet < settings.stall_report:
                due = settings.stall_report
            await asyncio.sleep(LOOK)
        waiting = WAITS.oldest()[:SHOWN]
        named = "; ".join(_worded(wait) for wait in waiting) or "nothing that is known"
        if quiet >= settings.stall_timeout:
            raise Stalled(f"nothing moved for {quiet:.0f} s in phase {phase()}, awaited: {named}")
        file = folder / f"stall-{number}.txt"
        written = _written(file, await _stacks(waiting))
        emit(incidents.StalledEvent(phase(), round(quiet, 1), awaited=named, stacks=written))
        due = 2 * due


async def watch_liveness(emit: Emit) -> None:
    """Emit ``Silent`` once for each awaited actor that answers nothing, and again only after it answered.

    An actor answers while it computes (``GROUPS`` of actors/base.py). An actor that is still starting is not asked.
    """
    reported: set[Handle[Actor]] = set()
    while True:
        await asyncio.sleep(ROUND)
        waits = sorted(WAITS.open.values(), key=lambda wait: wait.since, reverse=True)
        late = [wait for wait in waits if time.monotonic() - wait.since > LATE and not wait.starts]
        oldest = {wait.actor: wait for wait in late if wait.actor is not None}
        there = await asyncio.gather(*(_answers(actor) for actor in oldest))
        silent = {actor: wait for (actor, wait), here in zip(oldest.items(), there, strict=True) if not here}
        for actor, wait in silent.items():
            if actor not in reported:
                emit(incidents.Silent(_name(wait.what), round(time.monotonic() - wait.since, 1), awaited=wait.what))
        reported = set(silent)


async def _answers(actor: Handle[Actor]) -> bool:
    """False when there is no answer in ``ANSWER`` seconds. An error counts as one: the call that is awaited raises it, too."""
    try:
        async with asyncio.timeout(ANSWER):
            await submit(actor, Actor.host)
    except TimeoutError:
        return False
    except Exception:
        return True
    return True


def _name(awaited: str) -> str:
    """The actor in what is awaited from it: ``rollout 0`` of ``health of rollout 0``."""
    found = re.search(r"(policy rank|\w+) \d+$", awaited)
    return found[0] if found else awaited


def _written(file: Path, stacks: str) -> str:
    """Where it is, below the run folder; "" when the storage refuses it, and then this process prints it."""
    try:
        file.write_text(stacks, encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s):\n%s", file, error, stacks)
        return ""
    return f"{file.parent.name}/{file.name}"


def _worded(wait: Awaited) -> str:
    return f"{wait.what} for {time.monotonic() - wait.since:.0f} s"


async def _stacks(waiting: list[Awaited]) -> str:
    actors = {wait.actor: wait.what for wait in waiting if wait.actor is not None}
    found = await asyncio.gather(*(_ask(actor) for actor in actors))
    parts = [f"=== awaited: {what} ===\n{text}" for what, text in zip(actors.values(), found, strict=True)]
    tasks = "\n".join(repr(task) for task in asyncio.all_tasks())
    return "\n\n".join([*parts, f"=== driver ===\n{dump()}\n\ntasks\n{tasks}"]) + "\n"


async def _ask(actor: Handle[Actor]) -> str:
    try:
        async with asyncio.timeout(ANSWER):
            return await submit(actor, Actor.stacks)
    except Exception as error:
        return f"does not answer: {type(error).__name__} {error}".splitlines()[0]
