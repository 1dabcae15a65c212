"""What is done about an actor's error, by its class.

A test walks through ``ray.exceptions``: a new class must get its line.
"""

import re
import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TypeVar

import ray
import yaml
from ray import exceptions

from rayloop.core.failures import (
    ConfigError,
    MachineFailed,
    RayloopError,
    Unforeseen,
    WorkerSpent,
    WorkerStartFailed,
)
from rayloop.core.types import Ref

T = TypeVar("T")


class FailureAction(StrEnum):
    """What is done about a failure."""

    REPLACE = "replace worker"
    """The process that was called, or its machine, failed: another process takes its place and does
    the work.
    """
    REBUILD = "rebuild policy"
    """A rank failed: all ranks are replaced, and the newest checkpoint is restored."""
    EXCLUDE = "exclude payload"
    """An object is gone: its trajectory is replaced by another one; weights are synced again."""
    END = "end typed"
    """Neither another process nor less data helps: the run saves what it can and ends with this
    error.
    """


REPLACE, REBUILD, EXCLUDE, END = FailureAction
_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ACTIONS: Mapping[type[BaseException], tuple[FailureAction, str]] = MappingProxyType(
    {
        resolve_name(name): (FailureAction[action.upper()], why)
        for name, (action, why) in _TABLE.items()
    }
)
"""By class, with the reason. Another class has the action of its nearest base, or END."""
DEVICE = ("AcceleratorError", "CUDA error")
"""What torch calls a device that failed for good, which the process never gets back: the type's
name, or words of its text.
"""
FRAME = '\n  File "'
"""How each frame of a traceback begins."""
MISCONFIGURED = re.compile(
    rf"[^\n]*\n(?: [^\n]*\n)*{re.escape(f'{ConfigError.__module__}.{ConfigError.__name__}')}: (.*)",
    re.DOTALL,
)
"""The rest of a traceback after the beginning of its last frame, when the exception is a
ConfigError; finds its message.
"""


def cause(error: BaseException) -> BaseException:
    """The error raised inside the actor, without Ray's wrapping."""
    while isinstance(error, exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def action(error: BaseException, ranks: int = 0) -> FailureAction:
    """What is done about the error of a call, of the policy if ``ranks`` > 0.

    A collective that fails is a RuntimeError on the ranks that live, so with several ranks each
    RuntimeError, except for a device out of memory, counts as a lost rank.
    """
    below = cause(error)
    if getattr(
        below, "actor_init_failed", False
    ):  # its constructor raised, which it would do again
        return END
    found = next((ACTIONS[kind][0] for kind in type(below).__mro__ if kind in ACTIONS), END)
    if found is END and isinstance(below, RuntimeError):
        names = {kind.__name__ for kind in type(below).__mro__}
        # Another process would run out of memory on the same batch.
        if "OutOfMemoryError" in names:
            return END
        if ranks > 1 or DEVICE[0] in names or DEVICE[1] in str(below):
            found = REPLACE
    return REBUILD if ranks and found is not END else found


def is_lost(error: BaseException) -> bool:
    """Whether the actor, not the work, is the problem."""
    return action(error) is REPLACE


def is_spent(error: BaseException) -> bool:
    """Whether the actor asks to be replaced, since too many of its threads hang."""
    return isinstance(cause(error), WorkerSpent)


def object_lost(error: BaseException) -> bool:
    """Whether an object is gone that was fetched, or given to a call."""
    return action(error) is EXCLUDE


def typed(error: BaseException) -> RayloopError:
    """The RayloopError with which a run ends that cannot go on after ``error``."""
    below = cause(error)
    if isinstance(below, RayloopError):
        return below
    if getattr(below, "actor_init_failed", False):
        return misconfigured(below) or WorkerStartFailed(
            f"an actor did not start: {last_line(below)}"
        )
    machine = isinstance(below, exceptions.RayError | OSError) or action(below) is not END
    text = (str(below).strip() or "no message").splitlines()[0]
    return (MachineFailed if machine else Unforeseen)(f"{type(below).__name__}: {text}")


def brief(error: BaseException) -> str:
    """The first line of what was raised inside the actor, or the name of its type."""
    return (str(cause(error)).strip() or type(cause(error)).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """The last line of an error's text: Ray puts the remote traceback before it."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def misconfigured(error: BaseException) -> ConfigError | None:
    """The ConfigError that an actor's constructor raised, as it was raised; None for another error
    of the constructor.
    """
    # Ray keeps the text of what a constructor raised, and not the exception.
    _, _, after = str(error).rpartition(FRAME)
    found = MISCONFIGURED.fullmatch(after)
    return None if found is None else ConfigError(found[1].strip())


def as_value(error: BaseException) -> exceptions.RayTaskError:
    """An error as one of the values that a call returns.

    The caller raises its ``as_instanceof_cause``.
    """
    return exceptions.RayTaskError(
        "one of several", "".join(traceback.format_exception(error)), error
    )


def fetch(refs: Sequence[Ref[T]]) -> tuple[dict[Ref[T], T], set[Ref[T]]]:
    """The values of the references, each fetched once, and the references whose objects are gone."""
    distinct = list(dict.fromkeys(refs))
    try:
        # All at once is the usual case. For a lost object ``ray.get`` of a list gives no values at
        # all, so each is then fetched alone.
        return dict(zip(distinct, ray.get(distinct), strict=True)), set()
    except Exception as error:
        if not object_lost(error):
            raise

    found: dict[Ref[T], T] = {}
    for ref in distinct:
        try:
            [found[ref]] = ray.get([ref])
        except Exception as error:
            if not object_lost(error):
                raise
    return found, set(distinct) - found.keys()
