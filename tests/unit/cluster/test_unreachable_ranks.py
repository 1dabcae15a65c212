"""Ranks that Ray could not reach for a while: what a rank may get twice is asked again, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayloop.actors import policy
from rayloop.actors.policy import PolicyRank
from rayloop.cluster.supervision import policy_group
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.failures import PolicyLost
from rayloop.core.types import Version
from rayloop.run.config import PolicySettings
from rayloop.run.lifetime import RecoverySettings

UNAVAILABLE = ActorUnavailableError("keepalive watchdog timeout", b"1" * 16)


class Rank:
    """Answers each call with the next of ``answers``, the last one for good. ``calls``: the names of those it got."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[str]()

    def __getattr__(self, name: str) -> Any:
        def remote(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            answer = asyncio.get_running_loop().create_future()
            value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(value, BaseException):
                answer.set_exception(value)
            else:
                answer.set_result(value)
            return answer

        def split(*_: Any, **__: Any) -> Any:
            first = remote()
            return first, f"source {len(self.calls)}"

        return SimpleNamespace(remote=remote, options=lambda num_returns: SimpleNamespace(remote=split))


def group(*ranks: Rank, health_timeout: float = 30.0) -> PolicyGroup:
    made = PolicyGroup(PolicySettings(), lambda _: None, RecoverySettings(health_timeout=health_timeout))  # type: ignore[arg-type,return-value]
    made.ranks = list(ranks)  # type: ignore[arg-type]
    return made


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor pauses."""
    monkeypatch.setattr(policy_group, "PAUSE", 0.0)
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


@pytest.mark.parametrize("call", [fetch, train])
def test_one_of_several_ranks_that_could_not_be_reached_is_asked_again(call: Callable[[PolicyGroup], Any]) -> None:
    well, late = Rank([]), Rank(UNAVAILABLE, UNAVAILABLE, [])
    asyncio.run(call(group(well, late)))
    assert (well.calls, late.calls) == ([call.__name__], [call.__name__] * 3)


def test_a_single_rank_exports_again_and_the_source_is_that_of_the_answer() -> None:
    rank = Rank(UNAVAILABLE, "manifest")
    update = asyncio.run(export(group(rank)))
    assert (update.manifest, update.source) == ("manifest", "source 2")


def test_a_single_rank_compares_again() -> None:
    rank = Rank(UNAVAILABLE, [{"tokens": 1, "sum": 0.5, "max": 0.5, "images": 0, "image_tokens": 0, "swapped": 0.0}])
    assert asyncio.run(compare(group(rank))).mean == 0.5


@pytest.mark.parametrize(("call", "ranks"), [(export, 2), (compare, 2), (save, 1), (save, 2)])
def test_what_a_rank_may_have_done_already_is_not_asked_again(call: Callable[[PolicyGroup], Any], ranks: int) -> None:
    """The others may have left the collective that it would wait in."""
    made = [Rank(UNAVAILABLE, "manifest") for _ in range(ranks)]
    with pytest.raises(PolicyLost, match="keepalive watchdog timeout"):
        asyncio.run(call(group(*made)))
    assert [len(rank.calls) for rank in made] == [1] * ranks


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


class Engine:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps, self.gaps = 0, dict[Any, Any]()

    def train(self, updates: Sequence[Any]) -> dict[str, float]:
        self.steps += 1
        return {"steps": float(self.steps)}


def test_a_rank_trains_once_for_a_share_however_often_it_is_asked() -> None:
    rank = PolicyRank(SimpleNamespace(adapter_reference=False), 0, 1)  # type: ignore[arg-type]
    rank.engine = Engine()  # type: ignore[assignment]
    rank.fetch([])
    first = rank.train()
    assert rank.train() == first
    assert rank.engine.steps == 1  # type: ignore[attr-defined]
    rank.fetch([])
    assert rank.train()[0]["steps"] == 2.0
