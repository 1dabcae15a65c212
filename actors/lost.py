"""What Ray raises, in words and as values, and what is left when objects are lost. What is done about it: actors/fates.py."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TypeVar

import ray
from ray.exceptions import RayTaskError

from rayloop.actors.fates import cause, object_lost
from rayloop.core.failures import WorkerSpent
from rayloop.core.types import Ref

T = TypeVar("T")


def as_value(error: BaseException) -> RayTaskError:
    """What was raised for one of several that a call answers for, to be returned among their answers. The caller raises it
    (``as_instanceof_cause``): it is then as if a call of its own had failed."""
    return RayTaskError("one of several", "".join(traceback.format_exception(error)), error)


def is_spent(error: BaseException) -> bool:
    """Whether the actor asks to be replaced: too many threads of it hang."""
    return isinstance(cause(error), WorkerSpent)


def brief(error: BaseException) -> str:
    """The first line of what was raised inside the actor, or the name of its type."""
    return (str(cause(error)).strip() or type(cause(error)).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """The last line of an error's text: Ray puts the remote traceback before it."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__


def fetch(refs: Sequence[Ref[T]]) -> tuple[dict[Ref[T], T], set[Ref[T]]]:
    """What the references stand for, each fetched once, and the references whose objects are gone."""
    distinct = list(dict.fromkeys(refs))
    try:
        return dict(zip(distinct, ray.get(distinct), strict=True)), set()
    except Exception as error:
        if not object_lost(error):
            raise
    found: dict[Ref[T], T] = {}
    gone: set[Ref[T]] = set()
    for ref in distinct:
        try:
            [found[ref]] = ray.get([ref])
        except Exception as error:
            if not object_lost(error):
                raise
            gone.add(ref)
    return found, gone
