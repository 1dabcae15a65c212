"""Typed handles of actors, and the one place where a method of one is called: its class, its arguments and its answer are checked.

    outcomes = await submit(handle, RewardActor.score, task, step, resolved(payload))

Ray's handles take any method with any argument, and refuse it at run time. Here the type checker refuses a renamed method, a wrong
argument and a method of another role.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import ray

from rayloop.actors.base import GROUPS
from rayloop.core.types import Ref

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Handle(Generic[A_co]):
    """The type of a handle of an actor of class ``A_co``. At run time it is Ray's: nothing is ever an instance of this class."""


def create(actor: Callable[P, A], options: Mapping[str, Any], *args: P.args, **kwargs: P.kwargs) -> Handle[A]:
    """Start an actor with Ray's ``options``. Its constructor runs there: what it raises is raised by the first call."""
    return cast(Handle[A], ray.remote(concurrency_groups=GROUPS)(actor).options(**options).remote(*args, **kwargs))


@overload
def submit(
    handle: Handle[A], method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
) -> Ref[R]: ...


@overload
def submit(handle: Handle[A], method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...


def submit(handle: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Ref[Any]:
    """Begin a call. The answer is owned by this process: it stays in the object store until the reference goes."""
    return cast(Ref[Any], getattr(handle, method.__name__).remote(*args, **kwargs))


def submit_split(
    handle: Handle[A],
    returns: int,
    method: Callable[Concatenate[A, P], tuple[R, *tuple[S, ...]] | Coroutine[Any, Any, tuple[R, *tuple[S, ...]]]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> tuple[Ref[R], *tuple[Ref[S], ...]]:
    """Begin a call of a method that returns ``returns`` values, each with a reference: one is awaited while others stay remote."""
    call = cast(Any, getattr(handle, method.__name__)).options(num_returns=returns)
    return cast(tuple[Ref[R], *tuple[Ref[S], ...]], tuple(call.remote(*args, **kwargs)))


def resolved(ref: Ref[R]) -> R:
    """A reference in the place of an argument: Ray fetches it for the actor, whose method gets the value."""
    return cast(R, ref)
