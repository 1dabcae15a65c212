"""Saving beside training: one at a time, waited for where something depends on it, and what goes
wrong is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rayloop.cluster.loop import saving
from rayloop.cluster.loop.saving import SavedStep, Saving
from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, PolicyLost
from rayloop.core.types import Version
from rayloop.run.checkpoint import FAILED_SAVES, CheckpointStore

LONG = 30.0


@dataclass
class Ranks:
    """They hold ``weights``, and write what they held when they copied it, once they ``may_write``;
    ``trouble`` is raised then.
    """

    weights: int = 0
    may_write: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: Exception | None = None
    refused: int = 0
    writing: int = 0
    most: int = 0

    async def save(self, folder: str) -> dict[str, Any]:
        return await self._write(folder, self.weights)

    async def save_beside(self, folder: str, copied: asyncio.Event) -> dict[str, Any]:
        held = self.weights
        copied.set()
        return await self._write(folder, held)

    async def _write(self, folder: str, held: int) -> dict[str, Any]:
        self.writing += 1
        self.most = max(self.most, self.writing)
        try:
            await self.may_write.wait()
            if self.trouble is not None:
                self.refused += 1
                raise self.trouble
            Path(folder, "weights").write_text(str(held), encoding="utf-8")
            return {}
        finally:
            self.writing -= 1


class Run:
    def __init__(self, folder: Path, *, beside: bool = True, timeout: float = LONG) -> None:
        self.reported: list[tuple[str, int]] = []
        self.ranks, self.state = Ranks(), {"step": 0}
        self.store = CheckpointStore(folder, keep=9)
        self.stopping = asyncio.Event()
        self.saving = Saving(
            self.store, self._emit, beside=beside, timeout=timeout, stopping=self.stopping
        )

    def _emit(self, event: Event, step: int) -> None:
        self.reported.append((event.record()["event"], step))

    async def save(self, step: int, last: bool = False, patience: float = 0.0) -> None:
        self.ranks.weights, self.state["step"] = step, step

        async def state() -> dict[str, int]:
            return dict(self.state)

        await self.saving.save(
            SavedStep(Version(1, step), state, {}, best=False, last=last, patience=patience),
            self.ranks,
        )
        self.ranks.weights, self.state["step"] = -1, -1  # training goes on

    def on_disk(self) -> list[tuple[int, int, str]]:
        """Step, the driver's state and the weights of each checkpoint."""
        found = self.store.newest_first()
        return [
            (c.step, c.state()["step"], Path(c.trainer, "weights").read_text(encoding="utf-8"))
            for c in found
        ]


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LONG))


def test_training_goes_on_while_what_was_is_written(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path)
        await run.save(1)
        assert run.reported == []
        assert not run.saving.on_disk(Version(1, 1))
        assert run.on_disk() == [], "it is not complete before every file is there"
        run.ranks.may_write.set()
        await run.saving.settle()
        assert run.reported == [("checkpoint", 1)]
        assert run.saving.on_disk(Version(1, 1))
        assert run.on_disk() == [(1, 1, "1")]

    play(scene)


@pytest.mark.parametrize("how", ["the last", "not beside"])
def test_the_last_step_is_waited_for_and_all_where_it_is_not_asked_for(
    tmp_path: Path, how: str
) -> None:
    async def scene() -> None:
        run = Run(tmp_path, beside=how != "not beside")
        run.ranks.may_write.set()
        await run.save(1, last=how == "the last")
        assert run.on_disk() == [(1, 1, "1")]

    play(scene)


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path)
        await run.save(1)
        next_one = asyncio.create_task(run.save(2, last=True))
        await asyncio.sleep(0.05)
        assert run.reported == []
        run.ranks.may_write.set()
        await next_one
        assert run.reported == [("checkpoint", 1), ("checkpoint", 2)]
        assert run.ranks.most == 1

    play(scene)


def test_a_save_that_takes_too_long_is_typed_and_ends_nowhere(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path, timeout=0.1)
        await run.save(1)
        with pytest.raises(CheckpointError, match=r"not written within 0\.1 s"):
            await run.save(2)
        await run.saving.abandon()
        assert list(tmp_path.glob("step_*")) == []

    play(scene)


def test_a_failed_save_is_reported_and_ends_the_run_when_there_are_too_many(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path)
        run.ranks.trouble = CheckpointError("no space left on device")
        run.ranks.may_write.set()
        for step in range(1, FAILED_SAVES + 1):
            await run.save(step)
            await run.saving.settle()
            assert run.saving.failed == step
        with pytest.raises(CheckpointError, match="no space left"):
            await run.save(FAILED_SAVES + 1, last=True)
        assert run.reported == [("checkpoint_failed", step) for step in range(1, FAILED_SAVES + 2)]
        run.ranks.trouble = None
        await run.save(9)
        await run.saving.settle()
        assert run.saving.failed == 0

    play(scene)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_training_waits_for_storage_that_refuses_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, last: bool
) -> None:
    """However short the steps are: three failures come at once, and the storage is back after
    twenty tries.
    """
    monkeypatch.setattr(saving, "STORAGE_RETRY_AFTER_S", 0.01)

    async def scene() -> None:
        run = Run(tmp_path, beside=beside)
        run.ranks.trouble = CheckpointError("Read-only file system")
        run.ranks.may_write.set()
        for step in range(1, FAILED_SAVES + 1):
            await run.save(step, patience=LONG)
            await run.saving.settle()
        waiting = asyncio.create_task(run.save(FAILED_SAVES + 1, last=last, patience=LONG))
        while run.ranks.refused < 20:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        run.ranks.trouble = None
        await waiting
        assert run.saving.failed == 0
        assert run.on_disk() == [(4, 4, "4")], "what waited is what is saved"
        assert run.reported == [
            ("checkpoint_failed", step) for step in range(1, FAILED_SAVES + 2)
        ] + [("checkpoint", 4)]

    play(scene)


def test_a_last_step_is_tried_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "STORAGE_RETRY_AFTER_S", 0.01)

    async def scene() -> None:
        run = Run(tmp_path)
        run.ranks.trouble = CheckpointError("Stale file handle")
        run.ranks.may_write.set()
        waiting = asyncio.create_task(run.save(1, last=True, patience=LONG))
        while run.ranks.refused < 3:
            await asyncio.sleep(0.001)
        run.stopping.set()  # which does not end it: nobody comes after it
        while run.ranks.refused < 6:
            await asyncio.sleep(0.001)
        run.ranks.trouble = None
        await waiting
        assert [step for step, *_ in run.on_disk()] == [1]

    play(scene)


def test_storage_that_stays_away_is_given_up_after_the_patience_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STORAGE_RETRY_AFTER_S", 0.01)

    async def scene() -> None:
        run = Run(tmp_path)
        run.ranks.trouble = CheckpointError("no space left on device")
        run.ranks.may_write.set()
        began = asyncio.get_running_loop().time()
        with pytest.raises(CheckpointError, match="no space left"):
            await run.save(1, last=True, patience=0.5)
        assert asyncio.get_running_loop().time() - began >= 0.5

    play(scene)


def test_a_stop_ends_the_wait_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STORAGE_RETRY_AFTER_S", 0.01)

    async def scene() -> None:
        run = Run(tmp_path)
        run.ranks.trouble = CheckpointError("no space left on device")
        run.ranks.may_write.set()
        for step in range(1, FAILED_SAVES + 1):
            await run.save(step, patience=LONG)
            await run.saving.settle()
        waiting = asyncio.create_task(run.save(FAILED_SAVES + 1, patience=LONG))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        run.stopping.set()
        await waiting

    play(scene)


def test_a_rank_that_is_lost_while_it_writes_is_reported_by_the_next_look(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path)
        run.ranks.trouble = PolicyLost("rank 1 died")
        await run.save(1)
        await run.saving.settle(wait=False)
        run.ranks.may_write.set()
        await asyncio.sleep(0.2)
        with pytest.raises(PolicyLost):
            await run.saving.settle(wait=False)
        await run.saving.settle()
        assert list(tmp_path.glob("step_*")) == []

    play(scene)


def test_what_fails_before_it_is_copied_holds_nobody_up(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Run(tmp_path)

        async def broken(folder: str, copied: asyncio.Event) -> dict[str, Any]:
            raise PolicyLost("rank 0 died")

        run.ranks.save_beside = broken  # type: ignore[method-assign]
        with pytest.raises(PolicyLost):
            await run.save(1)

    play(scene)
