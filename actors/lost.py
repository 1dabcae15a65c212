"""What Ray raises when something is gone: the error below its wrapping, objects that are lost, and what is left without them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from rayloop.core.failures import WorkerLost, WorkerSpent
from rayloop.core.references import Ref

T = TypeVar("T")


def cause(error: BaseException) -> BaseException:
    """The error raised inside the actor, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    return error


def as_value(error: BaseException) -> RayTaskError:
    """What was raised for one of several that a call answers for, to be returned among their answers. Whoever called raises it
    (``as_instanceof_cause``): it is then as if a call of its own had failed."""
    return RayTaskError("one of several", "".join(traceback.format_exception(error)), error)


LOST = (RayActorError, TimeoutError, WorkerLost)
"""What a caller sees when an actor died, became unreachable, or outlived its deadline (Ray's GetTimeoutError is a TimeoutError)."""


def is_lost(error: BaseException) -> bool:
    """Whether the error says that the actor, not the work, is the problem; an object that is gone is no loss of the actor."""
    return isinstance(cause(error), LOST) and not object_lost(error)


def is_spent(error: BaseException) -> bool:
    """Whether the actor asks to be replaced: too many threads of it hang."""
    return isinstance(cause(error), WorkerSpent)


def brief(error: BaseException) -> str:
    """The first line of what was raised inside the actor, or the name of its type."""
    return (str(cause(error)).strip() or type(cause(error)).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """The last line of an error's text: Ray puts the remote traceback before it."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__


def object_lost(error: BaseException) -> bool:
    """Whether an object is gone: fetching it failed, or a call that was given it.

    All of Ray's kinds derive from one class: no copy is left (ObjectReconstructionFailedError), its owner died, it was freed, it
    could not be fetched in time.
    """
    return isinstance(cause(error), ObjectLostError)


def fetch(refs: Sequence[Ref[T]]) -> tuple[dict[Ref[T], T], set[Ref[T]]]:
    """What the references stand for, each fetched once, and the references whose objects are gone."""
    distinct = list(dict.fromkeys(refs))
    try:
        return dict(zip(distinct, ray.get(distinct), strict=True)), set()
    except ObjectLostError:
        pass
    found: dict[Ref[T], T] = {}
    gone: set[Ref[T]] = set()
    for ref in distinct:
        try:
            [found[ref]] = ray.get([ref])
        except ObjectLostError:
            gone.add(ref)
    return found, gone
