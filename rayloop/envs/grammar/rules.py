"""What a language's calls mean, as data: a rule leads from a call to an action, and back.

``reading.py`` makes actions of calls by the rules, ``writing.py`` calls of actions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.envs.grammar.bodies import QUOTED_CHARACTERS

WHOLE_SCREEN = "WINDOW"
"""The mark that stands for no element."""
SIGNED = {"up": "down", "down": "up", "left": "right", "right": "left"}
"""Fields of a rule for a scroll with a signed number -> the direction of a negative one."""
BUTTONS = ("left", "right", "middle")
"""Buttons that a call's argument may name."""
PointStyle = Literal["pair", "text", "box", "dict"]
"""``[x, y]``, ``"[x,y]"``, ``[[x, y, x, y]]`` or ``{"x": x, "y": y}``."""


@dataclass(frozen=True)
class Extent:
    """The largest coordinates of a screen, in the unit in which a model writes them."""

    columns: float
    rows: float


@dataclass(frozen=True)
class Specification:
    """How a rule says which argument has a field's value: ``at: "x y"``, ``at: "#index?"``.

    ``names``: the argument's name, or the names of a point's two numbers. ``is_mark``: it is an
    element's mark (``#``). ``is_needed``: the call cannot be without it (no ``?``).
    """

    names: tuple[str, ...]
    is_mark: bool
    is_needed: bool

    @classmethod
    def of(cls, text: str) -> "Specification":
        """Return what a rule's text says."""
        names = text.removeprefix("#").removesuffix("?").split()
        return cls(tuple(names), text.startswith("#"), not text.endswith("?"))


class Rule(SettingsModel):
    """A call and the action that it means."""

    call: str
    """The call's name; several rules may have the same."""
    act: str
    """The name of the action's class."""
    when: dict[str, Any] = {}
    """Arguments with exactly these values."""
    fields: dict[str, str] = {}
    """Field of the action -> the argument's name, with ``?`` behind it when it may be missing.

    ``x y`` are two numbers of a point, ``#index`` is an element's mark. More fields: ``focus`` is
    clicked before a text is typed; ``up`` and ``right`` (or ``down``, ``left``) are signed amounts
    of a scroll; ``places`` are the points of a drag; ``presses`` says how often keys are pressed;
    ``each`` are keys that are pressed one after the other; ``enter`` ends a text with a new line.
    """
    set: dict[str, Any] = {}
    """Fields of the action with fixed values, or with one where the argument is missing."""
    append: str = ""
    """What typing adds to the text."""
    bare: bool = False
    """Whether the call is written without the object around others."""

    @cached_property
    def specifications(self) -> dict[str, Specification]:
        """Field of the action -> the argument that has its value."""
        return {field: Specification.of(text) for field, text in self.fields.items()}

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """``set``, with the lists of the file as tuples, which actions have."""
        return {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in self.set.items()
        }

    @cached_property
    def arguments(self) -> list[str]:
        """The names of the arguments, in their order."""
        return list(chain.from_iterable(spec.names for spec in self.specifications.values()))

    @cached_property
    def needed(self) -> list[str]:
        """The names of the arguments that must be given."""
        needed = [spec.names for spec in self.specifications.values() if spec.is_needed]
        return list(chain.from_iterable(needed))

    @property
    def is_signed(self) -> bool:
        """Whether a scroll's direction is the sign of its amount."""
        return bool(SIGNED.keys() & self.fields.keys())

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the call has the values of ``when``."""
        return all(arguments.get(name) == value for name, value in self.when.items())

    def refusal(self, arguments: Mapping[str, Any], ignored: Sequence[str]) -> str | None:
        """Return what is wrong with the names of a call's arguments."""
        known = {*self.arguments, *self.when, *ignored}
        takes = ", ".join([*self.when, *self.arguments]) or "no arguments"
        for name in arguments:
            if name not in known:
                return f"{self.call} takes {takes}, not {name[:QUOTED_CHARACTERS]!r}"
        for name in self.needed:
            if name not in arguments:
                return f"{self.call} needs {name!r} (it takes {takes})"
        return None


class Rules(SettingsModel):
    """The calls of one function, or of a language without functions."""

    function: str = ""
    """The function whose argument names the call, such as computer_use."""
    calls: tuple[Rule, ...] = Field(min_length=1)
