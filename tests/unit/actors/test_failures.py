"""Every failure has an action: all of Ray's classes, what they wrap, and torch's."""

from __future__ import annotations

import inspect

import pytest
from ray import exceptions

from rayloop.actors.failures import (
    ACTIONS,
    FailureAction,
    action,
    cause,
    is_lost,
    object_lost,
    typed,
)
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    BroadcastFailed,
    ConfigError,
    EnvironmentFailed,
    GraderBroken,
    MachineFailed,
    PolicyLost,
    RayloopError,
    RewardLost,
    Unforeseen,
    WeightSyncError,
    WorkerLost,
    WorkerSpent,
)

REPLACE, REBUILD, EXCLUDE, END = FailureAction
RAYS = {
    kind
    for _, kind in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(kind, BaseException) and kind.__module__ == exceptions.__name__
}
ID = "00" * 28


def wrapped(error: Exception) -> BaseException:
    """As an actor's method raises it at the caller."""
    return exceptions.RayTaskError("method", "traceback", error).as_instanceof_cause()


def made(kind: type[BaseException]) -> BaseException:
    """One of that class, whatever its constructor asks for: what is decided depends on the class
    alone.
    """
    return kind.__new__(kind)


def test_every_class_of_ray_has_its_own_line() -> None:
    assert len(RAYS) > 35, "the walk must have found them"
    assert sorted(kind.__name__ for kind in RAYS - ACTIONS.keys()) == [], (
        "say in actors/failures.py what becomes of these"
    )


@pytest.mark.parametrize(
    "kind", sorted(RAYS - {exceptions.RayTaskError}, key=lambda kind: kind.__name__)
)
def test_a_class_of_ray_has_the_same_fate_bare_and_wrapped_once_or_twice(
    kind: type[Exception],
) -> None:
    expected = ACTIONS[kind][0]
    error = made(kind)
    once = exceptions.RayTaskError("method", "traceback", error)
    assert [
        action(error),
        action(once),
        action(exceptions.RayTaskError("method", "traceback", once)),
    ] == [expected] * 3
    assert action(error, ranks=1) is (REBUILD if expected in (REPLACE, EXCLUDE) else expected)
    assert issubclass(kind, exceptions.ObjectLostError) <= (expected is EXCLUDE)
    assert issubclass(kind, exceptions.RayActorError) <= (expected is REPLACE)


def test_a_class_that_a_later_ray_derives_from_a_known_one_shares_its_fate() -> None:
    class ActorEatenError(exceptions.RayActorError): ...

    class NewError(exceptions.RayError): ...

    assert action(made(ActorEatenError)) is REPLACE
    assert action(made(NewError)) is END


class AcceleratorError(RuntimeError):
    """Named as torch's."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "pool", "one_rank", "ranks"),
    [
        (WorkerLost("no answer"), REPLACE, REBUILD, REBUILD),
        (WorkerSpent("8 threads hang"), REPLACE, REBUILD, REBUILD),
        (TimeoutError(), REPLACE, REBUILD, REBUILD),
        (MemoryError(), REPLACE, REBUILD, REBUILD),
        (PolicyLost("rank 1"), REBUILD, REBUILD, REBUILD),
        (AcceleratorError("uncorrectable ECC error"), REPLACE, REBUILD, REBUILD),
        (RuntimeError("CUDA error: an illegal memory access"), REPLACE, REBUILD, REBUILD),
        (OutOfMemoryError("CUDA out of memory"), END, END, END),
        (RuntimeError("Connection closed by peer"), END, END, REBUILD),
        (ValueError("a bug"), END, END, END),
        (ConfigError("a key"), END, END, END),
        (RewardLost("the judge is gone"), END, END, END),
        (WeightSyncError("a checksum"), END, END, END),
        (BroadcastFailed("a member died"), END, END, END),
        (EnvironmentFailed("reset raised"), END, END, END),
        (GraderBroken("all raised"), END, END, END),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_other_errors(
    error: Exception, pool: FailureAction, one_rank: FailureAction, ranks: FailureAction
) -> None:
    for each in (error, wrapped(error)):
        assert [action(each), action(each, ranks=1), action(each, ranks=4)] == [
            pool,
            one_rank,
            ranks,
        ]


def test_torch_calls_these_as_is_expected() -> None:
    torch = pytest.importorskip("torch")
    assert action(torch.OutOfMemoryError("CUDA out of memory"), ranks=4) is END
    assert action(torch.AcceleratorError("CUDA error: uncorrectable ECC error", 214)) is REPLACE


def test_a_lost_object_below_a_call_is_no_loss_of_the_actor() -> None:
    lost = wrapped(exceptions.OwnerDiedError(ID, "owner", "site"))
    assert object_lost(lost)
    assert not is_lost(lost)
    assert isinstance(cause(lost), exceptions.OwnerDiedError)


def test_what_a_constructor_raised_it_would_raise_again() -> None:
    task = exceptions.RayTaskError(
        "__init__", "trace", OSError("no model at /models/gone"), actor_id="ab"
    )
    task._actor_id = "ab"
    died = exceptions.ActorDiedError(task)
    assert action(died) is action(died, ranks=2) is END
    assert type(typed(died)).__name__ == "WorkerStartFailed"


def test_a_wrong_configuration_in_a_constructor_keeps_its_exit_code() -> None:
    """Of the policy's ranks and the driver, which are in no pool."""
    text = (
        'trace\n  File "actors/policy.py", line 1, in __init__\n   '
        " raise\nrayloop.core.failures.ConfigError: a key"
    )
    task = exceptions.RayTaskError("__init__", text, ConfigError("a key"), actor_id="ab")
    task._actor_id = "ab"
    found = typed(exceptions.ActorDiedError(task))
    assert (type(found), str(found), found.exit_code) == (ConfigError, "a key", 2)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (wrapped(RewardLost("the judge is gone")), RewardLost, START_AGAIN_EXIT_CODE),
        (wrapped(ConfigError("a key")), ConfigError, 2),
        (exceptions.LocalRayletDiedError("gone"), MachineFailed, START_AGAIN_EXIT_CODE),
        (wrapped(exceptions.OutOfDiskError("full")), MachineFailed, START_AGAIN_EXIT_CODE),
        (OSError(28, "No space left on device"), MachineFailed, START_AGAIN_EXIT_CODE),
        (wrapped(RuntimeError("CUDA error: gone")), MachineFailed, START_AGAIN_EXIT_CODE),
        (wrapped(ValueError("a bug\nin two lines")), Unforeseen, 1),
        (KeyError("step"), Unforeseen, 1),
    ],
    ids=str,
)
def test_a_run_ends_typed_with_a_code_that_says_whether_to_start_it_again(
    error: Exception, kind: type[RayloopError], code: int
) -> None:
    end = typed(error)
    assert type(end) is kind
    assert end.exit_code == code
    assert str(end).splitlines()[0] == str(end), "one line"
