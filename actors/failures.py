"""The action that follows an actor's error, by the error's class.

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
from ray import exceptions

from rayloop.core.failures import (
    ConfigError,
    MachineFailed,
    RayloopError,
    Unforeseen,
    WorkerSpent,
    WorkerStartFailed,
)
from rayloop.core.files import yaml_data
from rayloop.core.groups import Ref

T = TypeVar("T")


class FailureAction(StrEnum):
    """The action that follows a failure."""

    REPLACE = "replace worker"
    """The process that was called, or its machine, failed.

    Another process takes its place and does the work.
    """
    REBUILD = "rebuild policy"
    """A rank failed: all ranks are replaced, and the newest checkpoint is restored."""
    EXCLUDE = "exclude payload"
    """An object was lost: its trajectory is replaced by another one; weights are synced again."""
    END = "end typed"
    """Neither another process nor less data helps.

    The run saves what it can and ends with this error.
    """


REPLACE, REBUILD, EXCLUDE, END = FailureAction
ACTIONS: Mapping[type[BaseException], tuple[FailureAction, str]] = MappingProxyType(
    {
        resolve_name(name): (FailureAction[action.upper()], reason)
        for name, (action, reason) in yaml_data(Path(__file__).with_suffix(".yaml")).items()
    }
)
"""By class, with the reason. Another class has the action of its nearest base, or END."""
DEVICE = ("AcceleratorError", "CUDA error")
"""The name of the type, and words of the text, of torch's error of a device that failed for good.

The process never gets the device back.
"""
FRAME = '\n  File "'
"""How each frame of a traceback begins."""
MISCONFIGURED = re.compile(
    rf"[^\n]*\n(?: [^\n]*\n)*{re.escape(f'{ConfigError.__module__}.{ConfigError.__name__}')}: (.*)",
    re.DOTALL,
)
"""Finds the message of a ConfigError in a traceback.

It matches the rest of the traceback after the beginning of its last frame.
"""


def cause(error: BaseException) -> BaseException:
    """The error raised inside the actor, without Ray's wrapping."""
    while isinstance(error, exceptions.RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def action(error: BaseException, ranks: int = 0) -> FailureAction:
    """The action that follows the error of a call, of the policy if ``ranks`` > 0.

    A collective that fails is a RuntimeError on the ranks that live, so with several ranks each
    RuntimeError, except for a device out of memory, counts as a lost rank.
    """
    origin = cause(error)
    # A constructor that raised would raise again.
    if getattr(origin, "actor_init_failed", False):
        return END
    bases = type(origin).__mro__
    result = next((ACTIONS[base][0] for base in bases if base in ACTIONS), END)
    if result is END and isinstance(origin, RuntimeError):
        names = {base.__name__ for base in bases}
        # Another process would run out of memory on the same batch.
        if "OutOfMemoryError" in names:
            return END
        device_failed = DEVICE[0] in names or DEVICE[1] in str(origin)
        if ranks > 1 or device_failed:
            result = REPLACE
    return REBUILD if ranks and result is not END else result


def is_lost(error: BaseException) -> bool:
    """Whether the actor, not the work, is the problem."""
    return action(error) is REPLACE


def is_spent(error: BaseException) -> bool:
    """Whether the actor asks to be replaced, since too many of its threads hang."""
    return isinstance(cause(error), WorkerSpent)


def object_lost(error: BaseException) -> bool:
    """Whether an object was lost that was fetched, or given to a call."""
    return action(error) is EXCLUDE


def typed(error: BaseException) -> RayloopError:
    """The RayloopError with which a run ends that cannot continue after ``error``."""
    origin = cause(error)
    if isinstance(origin, RayloopError):
        return origin
    if getattr(origin, "actor_init_failed", False):
        config_error = misconfigured(origin)
        return config_error or WorkerStartFailed(f"an actor did not start: {last_line(origin)}")
    is_machine_error = isinstance(origin, exceptions.RayError | OSError)
    first_line = (str(origin).strip() or "no message").splitlines()[0]
    message = f"{type(origin).__name__}: {first_line}"
    if is_machine_error or action(origin) is not END:
        return MachineFailed(message)
    return Unforeseen(message)


def brief(error: BaseException) -> str:
    """The first line of the error raised inside the actor, or the name of its type."""
    origin = cause(error)
    text = str(origin).strip() or type(origin).__name__
    return text.splitlines()[0]


def last_line(error: BaseException) -> str:
    """The last line of an error's text: Ray puts the remote traceback before it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1].strip()


def misconfigured(error: BaseException) -> ConfigError | None:
    """The ConfigError that an actor's constructor raised, as it was raised.

    None for another error of the constructor.
    """
    # Ray keeps the text of a constructor's error, and not the exception.
    _, _, last_frame = str(error).rpartition(FRAME)
    match = MISCONFIGURED.fullmatch(last_frame)
    return None if match is None else ConfigError(match[1].strip())


def as_value(error: BaseException) -> exceptions.RayTaskError:
    """An error as one of the values that a call returns.

    The caller raises its ``as_instanceof_cause``.
    """
    trace = "".join(traceback.format_exception(error))
    return exceptions.RayTaskError("one of several", trace, error)


def fetch(refs: Sequence[Ref[T]]) -> tuple[dict[Ref[T], T], set[Ref[T]]]:
    """The values of the references, each fetched once, and the references of lost objects."""
    distinct = list(dict.fromkeys(refs))
    try:
        # All at once is the usual case. For a lost object ``ray.get`` of a list gives no values at
        # all, so each is then fetched separately.
        return dict(zip(distinct, ray.get(distinct), strict=True)), set()
    except Exception as error:
        if not object_lost(error):
            raise

    values: dict[Ref[T], T] = {}
    for ref in distinct:
        try:
            [values[ref]] = ray.get([ref])
        except Exception as error:
            if not object_lost(error):
                raise
    return values, set(distinct) - values.keys()
