"""Turns of one action language, written in another one.

Points go from unit to unit without becoming pixels in between, so that a language with the same
unit has the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rayloop.core.types import Message
from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    Answer,
    CallUser,
    Drag,
    Finish,
    Hotkey,
    Hover,
    Mistake,
    Point,
    Scroll,
    Type,
)
from rayloop.envs.grammar.basic import USUAL_AMOUNTS
from rayloop.envs.grammar.family import INSTRUCTION, LanguageFile
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.grammar.screens import FRACTION_DIGITS, ScreenSettings, with_points


@dataclass(eq=False)
class Untranslatable(Exception):
    """A turn that the other language cannot have."""

    reason: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.details}"


@dataclass(frozen=True)
class Translation:
    """From the language of ``source`` to that of ``target``, each with its ``pointing``."""

    source: ScreenSettings
    target: ScreenSettings

    def prompt(self, messages: Sequence[Message], width: int, height: int) -> Sequence[Message]:
        """Return the target's prompt for the same task; one that is not the source's stays.

        Raises Untranslatable where the target has none.
        """
        source = spoken_format(self.source.language)
        target = spoken_format(self.target.language)
        if not (isinstance(source, LanguageFile) and isinstance(target, LanguageFile)):
            return messages
        unit = Extent(*self.source.pointing.size(width, height))
        texts = [_text(message) for message in messages]
        for screen in source.prompts:
            own = [_text(one) for one in source.messages(screen, unit, [INSTRUCTION], ())]
            before, _, after = own[-1].partition(INSTRUCTION)
            instruction = texts[-1].removeprefix(before).removesuffix(after)
            has_words = "".join(own) != INSTRUCTION
            if has_words and texts == [*own[:-1], before + instruction + after]:
                target_unit = Extent(*self.target.pointing.size(width, height))
                try:
                    return target.messages(screen, target_unit, [instruction], messages[-1].images)
                except ValueError as error:
                    raise Untranslatable(str(error)) from error
        return messages

    def turn(self, text: str, width: int, height: int) -> str:
        """Return a turn that was written for a screen of ``width`` x ``height`` pixels.

        It is read again, and its thought and actions are the same. Raises Untranslatable.
        """
        source = spoken_format(self.source.language)
        target = spoken_format(self.target.language)
        turn = source.read(text, Extent(*self.source.pointing.size(width, height)))
        if isinstance(turn, Mistake):
            raise Untranslatable(f"it is not written in {self.source.language}", str(turn))
        unit = Extent(*self.target.pointing.size(width, height))
        actions: list[Action] = []
        for action in joined(turn.actions):
            actions += self._sayable(self._rescaled(action, width, height), unit)
        expected = Actions(turn.thought, tuple(actions), turn.summary)
        if turn.summary and not getattr(target, "summary", ()):
            # A language without summaries has them at the end of its thoughts.
            expected = Actions(f"{turn.thought}\n{turn.summary}".strip(), tuple(actions))
        try:
            result = target.write(expected, unit)
        except ValueError as error:
            raise Untranslatable(str(error)) from error
        again = target.read(result, unit)
        if isinstance(again, Mistake) or joined(again.actions) != joined(actions):
            reason = f"{self.target.language} reads its own words as something else"
            raise Untranslatable(reason, result)
        if expected.thought not in again.thought:
            raise Untranslatable(f"{self.target.language} has no words for a thought", turn.thought)
        return result

    def _rescaled(self, action: Action, width: int, height: int) -> Action:
        """Return the action with its points in the target's unit, clamped to its screen."""
        columns, rows = self.source.pointing.size(width, height)
        target = self.target.pointing
        last_column, last_row = target.size(width, height)
        digits = FRACTION_DIGITS if target.coordinates == "fraction" else None

        def to_target(point: Point) -> Point:
            x = round(point.x * last_column / columns, digits)
            y = round(point.y * last_row / rows, digits)
            return Point(min(max(x, 0), last_column), min(max(y, 0), last_row))

        return with_points(action, to_target)

    def _sayable(self, action: Action, unit: Extent) -> tuple[Action, ...]:
        """Return the action, or others with the same effect that the target has words for."""
        target = spoken_format(self.target.language)
        for candidate in ((action,), *_equivalents(action)):
            with suppress(ValueError):
                words = target.write(Actions("", candidate), unit)
                if isinstance(target.read(words, unit), Actions):
                    return candidate
        kind = type(action).__name__
        raise Untranslatable(f"{self.target.language} has no words for {kind}", str(action))


def _text(message: Message) -> str:
    return "".join(part for part in message.parts if isinstance(part, str))


def joined(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return actions in the form that all languages share.

    A language without a drag from a place has a move and a drag from the pointer, for example:
    both become the same action here, as do a scroll without an amount and one of the usual amount.
    """
    results: list[Action] = []
    for action in actions:
        if isinstance(action, Scroll) and action.amount == USUAL_AMOUNTS[action.unit]:
            action = dataclasses.replace(action, amount=None, unit="notches")
        match results[-1:], action:
            case [Hover(Point() as start, ())], Drag(None, end, (), keys):
                results[-1] = Drag(start, end, keys=keys)
            case [Hover(Point() as at, ())], Scroll(_, None):
                results[-1] = dataclasses.replace(action, at=at)
            case [Hotkey(("ctrl", "a"))], Type(text, False) if text:
                results[-1] = Type(text, clear=True)
            case [Answer(text)], Finish("", success):
                results[-1] = Finish(text, success)
            case _:
                results.append(action)
    return tuple(results)


def _equivalents(action: Action) -> list[tuple[Action, ...]]:
    """Return other actions that have the same effect."""
    match action:
        case Type(text, True) if text:
            return [(Hotkey(("ctrl", "a")), Type(text))]
        case Scroll(_, _, None):
            return [
                (dataclasses.replace(action, amount=amount, unit=unit),)  # type: ignore[arg-type]
                for unit, amount in USUAL_AMOUNTS.items()
            ]
        case CallUser(reason):
            return [(Finish(reason, success=False),)]
        case Finish(answer, False):
            return [(CallUser(answer),)]
    return []
