"""What a vector is, and what a rule may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unknown(Exception):
    """A rule cannot interpret this entry: it names an option or an input that nothing here stands
    for.
    """


class Refused(Exception):
    """Our code refuses these inputs on purpose, with an error that is no RayloopError."""


@contextmanager
def refusals() -> Iterator[None]:
    """Around one call of ours with well-formed arguments, whose ValueError is a refusal and no
    mistake of the rule.
    """
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One vector: what an original function, named by ``reward``, returned (``expected``) for
    ``inputs``.
    """

    recipe: str
    reward: str
    inputs: Mapping[str, Any]
    expected: Any
    note: str = ""

    def need(self, name: str) -> Any:
        """An input. Raises Unknown when the entry does not have it."""
        if name not in self.inputs:
            raise Unknown(f"no input {name!r}, only {sorted(self.inputs)}")
        return self.inputs[name]

    def only(self, *names: str) -> None:
        """Raises Unknown when the entry has other inputs than these: ignoring one would compare
        something else.
        """
        if extra := sorted(set(self.inputs) - set(names)):
            raise Unknown(f"inputs {extra} mean nothing here")


class Nothing(Enum):
    """There is no such value."""

    EXPRESSES_IT = "no settings express the original"
    SAYS_IT = "the rule does not work out what ours must be"


@dataclass(frozen=True, slots=True)
class Deviation:
    """What our code returns by default, which may differ from the original on purpose, and why.

    Agreement is agreement.

    ``why`` is empty unless the raw inputs meet the reason's conditions. ``original`` is what our
    code returns with the settings that express the original; if there are any, that must agree.
    ``instead`` is what the reason says that ours returns, worked out by the rule itself without the
    functions under test: where ours differs from the original, it must be this.
    """

    got: Any
    why: str
    original: Any = Nothing.EXPRESSES_IT
    instead: Any = Nothing.SAYS_IT


Rule = Callable[[Entry, Sequence[Entry]], Any]
"""From an entry and all entries of its file (for those that depend on others) to what our code
returns, or a Deviation.
"""
