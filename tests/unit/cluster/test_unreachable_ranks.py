"""Ranks that Ray could not reach for a while: what a rank may get twice is asked again, and nothing
is computed twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayloop.actors import policy
from rayloop.actors.policy import PolicyRank
from rayloop.cluster.supervision import policy_group
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.failures import PolicyLost, WorkerLost
from rayloop.core.types import Version
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.sections import PolicySettings

UNAVAILABLE = ActorUnavailableError("keepalive watchdog timeout", b"1" * 16)


class Rank:
    """Answers each call with the next of ``answers``, the last one for good.

    ``calls``: the names of those it got; ``numbers``: those of the numbered ones.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls, self.numbers = list(answers), list[str](), list[int]()

    def _answer(self) -> Any:
        answer = asyncio.get_running_loop().create_future()
        value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(value, BaseException):
            answer.set_exception(value)
        else:
            answer.set_result(value)
        return answer

    def __getattr__(self, name: str) -> Any:
        def remote(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            return self._answer()

        return SimpleNamespace(remote=remote)

    @property
    def numbered(self) -> Any:
        def options(*, name: str, num_returns: int) -> Any:
            def remote(number: int, method: str, *_: Any, **__: Any) -> Any:
                assert name == f"PolicyRank.{method}"
                self.calls.append(method)
                self.numbers.append(number)
                answer = self._answer()
                return answer if num_returns == 1 else [answer, f"source {len(self.calls)}"]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)


def group(*ranks: Any, health_timeout: float = 30.0) -> PolicyGroup:
    made = PolicyGroup(
        PolicySettings(), lambda _: None, RecoverySettings(health_timeout=health_timeout)
    )  # type: ignore[arg-type,return-value]
    made.ranks = list(ranks)
    return made


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor pauses."""
    monkeypatch.setattr(policy_group, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(policy_group.ray, "kill", lambda rank: None)
    monkeypatch.setattr(policy, "fetch", lambda refs: ({}, set()))


def fetch(of: PolicyGroup) -> Any:
    return of.fetch([], seed=0, version=Version(0, 0), treat_as_on_policy=False, nominal=1)


def train(of: PolicyGroup) -> Any:
    return of.all(PolicyRank.train)


def save(of: PolicyGroup) -> Any:
    return of.all(PolicyRank.save, "folder")


def export(of: PolicyGroup) -> Any:
    return of.export(Version(0, 1))


def compare(of: PolicyGroup) -> Any:
    return of.compare([])


def send(of: PolicyGroup) -> Any:
    return of.send(Version(0, 1), "meeting")


def load(of: PolicyGroup) -> Any:
    return of.load("folder", {})


ROW = {"tokens": 1, "sum": 0.5, "max": 0.5, "images": 0, "image_tokens": 0, "swapped": 0.0}
ANSWERS: dict[Callable[[PolicyGroup], Any], Any] = {
    fetch: [],
    train: [],
    save: {},
    export: "manifest",
    compare: [ROW],
    send: None,
    load: None,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("call", ANSWERS)
def test_a_rank_that_could_not_be_reached_is_asked_again(
    call: Callable[[PolicyGroup], Any], ranks: int
) -> None:
    answer = ANSWERS[call]
    *well, late = [
        *(Rank(answer) for _ in range(ranks - 1)),
        Rank(UNAVAILABLE, UNAVAILABLE, answer),
    ]
    asyncio.run(call(group(*well, late)))
    asked = [[one for one in rank.calls if one != "forget"] for rank in (*well, late)]
    assert asked == [[call.__name__]] * len(well) + [[call.__name__] * 3]
    assert set(late.numbers) == (set() if call is fetch else {1}), (
        "the number says that it is the same call"
    )


def test_each_call_has_the_next_number_on_all_ranks() -> None:
    ranks = [Rank({}), Rank({})]
    made = group(*ranks)

    async def calls() -> None:
        for call in (save, fetch, load, save):
            await call(made)

    asyncio.run(calls())
    assert [rank.numbers for rank in ranks] == [[1, 2, 3]] * 2


def test_the_source_of_an_update_is_that_of_the_answer_and_is_not_kept_at_the_rank() -> None:
    rank = Rank(UNAVAILABLE, "manifest")
    update = asyncio.run(export(group(rank)))
    assert (update.manifest, update.source) == ("manifest", "source 2")
    assert rank.calls == ["export", "export", "forget"]


class Meets(PolicyRank):
    """Saves when all ranks do, in one thread per rank.

    ``loses``: what of the first call is lost on its way.
    """

    def __init__(self, rank: int, meeting: threading.Barrier, loses: str) -> None:
        super().__init__(None, rank, 2)  # type: ignore[arg-type]
        self.meeting, self.loses, self.saved = meeting, loses, 0
        self.thread = ThreadPoolExecutor(1)

    def save(self, folder: str) -> dict[str, Any]:
        self.meeting.wait(30)
        self.saved += 1
        return {f"{folder}/{self.rank}-{self.saved}": None}

    def remote(self, *args: Any) -> Any:
        return self._run(args)

    async def _run(self, args: Any) -> Any:
        lost, self.loses = self.loses, ""
        if lost == "call":
            raise UNAVAILABLE
        answer = await asyncio.get_running_loop().run_in_executor(
            self.thread, partial(self.numbered, *args)
        )
        if lost == "answer":
            raise UNAVAILABLE
        return answer


@pytest.mark.parametrize("lost", ["call", "answer"])
def test_a_collective_is_run_once_whatever_is_lost_on_the_way(lost: str) -> None:
    """The rank that ran it already would wait for the others, which have finished it."""
    meeting = threading.Barrier(2)
    ranks = [Meets(0, meeting, ""), Meets(1, meeting, lost)]
    made = group(
        *(
            SimpleNamespace(numbered=SimpleNamespace(options=lambda rank=rank, **_: rank))
            for rank in ranks
        )
    )

    async def calls() -> list[Any]:
        return [await made.save("a"), await made.save("b")]

    try:
        assert asyncio.run(calls()) == [
            {"a/0-1": None, "a/1-1": None},
            {"b/0-2": None, "b/1-2": None},
        ]
    finally:
        for rank in ranks:
            rank.thread.shutdown()


def test_a_rank_that_dies_is_asked_once() -> None:
    rank = Rank(ActorDiedError(), [])
    with pytest.raises(PolicyLost):
        asyncio.run(train(group(rank)))
    assert rank.calls == ["train"]


def test_a_rank_that_stays_out_of_reach_is_lost_after_health_timeout() -> None:
    rank = Rank(UNAVAILABLE)
    with pytest.raises(PolicyLost, match="keepalive watchdog timeout"):
        asyncio.run(train(group(rank, health_timeout=0.2)))
    assert len(rank.calls) > 2


class Counts(PolicyRank):
    """Counts its saves, of which some fail."""

    def __init__(self) -> None:
        super().__init__(None, 1, 2)  # type: ignore[arg-type]
        self.saved = 0

    def save(self, folder: str) -> Any:
        self.saved += 1
        if folder == "full":
            raise OSError(f"save {self.saved}")
        return self.saved


def test_a_number_that_comes_again_gets_the_same_answer_or_error() -> None:
    rank = Counts()
    assert [rank.numbered(1, "save", "folder") for _ in range(3)] == [1, 1, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="save 2"):
            rank.numbered(2, "save", "full")
    assert rank.numbered(3, "save", folder="folder") == 3


@pytest.mark.parametrize("number", [1, 4])
def test_a_rank_that_missed_a_call_or_is_asked_late_runs_nothing(number: int) -> None:
    """What the others have run, or in which order, is not known: the policy is rebuilt."""
    rank = Counts()
    for made in (1, 2):
        rank.numbered(made, "save", "folder")
    with pytest.raises(
        WorkerLost, match=rf"call {number} \(save\) of policy rank 1 came after call 2"
    ):
        rank.numbered(number, "save", "folder")
    assert rank.saved == 2


def test_an_answer_that_has_arrived_is_not_kept_and_nothing_is_run_again() -> None:
    rank = Counts()
    rank.numbered(1, "save", "folder")
    rank.numbered(2, "save", "folder")
    rank.forget(1)
    assert rank.numbered(2, "save", "folder") == 2, "another call's answer is kept"
    rank.forget(2)
    with pytest.raises(WorkerLost, match="not kept"):
        rank.numbered(2, "save", "folder")
    assert (rank.numbered(3, "save", "folder"), rank.saved) == (3, 3)
