"""Typed handles of actors.

The type checker refuses wrong methods and arguments of ``submit(handle, Class.method, ...)``.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import ray

from rayloop.actors.base import GROUPS
from rayloop.core.groups import Ref

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Handle(Generic[A_co]):
    """The type of a handle of an actor of class ``A_co``. At run time it is Ray's handle."""


def create(
    actor: Callable[P, A], options: Mapping[str, Any], *args: P.args, **kwargs: P.kwargs
) -> Handle[A]:
    """Start an actor with Ray's ``options``. The first call raises what its constructor raised."""
    remote_class = ray.remote(concurrency_groups=GROUPS)(actor)
    handle = remote_class.options(**options).remote(*args, **kwargs)
    return cast(Handle[A], handle)


@overload
def submit(
    handle: Handle[A],
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Ref[R]: ...


@overload
def submit(
    handle: Handle[A], method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs
) -> Ref[R]: ...


def submit(handle: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Ref[Any]:
    """Begin a call.

    This process owns the answer, which stays in the object store as long as the reference.
    """
    return cast(Ref[Any], getattr(handle, method.__name__).remote(*args, **kwargs))


def submit_split(
    handle: Handle[A],
    returns: int,
    method: Callable[
        Concatenate[A, P], tuple[R, *tuple[S, ...]] | Coroutine[Any, Any, tuple[R, *tuple[S, ...]]]
    ],
    *args: P.args,
    **kwargs: P.kwargs,
) -> tuple[Ref[R], *tuple[Ref[S], ...]]:
    """Begin a call of a method that returns ``returns`` values, each with a reference.

    One value is awaited while others stay remote.
    """
    call: Any = getattr(handle, method.__name__).options(num_returns=returns)
    return cast(tuple[Ref[R], *tuple[Ref[S], ...]], tuple(call.remote(*args, **kwargs)))


def submit_numbered(
    handle: Handle[A],
    number: int,
    returns: int,
    method: Callable[Concatenate[A, P], Any],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Any:
    """Begin a call that the actor runs once for each number (``PolicyRank.numbered``).

    Returns one reference, or a list with one for each value that the method ``returns``.
    """
    untyped: Any = handle
    # Ray shows a call, and the process that runs it, by this name.
    call = untyped.numbered.options(name=method.__qualname__, num_returns=returns)
    return call.remote(number, method.__name__, *args, **kwargs)


def resolved(ref: Ref[R]) -> R:
    """A reference as an argument: the actor's method gets its value."""
    return cast(R, ref)
