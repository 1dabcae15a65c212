"""The language of a family of models: reads turns and writes them, as its file says."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml
from pydantic import Field

from rayloop.config.settings import SettingsModel
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
from rayloop.envs.grammar.rules import ActionWriter, ArgumentReader, Extent, PointStyle, Rule, Rules
from rayloop.envs.grammar.ui_tars import UiTars

MAX_LISTED_NAMES = 12
"""Names of calls that a mistake lists."""


class ActionFormat(Protocol):
    """How a policy writes its turns."""

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        """Return the turn that a text is, with points as written; else where and why it is none.

        Never raises, and takes time in proportion to the text.
        """
        ...

    def write(self, actions: Actions, screen: Extent) -> str:
        """Return the text that is read as these actions, with points in the language's unit.

        Raises ValueError for what the language has no words for.
        """
        ...


class Part(SettingsModel):
    """A part of a turn, between two marks."""

    open: str = ""
    """The mark before it, at the beginning of a line, or anywhere if it is a special token."""
    close: str = ""
    """The mark behind it; empty: the part ends at the next mark of another one."""


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


class Language(SettingsModel):
    """A language whose turns have calls; UI-TARS's is ``ui_tars.py``."""

    family: str
    model_types: tuple[str, ...] = ()
    """Values of ``model_type`` in config.json; empty: any model."""
    like: str = ""
    """The language of whose file this one has what it does not say itself, rules of calls, too."""
    thinking: tuple[Part, ...] = (Part(open="<think>", close="</think>"),)
    """What comes first and is never searched for calls."""
    thought: tuple[Part, ...] = ()
    """Where the thought is, the first that is not empty; else what stands before the summary."""
    summary: tuple[Part, ...] = ()
    other: tuple[str, ...] = ()
    """Marks of parts that are not read."""
    calls: tuple[Part, ...] = Field(min_length=1)
    """Where calls are: the first kind that a text has; the last such part, or all of them."""
    several: bool = False
    """Whether a turn may have more than one part with calls, or more than one object."""
    name_keys: tuple[str, ...] = ()
    """Keys of an object, or arguments of a function, that name the call."""
    around: tuple[str, ...] = ()
    """Keys of objects around the call, or around a list of calls."""
    ignored: tuple[str, ...] = ()
    """Arguments that mean nothing to a screen."""
    rules: tuple[Rules, ...]
    written: Written
    pointing: dict[str, Any] = {}
    """Coordinates and resize factor of the family's models, for settings that do not say them."""

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        """See ``ActionFormat``."""
        try:
            thinking, start = self._thinking(text)
            parts = self._call_parts(text, start)
            actions: list[Action] = []
            for begin, end in parts:
                parsed = bodies.calls(text, begin, end)
                if len(parsed) > 1 and not self.several and parsed[1].form == "object":
                    raise Stop("a turn has one action", parsed[1].position)
                for call in parsed:
                    actions += self._meant(call, screen)
            if not actions:
                raise Stop("no action was found", len(text))
        except Stop as stop:
            quotation = text[stop.position : stop.position + QUOTED_CHARACTERS]
            return Mistake(stop.reason, stop.position, quotation)
        before = text[start : parts[0][0]]
        prose = before + "\n" + text[parts[-1][1] :]
        summary, _ = self._section(prose, self.summary)
        thought, _ = self._section(prose, self.thought)
        if not thought:
            thought = self._unmarked(before) or thinking
        return Actions(thought, tuple(actions), summary)

    def write(self, actions: Actions, screen: Extent) -> str:
        """See ``ActionFormat``."""
        written = self.written
        writer = ActionWriter(written.points)
        texts = [self._call_text(*call) for call in self._calls(actions.actions, writer)]
        is_python = written.form == "python"
        if len(texts) > 1 and not (self.several or is_python):
            raise ValueError(f"{self.family} writes one action in a turn, not {len(texts)}")
        blocks = ["\n".join(texts)] if is_python else texts
        lines = [written.calls.replace("{}", block) for block in blocks]
        thought = written.thought.replace("{}", actions.thought) if actions.thought else ""
        summary = written.summary.replace("{}", actions.summary) if actions.summary else ""
        return thought + summary + "\n".join(lines)

    def _thinking(self, text: str) -> tuple[str, int]:
        """Return what is thought first, and where the rest begins. Raises Stop."""
        start = len(text) - len(text.lstrip())
        for part in self.thinking:
            if not text.startswith(part.open, start):
                continue
            begin = start + len(part.open)
            end = text.find(part.close, begin)
            if end < 0:
                raise Stop(f"{part.open} is never closed with {part.close}", len(text))
            return text[begin:end].strip(), end + len(part.close)
        return "", 0

    def _call_parts(self, text: str, start: int) -> list[tuple[int, int]]:
        """Return where the calls begin and end. Raises Stop."""
        for part in self.calls:
            if not part.open:
                return [(start, len(text))]
            begins = [match.end() for match in _pattern((part.open,)).finditer(text, start)]
            if part.open == "{":
                begins = [begin - 1 for begin in begins[:1]]
            if begins:
                chosen = begins if self.several else begins[-1:]
                return [(begin, self._end(text, begin, part)) for begin in chosen]
        expected = " or ".join(repr(part.open) for part in self.calls)
        raise Stop(f"no line begins with {expected}", len(text))

    def _end(self, text: str, begin: int, part: Part) -> int:
        if not part.close:
            mark = _pattern(self._marks()).search(text, begin) if self._marks() else None
            return mark.start() if mark else len(text)
        find = text.find if self.several else text.rfind
        end = find(part.close, begin)
        if end < 0 and text[begin:].strip().endswith(("}", "</function>")):
            # An engine may leave out the stop word.
            return len(text)
        if end < 0:
            raise Stop(f"{part.open} is never closed with {part.close}", len(text))
        return end

    def _marks(self) -> tuple[str, ...]:
        return (*(part.open for part in (*self.thought, *self.summary)), *self.other)

    def _section(self, prose: str, parts: Sequence[Part]) -> tuple[str, int]:
        """Return the first part that is not empty, and where its mark stands; "" and -1 if none."""
        for part in parts:
            mark = _pattern((part.open,)).search(prose)
            if mark is None:
                continue
            end = prose.find(part.close, mark.end()) if part.close else -1
            if not part.close:
                following = _pattern(self._everything()).search(prose, mark.end())
                end = following.start() if following else -1
            section = prose[mark.end() : end if end >= 0 else len(prose)].strip()
            if section:
                return section, mark.start()
        return "", -1

    def _everything(self) -> tuple[str, ...]:
        opens = (part.open for part in self.calls if part.open)
        return (*self._marks(), *opens)

    def _unmarked(self, before: str) -> str:
        """Return what stands before all marks."""
        marks = self._everything()
        mark = _pattern(marks).search(before) if marks else None
        return before[: mark.start() if mark else len(before)].strip()

    def _meant(self, call: WrittenCall, screen: Extent) -> tuple[Action, ...]:
        """Return what a call means. Raises Stop."""
        if call.name:
            return self._by_name(call, dict(call.arguments), screen)
        value = dict(call.arguments)
        for key in self.around:
            inner = value.get(key)
            if isinstance(inner, dict):
                return self._meant(WrittenCall("", inner, call.position), screen)
            if isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
                parts = [
                    self._meant(WrittenCall("", one, call.position), screen) for one in inner[:100]
                ]
                return tuple(action for part in parts for action in part)
        if self.written.form in ("function", "marks"):
            name, arguments = value.pop("name", None), value.pop("arguments", {})
            if value or not isinstance(name, str) or not isinstance(arguments, dict):
                raise Stop('a call looks like {"name": ..., "arguments": {...}}', call.position)
            return self._by_name(WrittenCall(name, {}, call.position), dict(arguments), screen)
        return self._by_name(WrittenCall("", {}, call.position), value, screen)

    def _by_name(
        self, call: WrittenCall, arguments: dict[str, Any], screen: Extent
    ) -> tuple[Action, ...]:
        """Return what the call of a name, or of a function, means. Raises Stop."""
        name = call.name
        function = ""
        if any(rules.function == name for rules in self.rules if name) or not name:
            function = name
            keys = [key for key in self.name_keys if isinstance(arguments.get(key), str)]
            if not keys:
                expected = " or ".join(self.name_keys)
                raise Stop(f"the call needs {expected}, the name of an action", call.position)
            name = arguments.pop(keys[0])
        candidates: list[Rule] = []
        names: list[str] = []
        for rules in self.rules:
            if rules.function == function:
                candidates += [rule for rule in rules.calls if rule.call == name]
                names += [rule.call for rule in rules.calls if rule.call not in names]
        if not candidates:
            shown = ", ".join(names[:MAX_LISTED_NAMES])
            raise Stop(
                f"there is no action {name[:QUOTED_CHARACTERS]!r}; there are {shown}", call.position
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
                reader = ArgumentReader(call, screen, has_texts)
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

    def _calls(
        self, actions: Sequence[Action], writer: ActionWriter
    ) -> list[tuple[Rules, Rule, WrittenCall]]:
        """Return the calls that write actions. Raises ValueError."""
        results = []
        at = 0
        while at < len(actions):
            action = actions[at]
            following = actions[at + 1] if at + 1 < len(actions) else None
            focus = action.at if isinstance(action, Click) and action == Click(action.at) else None
            found = None
            if isinstance(following, Type) and focus is not None:
                found = self._first(following, writer, focus)
                at += found is not None
            found = found or self._first(action, writer)
            if found is not None:
                results.append(found)
            elif _divided(action) == (action,):
                raise ValueError(f"{self.family} has no words for {action}")
            else:
                results += self._calls(_divided(action), writer)
            at += 1
        return results

    def _first(
        self, action: Action, writer: ActionWriter, focus: Any = None
    ) -> tuple[Rules, Rule, WrittenCall] | None:
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


@functools.cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of the marks.

    A special token counts anywhere, another mark only at the beginning of a line.
    """
    anywhere = [re.escape(mark) for mark in marks if mark.startswith(("<|", "</"))]
    at_line = [re.escape(mark) for mark in marks if not mark.startswith(("<|", "</"))]
    choices = [*anywhere]
    if at_line:
        choices.append(rf"(?:^|(?<=</think>)|(?<=</THINK>))[ \t]*(?:{'|'.join(at_line)})")
    return re.compile("|".join(choices), re.MULTILINE)


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
def language(name: str) -> Language:
    """Return the shipped language of that name. Raises ValueError for an unknown one."""
    if name not in names():
        raise ValueError(f"there is no language {name!r}; there are {', '.join(names())}")
    return Language.model_validate(_content(name))


def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if "like" in content:
        inherited = _content(content["like"])
        own = {
            (rules.get("function", ""), rule["call"])
            for rules in content["rules"]
            for rule in rules["calls"]
        }
        rules = list(content["rules"])
        for group in inherited["rules"]:
            function = group.get("function", "")
            calls = [rule for rule in group["calls"] if (function, rule["call"]) not in own]
            rules.append({**group, "calls": calls})
        content = {**inherited, **content, "rules": rules}
    return content


def action_format(name: str) -> ActionFormat:
    """Return UI-TARS's format, or a shipped language. Raises ValueError for an unknown one."""
    return UiTars() if name == UiTars.family else language(name)


def names() -> list[str]:
    """Return the names of the shipped languages."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
