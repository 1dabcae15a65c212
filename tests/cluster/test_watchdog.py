"""The stall watchdog, on waits that end or do not, and the waits themselves."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.actors.base import Actor
from rayloop.cluster.supervision import watchdog
from rayloop.cluster.supervision.watchdog import watch
from rayloop.core.deadlines import WAITS, until_stopped, with_deadline
from rayloop.core.failures import Preempted, Stalled, WorkerLost
from rayloop.run.lifetime import RecoverySettings
from tests.support.local import LocalActor


class Silent(Actor):
    pass


def watched(
    work: Coroutine[Any, Any, Any], folder: Path, **settings: float
) -> list[dict[str, Any]]:
    """Run ``work`` beside the watchdog. Returns its events; raises what it raised."""
    events: list[dict[str, Any]] = []

    async def run() -> None:
        recovery = RecoverySettings(**settings)
        watching = asyncio.create_task(
            watch(recovery, lambda: "gen", lambda event: events.append(event.record()), folder)
        )
        working = asyncio.create_task(work)
        done, pending = await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            await task

    asyncio.run(run())
    return events


def test_a_stall_is_reported_with_what_is_awaited_and_the_stacks(tmp_path: Path) -> None:
    async def hang() -> None:
        actor = LocalActor(Silent())
        await asyncio.gather(
            with_deadline(60.0, asyncio.sleep(2.5), "score of reward 0", actor),
            with_deadline(60.0, asyncio.sleep(0), "health of reward 0", actor, counts=False),
        )

    (event,) = watched(hang(), tmp_path, stall_timeout=15.0)
    assert (event["event"], event["phase"]) == ("stalled", "gen")
    assert event["awaited"].startswith("score of reward 0 for ")
    stacks = (tmp_path / Path(event["stacks"]).name).read_text(encoding="utf-8")
    assert "=== awaited: score of reward 0 ===\npid " in stacks
    assert "=== driver ===" in stacks
    assert not WAITS.open


class Generating(Actor):
    """As an environment actor whose episodes wait for an engine."""

    engine = LocalActor(Silent())

    def awaits(self) -> list[tuple[str, Any]]:
        return [("7 generate on rollout 1", self.engine), ("1 are in their environment", None)]


def test_a_stall_names_what_the_episodes_themselves_wait_for_once(tmp_path: Path) -> None:
    async def hang() -> None:
        actor = LocalActor(Generating())
        await asyncio.gather(
            *(
                with_deadline(60.0, asyncio.sleep(2.5), f"episode 9/{n}@0 on environment 0", actor)
                for n in range(8)
            )
        )

    (event,) = watched(hang(), tmp_path, stall_timeout=15.0)
    first = r"episode 9/0@0 on environment 0 for \d+ s and 7 more of its calls "
    waits = r"\(7 generate on rollout 1, 1 are in their environment\); load \d+ on \d+ cores of \S+"
    assert re.fullmatch(first + waits, event["awaited"])
    stacks = (tmp_path / Path(event["stacks"]).name).read_text(encoding="utf-8")
    assert "=== awaited: episode 9/0@0 on environment 0: 7 generate on rollout 1 ===" in stacks


def test_an_awaited_actor_that_answers_nothing_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that works for long answers beside that; one that is only being made has nothing to
    answer with.
    """
    for name in ("LATE_CALL_AFTER_S", "ROUND_INTERVAL_S", "ANSWER_TIMEOUT_S"):
        monkeypatch.setattr(watchdog, name, 0.2)
    reported: list[dict[str, Any]] = []

    class Stopped:
        host = SimpleNamespace(remote=lambda: asyncio.sleep(60))

    async def run() -> None:
        listening = asyncio.create_task(
            watchdog.watch_liveness(lambda event: reported.append(event.record()))
        )
        awaited = (
            ("episodes 1/0@0 of task a on environment 0", LocalActor(Silent()), False),
            ("health of rollout 1", Stopped(), False),
            ("train of policy rank 0", Stopped(), False),
            ("start of reward 0", Stopped(), True),
        )
        await asyncio.gather(
            *(
                with_deadline(9.0, asyncio.sleep(2.0), what, actor, starts=starts)
                for what, actor, starts in awaited
            )
        )
        listening.cancel()

    asyncio.run(run())
    assert {(e["event"], e["actor"], e["awaited"]) for e in reported} == {
        ("silent", "rollout 1", "health of rollout 1"),
        ("silent", "policy rank 0", "train of policy rank 0"),
    }
    assert len(reported) == 2


def listened(
    patience: float, monkeypatch: pytest.MonkeyPatch, *awaited: tuple[str, Any, bool]
) -> list[str]:
    """What each wait ended with, beside ``watch_liveness`` with short times: a round of questions
    takes 0.4 s.
    """
    for name in ("LATE_CALL_AFTER_S", "ROUND_INTERVAL_S", "ANSWER_TIMEOUT_S"):
        monkeypatch.setattr(watchdog, name, 0.2)

    async def one(what: str, actor: Any, starts: bool) -> str:
        try:
            return await with_deadline(
                60.0, asyncio.sleep(4.0, "answered"), what, actor, starts=starts
            )
        except WorkerLost as error:
            return str(error)

    async def run() -> list[str]:
        listening = asyncio.create_task(watchdog.watch_liveness(lambda event: None, patience))
        found = await asyncio.gather(*(one(*each) for each in awaited))
        listening.cancel()
        return found

    return asyncio.run(run())


class Frozen:
    host = SimpleNamespace(remote=lambda: asyncio.sleep(60))


def test_an_actor_that_is_known_to_be_frozen_is_given_up_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is awaited of it; not an actor that works for long, nor one that is being made."""
    frozen = Frozen()
    found = listened(
        1.0,
        monkeypatch,
        ("train of policy rank 0", frozen, False),
        ("fetch of policy rank 0", frozen, False),
        ("train of policy rank 1", LocalActor(Silent()), False),
        ("start of reward 0", Frozen(), True),
    )
    assert found[0].startswith("train of policy rank 0 gave no sign of life for 1 s")
    assert found[1].startswith("fetch of policy rank 0 gave no sign of life for 1 s")
    assert found[2:] == ["answered", "answered"]
    assert not WAITS.open


def test_an_actor_that_was_silent_for_less_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listened(9.0, monkeypatch, ("train of policy rank 0", Frozen(), False)) == ["answered"]


def test_one_question_without_an_answer_gives_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have been stopped between the question and the look at its answer."""

    class Late:
        asked = 0

        @property
        def host(self) -> Any:
            self.asked += 1
            seconds = 60.0 if self.asked % 2 else 0.0
            return SimpleNamespace(remote=lambda: asyncio.sleep(seconds))

    assert listened(0.1, monkeypatch, ("train of policy rank 0", Late(), False)) == ["answered"]


def test_a_disk_that_refuses_the_stacks_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (event,) = watched(
        with_deadline(60.0, asyncio.sleep(2.5), "a call"), tmp_path / "nowhere", stall_timeout=15.0
    )
    assert (event["event"], event["stacks"]) == ("stalled", "")
    assert event["awaited"].startswith("a call for ")
    assert "=== driver ===" in caplog.text


def test_whatever_ends_puts_the_stall_off_but_health_checks_do_not(tmp_path: Path) -> None:
    async def work(counts: bool) -> None:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            await with_deadline(9.0, asyncio.sleep(0.2), "a call", counts=counts)

    assert watched(work(True), tmp_path, stall_timeout=15.0) == []
    assert {e["event"] for e in watched(work(False), tmp_path, stall_timeout=15.0)} == {"stalled"}


def test_a_stall_ends_the_run_at_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(
        Stalled, match=r"nothing moved for \d s in phase gen, awaited: load of rollout 1 for \d s"
    ):
        watched(
            with_deadline(60.0, asyncio.sleep(60), "load of rollout 1"), tmp_path, stall_timeout=2.0
        )


def test_a_wait_ends_at_its_deadline_and_when_the_run_stops() -> None:
    async def stop(seconds: float) -> str:
        asked = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, asked.set)
        return await until_stopped(asked, asyncio.sleep(seconds, "done"))

    with pytest.raises(WorkerLost, match=r"a call did not answer within 0\.1 s"):
        asyncio.run(with_deadline(0.1, asyncio.sleep(5), "a call"))
    with pytest.raises(Preempted):
        asyncio.run(stop(5))
    assert asyncio.run(stop(0)) == "done"
