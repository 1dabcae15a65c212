"""What Ray raises when something is gone: the error below its wrapping, objects that are lost, and what is left without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import ray
from ray.exceptions import ObjectLostError, RayTaskError

from rayloop.core.references import Ref

T = TypeVar("T")


def cause(error: BaseException) -> BaseException:
    """The error raised inside the actor, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    return error


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
