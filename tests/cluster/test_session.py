"""A private cluster whose daemons are slow to start is started again, and what was left of the first attempt is ended."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.roles import session

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def daemons() -> Iterator[list[subprocess.Popen[bytes]]]:
    begun: list[subprocess.Popen[bytes]] = []
    yield begun
    for daemon in begun:
        daemon.kill()
        daemon.wait()


def starting(monkeypatch: pytest.MonkeyPatch, begun: list[subprocess.Popen[bytes]], *said: str) -> None:
    """Let Ray's attempts to start leave a daemon behind, and then say this, one after the other."""
    answers = iter(said)

    def init(**options: Any) -> None:
        begun.append(subprocess.Popen(["sleep", "60"]))
        if why := next(answers):
            raise Exception(why)

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)


def alive(begun: list[subprocess.Popen[bytes]]) -> list[bool]:
    return [daemon.poll() is None for daemon in begun]


def test_a_slow_start_is_tried_again(monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]) -> None:
    mine = subprocess.Popen(["sleep", "60"])
    starting(monkeypatch, daemons, SLOW, SLOW, "")
    session.start("folder")
    assert alive(daemons) == [False, False, True]
    assert alive([mine]) == [True], "not everything below this process is Ray's"
    daemons.append(mine)


def test_it_is_given_up_at_last(monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]) -> None:
    starting(monkeypatch, daemons, *[SLOW] * session.STARTS)
    with pytest.raises(Exception, match="timed out during startup"):
        session.start("folder")
    assert len(daemons) == session.STARTS


def test_another_failure_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    starting(monkeypatch, daemons, "no space left on device")
    with pytest.raises(Exception, match="no space left"):
        session.start("folder")
    assert len(daemons) == 1
