"""Production after losses and resumes: what is lost, left over or begun again costs no more than itself. No Ray cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.state
from rayloop.core.types import Member, PlayRequest, Scored, TrajectoryId, Unscored, UnscoredKind
from tests.cluster.test_production import Loop, Play, crashes, issues, spread
from tests.support.runs import ledger_closes


@pytest.fixture(autouse=True)
def _payloads_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(members: list[Member], values: dict[Any, Any]) -> set[TrajectoryId]:
        values.update({member.payload: member.payload for member in members})
        return set()

    monkeypatch.setattr(cluster.state, "_resolve", resolve)
    monkeypatch.setattr(cluster.state, "_owned", lambda member: member)


def part(loop: Loop) -> Any:
    """What a checkpoint reads and writes of a driver."""
    return SimpleNamespace(
        config=loop.config, step=loop.version.step, version=loop.version, inherited={}, ledger=loop.ledger,
        production=loop.production,
    )  # fmt: skip


def resumed(folder: Path, before: Loop, play: Play, **changes: Any) -> Loop:
    """Another run of production from the state of this one. It begins as if published again."""
    loop = Loop(folder, play, **changes)
    cluster.state.reinstate(part(loop), asyncio.run(cluster.state.capture(part(before))))
    loop.version = before.version
    loop.production.published(loop.version)
    return loop


def stopped(folder: Path, play: Play, seconds: float, **changes: Any) -> Loop:
    """Production that was stopped after so many seconds without a step. Nothing of it is cancelled, as in a checkpoint."""
    loop = Loop(folder, play, **changes)
    close, loop.production.close = loop.production.close, lambda: None  # type: ignore[method-assign]

    async def test() -> None:
        loop.production._collecting = True
        loop.production._notify()
        await asyncio.sleep(seconds)

    loop.run(test)
    loop.production.close = close  # type: ignore[method-assign]
    return loop


def test_one_task_whose_grader_raises_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    """Its group was in flight, so it is played first."""

    async def slow(loop: Loop, request: PlayRequest) -> Scored | Unscored:
        await asyncio.sleep(request.id.group)
        return await crashes(loop, request) if request.task.id == "train-2" else spread(request)

    async def fast(loop: Loop, request: PlayRequest) -> Scored | Unscored:
        await asyncio.sleep(1 / request.id.group)
        return await crashes(loop, request) if request.task.id == "train-2" else spread(request)

    rounds = {"algorithm__filtering": {"groups_per_generation": 3}}
    before = stopped(tmp_path, slow, 2.5, **rounds)
    assert list(before.production.in_flight) == [3]
    loop = resumed(tmp_path, before, fast, **rounds)
    assert issues(loop.run(loop.step)) == [1, 2]
    assert loop.ledger.counts()["excluded[grader_error]"] == 4
    ledger_closes(loop.ledger.counts())
