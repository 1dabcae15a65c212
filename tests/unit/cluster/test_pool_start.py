"""A role whose actors die, or cannot be reached, while they start; without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray import exceptions

from rayloop.cluster.supervision.pool import CALL_ATTEMPTS, Pool
from rayloop.core.failures import ConfigError, RayloopError, RolesExhausted, WorkerStartFailed
from rayloop.core.incidents import ReplacementFailed
from rayloop.run.lifetime import RecoverySettings
from tests.support.local import LocalActor

UNREACHABLE = exceptions.ActorUnavailableError("connection reset", b"1" * 16)
MEMORY = exceptions.OutOfMemoryError("Ray's memory monitor ended it")


class Worker:
    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures

    def health(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def constructor_raised(
    text: str = "trace\nOSError: no model at /models/gone", error: Exception | None = None
) -> exceptions.ActorDiedError:
    task = exceptions.RayTaskError("__init__", text, error or OSError())
    task._actor_id = "ab"
    return exceptions.ActorDiedError(task)


def started(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> tuple[Pool[Any], list[Any]]:
    """A role of one actor whose starts fail like this, one after the other, and what it reported."""
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    left, reported = list(failures), list[Any]()
    made: Any = LocalActor(Worker(left))
    pool = Pool[Any](
        "tester", 1, lambda slot: made, RecoverySettings(start_timeout=5.0), reported.append
    )
    try:
        asyncio.run(pool.start())
    finally:
        assert all(isinstance(event, ReplacementFailed) for event in reported)
    return pool, reported


@pytest.mark.parametrize("error", [UNREACHABLE, MEMORY], ids=lambda error: type(error).__name__)
def test_an_actor_that_is_lost_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pool, reported = started(monkeypatch, error)
    assert len(pool.workers) == len(reported) == 1


@pytest.mark.parametrize(
    "error", [exceptions.RpcError("deadline exceeded", 4), exceptions.RaySystemError(OSError())]
)
def test_a_message_that_is_lost_while_an_actor_is_made_costs_an_attempt(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The head is away: at the start, and when an actor is to be replaced."""
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    failures, reported = [error], list[Any]()

    def spawn(slot: int) -> Any:
        if failures:
            raise failures.pop()
        return LocalActor(Worker([]))

    async def test() -> None:
        pool = Pool[Any]("tester", 1, spawn, RecoverySettings(start_timeout=5.0), reported.append)
        await pool.start()
        failures.append(error)
        pool.lost(2, "killed")
        assert (await pool.lease()).worker == 4
        assert pool._failure is None

    asyncio.run(test())
    assert [event.kind for event in reported if isinstance(event, ReplacementFailed)] == [
        "replacement_failed"
    ] * 2


def test_one_that_is_lost_each_time_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(exceptions.ActorUnavailableError):
        started(monkeypatch, *[UNREACHABLE] * CALL_ATTEMPTS)


def test_what_a_constructor_raises_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WorkerStartFailed,
        match=r"an actor of role tester did not start: .*no model at /models/gone",
    ):
        started(monkeypatch, constructor_raised(), RayloopError("it was tried again"))


WRONG = """trace
  File "actors/rollout.py", line 1, in __init__
    raise ConfigError("rollout.engine: two problems:\\n  - one\\nanother")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
rayloop.core.failures.ConfigError: rollout.engine: two problems:
  - one
another"""
BELOW = f"""{WRONG}

The above exception was the direct cause of the following exception:

trace
  File "actors/rollout.py", line 2, in __init__
    open(path)
OSError: no model at /models/gone"""


def test_a_wrong_configuration_that_a_constructor_finds_ends_the_start_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError) as raised:
        started(
            monkeypatch,
            constructor_raised(WRONG, ConfigError()),
            RayloopError("it was tried again"),
        )
    assert (str(raised.value), raised.value.exit_code) == (
        "rollout.engine: two problems:\n  - one\nanother",
        2,
    )


def test_a_wrong_configuration_below_another_error_is_not_what_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WorkerStartFailed, match="no model at /models/gone"):
        started(monkeypatch, constructor_raised(BELOW))


def test_a_replacement_that_finds_the_configuration_wrong_is_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same configuration has started the worker before: its machine has changed."""
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    failures, reported = list[Exception](), list[Any]()
    made: Any = LocalActor(Worker(failures))

    async def test() -> None:
        settings = RecoverySettings(start_timeout=5.0, replacements=1)
        pool = Pool[Any]("tester", 1, lambda slot: made, settings, reported.append)
        await pool.start()
        failures.append(constructor_raised(WRONG, ConfigError()))
        pool.lost(1, "killed")
        with pytest.raises(RolesExhausted):
            await pool.lease()

    asyncio.run(test())
    assert [event.kind for event in reported] == ["worker_lost", "replacement_failed"]
