"""Episodes that infrastructure took: their shares, and the alarm."""

from __future__ import annotations

from rayloop.core.events import Event
from rayloop.core.failures import Cause, Failure, Scope
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.grpo.alarms import Alarms, AlarmSettings
from rayloop.grpo.lost_episodes import LostEpisodes

NODE = "gpu-3 (10.0.0.3)"


def failure(cause: Cause, server: str = "") -> Failure:
    return Failure(cause, Scope.EPISODE, retryable=True, why="as the test wants it", server=server)


def test_shares_are_split_by_cause_node_and_server() -> None:
    lost = LostEpisodes()
    lost.failed(failure(Cause.UNREACHABLE, "http://user:key@host:8000/mcp"), NODE)
    lost.failed(failure(Cause.HUNG), NODE)
    lost.failed(failure(Cause.BAD_DATA), NODE)
    lost.played(Scored(0.0), NODE)
    lost.played(Unscored(UnscoredKind.REWARD_UNAVAILABLE, "the judge does not answer"), "")
    lost.played(Unscored(UnscoredKind.NOT_APPLICABLE), "")
    lost.played(Scored(1.0), "")
    lost.played(Scored(1.0), "")
    assert lost.take() == {
        "lost/episodes": 3 / 8,
        "lost/cause/unreachable": 1 / 8,
        "lost/cause/hung": 1 / 8,
        "lost/cause/reward_unavailable": 1 / 8,
        "lost/node/gpu-3_10.0.0.3": 2 / 8,
        "lost/server/host:8000": 1 / 8,
    }
    assert lost.take() == {}


def test_a_step_without_a_loss_says_so() -> None:
    lost = LostEpisodes()
    lost.played(Scored(1.0), NODE)
    assert lost.take() == {"lost/episodes": 0.0}


def test_an_alarm_names_cause_node_and_server() -> None:
    events = list[Event]()
    alarms = Alarms(AlarmSettings(), 1e-3, "reward", events.append)
    for _ in range(72):
        alarms.lost_episodes.played(Scored(1.0), NODE)
    for _ in range(8):
        alarms.lost_episodes.failed(failure(Cause.FULL, "http://host:8000"), NODE)
    alarms.groups([])
    assert events == [], "8 of 80 are not above a tenth"
    alarms.lost_episodes.failed(failure(Cause.FULL, "http://host:8000"), NODE)
    alarms.groups([])
    [event] = events
    assert event.record() == {
        "event": "alarm",
        "alarm": "infrastructure",
        "why": "9 of the last 81 episodes were lost to infrastructure (cause full 9, node"
        " gpu-3_10.0.0.3 9, server host:8000 9), the last one: as the test wants it",
    }


def test_few_lost_episodes_are_no_alarm() -> None:
    events = list[Event]()
    alarms = Alarms(AlarmSettings(), 1e-3, "reward", events.append)
    for _ in range(7):
        alarms.lost_episodes.failed(failure(Cause.LOST), NODE)
    alarms.groups([])
    assert events == []
