"""The language of a family of models: reads turns and writes them, as its file says."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

from rayloop.config.settings import SettingsModel, local_path
from rayloop.core.files import yaml_data
from rayloop.envs.grammar import bodies
from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    Answer,
    Click,
    Drag,
    Finish,
    Hover,
    Mistake,
    Point,
    Scroll,
    Type,
    Unsupported,
)
from rayloop.envs.grammar.bodies import QUOTED_CHARACTERS, Stop, WrittenCall
from rayloop.envs.grammar.family import LanguageChoice, named_keys
from rayloop.envs.grammar.reading import ArgumentReader
from rayloop.envs.grammar.rules import Extent, PointStyle, Rule, Rules
from rayloop.envs.grammar.turns import TurnParts
from rayloop.envs.grammar.ui_tars import UiTars
from rayloop.envs.grammar.writing import ActionWriter

MAX_LISTED_NAMES = 12
"""Names of calls that a mistake lists."""
MAX_LISTED_CALLS = 100
"""Calls of a list that are read; a turn with so many is refused anyway."""


class ActionFormat(Protocol):
    """How a policy writes its turns."""

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        """Return the turn in a text, with points as written, or where and why it is not a turn.

        Never raises, and takes time in proportion to the text.
        """
        ...

    def write(self, actions: Actions, screen: Extent) -> str:
        """Return the text that is read as these actions, with points in the language's unit.

        Raises ValueError for what the language has no words for.
        """
        ...


class Written(SettingsModel):
    """How the parts of a turn are written; ``{}`` stands for the text."""

    thought: str = "{}\n"
    summary: str = ""
    calls: str = "{}"
    form: Literal["function", "marks", "object", "python", "line"]
    """``function``: ``{"name": ..., "arguments": {...}}``; ``marks``: ``<function=...>``."""
    wrap: dict[str, Any] = {}
    """The object around a call, whose key ``inside`` holds the call."""
    inside: str = ""
    points: PointStyle = "pair"
    between_keys: str = ""
    """What stands between the keys of a combination; empty: they are a list."""


class Language(TurnParts):
    """A language whose turns have calls; UI-TARS's is ``ui_tars.py``."""

    like: str = ""
    """The language of whose file this one has what it does not say itself, rules of calls, too."""
    name_keys: tuple[str, ...] = ()
    """Keys of an object, or arguments of a function, that name the call."""
    around: tuple[str, ...] = ()
    """Keys of objects around the call, or around a list of calls."""
    ignored: tuple[str, ...] = ()
    """Arguments that mean nothing to a screen."""
    rules: tuple[Rules, ...]
    written: Written

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        """See ``ActionFormat``."""
        try:
            thinking, start = self.thinking_of(text)
            spans = self.spans_of_calls(text, start)
            actions: list[Action] = []
            for begin, end in spans:
                for call in self._calls_between(text, begin, end):
                    actions += self._meaning(call, screen)
            if not actions:
                raise Stop("no action was found", len(text))
        except Stop as stop:
            quotation = text[stop.position : stop.position + QUOTED_CHARACTERS]
            return Mistake(stop.reason, stop.position, quotation)
        thought, summary = self.thought_and_summary(text, start, spans)
        return Actions(thought or thinking, tuple(actions), summary)

    def write(self, actions: Actions, screen: Extent) -> str:
        """See ``ActionFormat``."""
        written = self.written
        key_names = {key: names[0] for key, names in self.keys.items()}
        writer = ActionWriter(written.points, key_names, written.between_keys)
        calls = [self._call_text(*call) for call in self._calls_of(actions.actions, writer)]
        if written.form == "python":
            # A program of several lines is one part of a turn.
            calls = ["\n".join(calls)]
        if len(calls) > 1 and not self.several:
            raise ValueError(f"{self.family} writes one action in a turn, not {len(calls)}")
        thought = written.thought.replace("{}", actions.thought) if actions.thought else ""
        summary = written.summary.replace("{}", actions.summary) if actions.summary else ""
        return thought + summary + "\n".join(written.calls.replace("{}", call) for call in calls)

    def _calls_between(self, text: str, begin: int, end: int) -> Sequence[WrittenCall]:
        """Return the calls of a part. Raises Stop."""
        calls = bodies.calls(text, begin, end)
        if len(calls) > 1 and calls[1].form == "object" and not self.several:
            raise Stop("a turn has one action", calls[1].position)
        return calls

    def _meaning(self, call: WrittenCall, screen: Extent) -> tuple[Action, ...]:
        """Return what a call means. Raises Stop."""
        if call.name:
            return self._by_name(call, call.name, dict(call.arguments), screen)
        value = dict(call.arguments)
        inner_calls = self._inside(value)
        if inner_calls:
            meanings = [
                self._meaning(dataclasses.replace(call, arguments=inner), screen)
                for inner in inner_calls[:MAX_LISTED_CALLS]
            ]
            return tuple(action for meaning in meanings for action in meaning)
        if self.written.form not in ("function", "marks"):
            return self._by_name(call, "", value, screen)
        name = value.pop("name", None)
        arguments = value.pop("arguments", {})
        if value or not isinstance(name, str) or not isinstance(arguments, dict):
            raise Stop('a call looks like {"name": ..., "arguments": {...}}', call.position)
        return self._by_name(call, name, dict(arguments), screen)

    def _inside(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the objects that an object is only wrapped around; none where it is a call."""
        for key in self.around:
            inner = value.get(key)
            if isinstance(inner, dict):
                return [inner]
            if isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
                return inner
        return []

    def _by_name(
        self, call: WrittenCall, name: str, arguments: dict[str, Any], screen: Extent
    ) -> tuple[Action, ...]:
        """Return what the call of a name, or of a function, means. Raises Stop.

        An argument of a function, or of an object without a name, names the call.
        """
        function = ""
        is_function = any(rules.function == name for rules in self.rules)
        if not name or is_function:
            function = name
            keys = [key for key in self.name_keys if isinstance(arguments.get(key), str)]
            if not keys:
                expected = " or ".join(self.name_keys)
                raise Stop(f"the call needs {expected}, the name of an action", call.position)
            name = arguments.pop(keys[0])
        rules_of_function = [
            rule for rules in self.rules if rules.function == function for rule in rules.calls
        ]
        candidates = [rule for rule in rules_of_function if rule.call == name]
        if not candidates:
            names = list(dict.fromkeys(rule.call for rule in rules_of_function))
            shown = ", ".join(names[:MAX_LISTED_NAMES])
            raise Stop(
                f"unknown action {name[:QUOTED_CHARACTERS]!r}; the actions are {shown}",
                call.position,
            )
        return self._by_rule(candidates, call, arguments, screen)

    def _by_rule(
        self,
        candidates: Sequence[Rule],
        call: WrittenCall,
        arguments: dict[str, Any],
        screen: Extent,
    ) -> tuple[Action, ...]:
        """Return what the first rule makes of the call whose arguments fit. Raises Stop."""
        refusals: list[tuple[int, str]] = []
        for rule in candidates:
            given = _named(rule, arguments, call.form == "marks")
            if not rule.fits(given):
                continue
            if rule.act == "Unsupported":
                values = tuple(
                    (key, str(value)) for key, value in given.items() if _is_short(value)
                )
                return (Unsupported(rule.call, values),)
            refusal = rule.refusal(given, self.ignored)
            if refusal is None:
                has_texts = self.written.points == "text" or call.form == "line"
                reader = ArgumentReader(call, screen, has_texts, named_keys(self.keys))
                return reader.actions(rule, given)
            refusals.append((len(given.keys() & {*rule.arguments}), refusal))
        if not refusals:
            wanted = " or ".join(
                f"{name}={value!r}" for rule in candidates for name, value in rule.when.items()
            )
            raise Stop(f"{candidates[0].call} needs {wanted}", call.position)
        # The rule that has most of the arguments is the one that was meant.
        _, refusal = max(refusals, key=lambda one: one[0])
        raise Stop(refusal, call.position)

    def _calls_of(
        self, actions: Sequence[Action], writer: ActionWriter
    ) -> list[tuple[Rules, Rule, WrittenCall]]:
        """Return the calls that write actions. Raises ValueError."""
        calls: list[tuple[Rules, Rule, WrittenCall]] = []
        remaining = list(actions)
        while remaining:
            action = remaining.pop(0)
            call = None
            if _is_plain_click(action) and remaining and isinstance(remaining[0], Type):
                # Some languages have one call for a click on a field and a text.
                call = self._first_call(remaining[0], writer, focus=action.at)
                if call is not None:
                    remaining.pop(0)
            call = call or self._first_call(action, writer)
            if call is not None:
                calls.append(call)
                continue
            parts = _divided(action)
            if parts == (action,):
                raise ValueError(f"{self.family} has no words for {action}")
            remaining = [*parts, *remaining]
        return calls

    def _first_call(
        self, action: Action, writer: ActionWriter, focus: Any = None
    ) -> tuple[Rules, Rule, WrittenCall] | None:
        """Return the call by the first rule that has words for an action."""
        has_functions = any(rules.function for rules in self.rules)
        for rules in self.rules:
            if has_functions and not rules.function:
                # They are read only: models write them where they have no functions.
                continue
            for rule in rules.calls:
                call = writer.call(rule, action, focus)
                if call is not None:
                    return rules, rule, call
        return None

    def _call_text(self, rules: Rules, rule: Rule, call: WrittenCall) -> str:
        written = self.written
        arguments = dict(call.arguments)
        if written.form == "python":
            return bodies.as_python(call.name, arguments)
        if written.form == "line":
            return bodies.as_line(call.name, arguments)
        name = rules.function or call.name
        if rules.function or written.form == "object":
            key = self.name_keys[-1 if rule.bare else 0]
            arguments = {key: call.name, **arguments}
        if written.form == "marks":
            return bodies.as_marks(name, arguments)
        if written.form == "function":
            return bodies.as_json({"name": name, "arguments": arguments})
        if written.wrap and not rule.bare:
            arguments = {**written.wrap, written.inside: arguments}
        return bodies.as_json(arguments)


def _named(rule: Rule, arguments: dict[str, Any], has_texts: bool) -> dict[str, Any]:
    """Return the arguments by name: those without one get the rule's names in turn."""
    unnamed = [value for name, value in arguments.items() if name.isdigit()]
    results = {name: value for name, value in arguments.items() if not name.isdigit()}
    names = rule.arguments
    if unnamed and "keys" in rule.fields and all(isinstance(value, str) for value in unnamed):
        unnamed = [unnamed]
    for number, value in enumerate(unnamed):
        results[names[number] if number < len(names) else str(number)] = value
    if has_texts:
        texts = {spec.strip("?#") for field, spec in rule.fields.items() if field in _TEXT_FIELDS}
        for name, value in results.items():
            results[name] = value if name in texts or name in rule.when else _value(value)
    return results


def _is_plain_click(action: Action) -> TypeGuard[Click]:
    """Return whether an action is one click of the left button at a place."""
    return isinstance(action, Click) and action.at is not None and action == Click(action.at)


def _divided(action: Action) -> tuple[Action, ...]:
    """Return two actions that together do the same, or the action itself."""
    match action:
        case Drag(Point() as start, end, (), keys):
            return Hover(start), Drag(None, end, keys=keys)
        case Scroll(_, Point() as at):
            return Hover(at), dataclasses.replace(action, at=None)
        case Finish(answer, success) if answer:
            return Answer(answer), Finish(success=success)
    return (action,)


_TEXT_FIELDS = ("text", "answer", "reason", "name", "url", "value")
_MAX_VALUE_CHARACTERS = 1000


def _value(text: str) -> Any:
    """Return the JSON that a text is, or the text."""
    if len(text) > _MAX_VALUE_CHARACTERS:
        return text
    try:
        return bodies.JSON.decode(text)
    except (ValueError, RecursionError):
        return text


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float) and len(str(value)) <= _MAX_VALUE_CHARACTERS


FOLDER = Path(__file__).parents[1] / "languages"


@functools.cache
def action_format(name: str) -> UiTars | Language:
    """Return a shipped language by its name, or that of a file (*.yaml).

    Raises ValueError for an unknown one, OSError for a file that cannot be read.
    """
    content = _content(name)
    return Language.model_validate(content) if "rules" in content else UiTars(**content)


def spoken_format(choice: LanguageChoice) -> ActionFormat:
    """Return the language of a setting. Raises as ``action_format``, and ConfigError."""
    if isinstance(choice, str):
        return action_format(choice)
    built: ActionFormat = choice.build()
    return built


def _content(name: str) -> dict[str, Any]:
    """Return what a file says, with what the file that it is ``like`` says besides."""
    file = FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        file = local_path(name)
    elif name not in names():
        raise ValueError(f"{name!r} is not a language; there are {', '.join(names())}")
    content: dict[str, Any] = yaml_data(file)
    if "like" not in content:
        return content
    inherited = _content(content["like"])
    merged = {**inherited, **content}
    if "rules" in inherited:
        merged["rules"] = _merged_rules(content.get("rules", []), inherited["rules"])
    return merged


def _merged_rules(
    rules: Sequence[Mapping[str, Any]], inherited: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return a file's rules, and the inherited ones of calls for which it has none."""
    own = {(group.get("function", ""), rule["call"]) for group in rules for rule in group["calls"]}
    merged = list(rules)
    for group in inherited:
        function = group.get("function", "")
        calls = [rule for rule in group["calls"] if (function, rule["call"]) not in own]
        if calls:
            merged.append({**group, "calls": calls})
    return merged


def names() -> list[str]:
    """Return the names of the shipped languages."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
