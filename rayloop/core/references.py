"""The type of a reference to a value that lives elsewhere. No ray: whoever only passes references on need not import it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Ref(Generic[T_co]):
    """A value of type ``T_co`` in the object store, or one to come. At run time it is Ray's ObjectRef: nothing is ever an instance
    of this class.

    The driver holds payloads so: it passes them on and never opens one.
    """

    def __await__(self) -> Generator[Any, None, T_co]:
        raise NotImplementedError("Ref is a type only; Ray's ObjectRef is awaited")
