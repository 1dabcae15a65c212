"""Makes calls of actions, by the first rule that says all that an action does."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayloop.envs.grammar.actions import (
    Action,
    Drag,
    Hotkey,
    Mark,
    Point,
    Scroll,
    Type,
    Unsupported,
)
from rayloop.envs.grammar.basic import USUAL_AMOUNTS
from rayloop.envs.grammar.bodies import WrittenCall
from rayloop.envs.grammar.rules import BUTTONS, SIGNED, PointStyle, Rule, Specification

_COORDINATE_DIGITS = 4


@dataclass(frozen=True)
class ActionWriter:
    """Writes actions as calls.

    ``points`` is how a place is written; ``keys``: a key's name in the grammar -> in the language;
    ``between_keys``: what stands between the keys of a text, "" where they are a list.
    """

    points: PointStyle = "pair"
    keys: Mapping[str, str] = field(default_factory=dict)
    between_keys: str = ""

    def call(self, rule: Rule, action: Action, focus: Any = None) -> WrittenCall | None:
        """Return the call; None where the rule does not say all that the action does.

        ``focus``: what is clicked before a text is typed, which the rule must have a field for.
        """
        if type(action).__name__ != rule.act:
            return None
        if isinstance(action, Unsupported):
            has_name = action.name == rule.call
            return WrittenCall(rule.call, dict(action.arguments)) if has_name else None
        values = _values_of(rule, action, focus)
        if values is None:
            return None
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(action)
            if field.default is not dataclasses.MISSING
        }
        for name, fixed in rule.fixed.items():
            is_written = name in rule.fields
            if not is_written and values.pop(name, None) != fixed:
                return None
        arguments = dict(rule.when)
        for name, specification in rule.specifications.items():
            value = values.pop(name, None)
            is_usual = value is None or value == defaults.get(name)
            if value is None and specification.is_needed:
                return None
            if is_usual and not specification.is_needed:
                continue
            if not self._write(arguments, name, specification, value):
                return None
        # The call cannot express the values that are left over.
        is_complete = all(value == defaults.get(name) for name, value in values.items())
        return WrittenCall(rule.call, arguments) if is_complete else None

    def _write(
        self, arguments: dict[str, Any], name: str, specification: Specification, value: Any
    ) -> bool:
        """Add an argument; False where the value is of another kind than the language has."""
        # A line's brackets hold a mark or a point.
        may_be_mark = specification.is_mark or self.points == "text"
        if isinstance(value, Mark) and not may_be_mark:
            return False
        if specification.is_mark and not isinstance(value, Mark):
            return False
        if name == "button" and value not in BUTTONS:
            return False
        names = specification.names
        if len(names) == 2:
            if not isinstance(value, Point):
                return False
            arguments |= {names[0]: _number(value.x), names[1]: _number(value.y)}
            return True
        if name in _KEY_FIELDS:
            value = self._key_names(value)
        arguments[names[0]] = self._written(value)
        return True

    def _key_names(self, value: str | Sequence[str]) -> str | list[str]:
        """Return the language's name of a key, or its names of several."""
        if isinstance(value, str):
            return self.keys.get(value, value)
        names = [self.keys.get(one, one) for one in value]
        return self.between_keys.join(names) if self.between_keys else names

    def _written(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        match value:
            case Point(x, y):
                return self._place(_number(x), _number(y))
            case Mark(name):
                return int(name) if name.isdecimal() and self.points != "text" else name
            case tuple() | list():
                return [self._written(one) for one in value]
            case float():
                return _number(value)
        return value

    def _place(self, x: float, y: float) -> Any:
        match self.points:
            case "pair":
                return [x, y]
            case "text":
                return f"[{x},{y}]"
            case "box":
                return [[x, y, x, y]]
            case "dict":
                return {"x": x, "y": y}


_KEY_FIELDS = ("keys", "key", "each")
"""Fields of keys."""


def _values_of(rule: Rule, action: Action, focus: Any) -> dict[str, Any] | None:
    """Return the action's values by the rule's fields; None where the rule cannot have them."""
    values = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
    if focus is not None:
        if "focus" not in rule.fields:
            return None
        values["focus"] = focus
    match action:
        case Type(text):
            if not text.endswith(rule.append):
                return None
            values["text"] = text.removesuffix(rule.append)
        case Scroll():
            _scroll_values(rule, action, values)
        case Drag(start, end, path) if "places" in rule.fields and start is not None:
            del values["start"], values["path"], values["end"]
            values["places"] = [start, *path, end]
        case Hotkey(names) if "each" in rule.fields:
            if len(names) > 1:
                return None
            values["each"] = list(values.pop("keys"))
    return values


def _scroll_values(rule: Rule, scroll: Scroll, values: dict[str, Any]) -> None:
    """Put a scroll's amount, and its direction where that is a sign, into the rule's fields."""
    amount = rule.specifications.get("amount")
    needs_amount = rule.is_signed or (amount is not None and amount.is_needed)
    if scroll.amount is None and needs_amount:
        unit = rule.set.get("unit", scroll.unit)
        values |= {"amount": USUAL_AMOUNTS[unit], "unit": unit}
    for positive in SIGNED.keys() & rule.fields.keys():
        if scroll.direction not in (positive, SIGNED[positive]):
            continue
        size = values.pop("amount")
        values[positive] = size if scroll.direction == positive else -size
        del values["direction"]
        return


def _number(value: float) -> int | float:
    """Return a whole number as such, and another one with few digits."""
    return int(value) if value == math.floor(value) else round(value, _COORDINATE_DIGITS)
