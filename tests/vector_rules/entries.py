"""What a vector is, and what a rule may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unknown(Exception):
    """A rule cannot interpret this entry: it names an option or an input that nothing here stands for."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One vector: what an original function, named by ``reward``, returned (``expected``) for ``inputs``."""

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
        """Raises Unknown when the entry has other inputs than these: ignoring one would compare something else."""
        if extra := sorted(set(self.inputs) - set(names)):
            raise Unknown(f"inputs {extra} mean nothing here")


class Nothing(Enum):
    """No settings express the original."""

    EXPRESSES_IT = "nothing expresses it"


@dataclass(frozen=True, slots=True)
class Deviation:
    """What our code returns by default, which may differ from the original on purpose, and why. Agreement is agreement.

    ``original`` is what it returns with the settings that express the original; if there are any, that must agree.
    """

    got: Any
    why: str
    original: Any = Nothing.EXPRESSES_IT


Rule = Callable[[Entry, Sequence[Entry]], Any]
"""From an entry and all entries of its file (for those that depend on others) to what our code returns, or a Deviation."""
