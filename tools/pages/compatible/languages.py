"""The action languages of families of GUI models, with their golden turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    CallUser,
    Finish,
    GoBack,
    LongPress,
    Mark,
    OpenApp,
    OpenUrl,
    PhoneButton,
    Point,
    SelectOption,
)
from rayloop.envs.grammar.basic import BasicActions
from rayloop.envs.grammar.language import action_format
from tools.pages.compatible.golden_turns import FAMILIES, GoldenTurn, golden_turns, screen

HEADER = """## Action languages of GUI models

Golden turns of `tests/data/languages`, which names the source of each. *turns*: all; *read*: read
as what they mean; *written*: equal when written and read again; then the turns that a web page, a
phone and a desktop carry out. Numbers of elements need `observe: [screenshot, elements]`. *prompt*:
screens for which the language has one. `environment.language` takes the name; `auto` takes the
model's language, by its name and `model_type`. *history*: what `environment.history: language` sets
for a computer, as the makers define it.

| language | prompt | turns | read | written | web page | phone | desktop | history |
|---|---|---|---|---|---|---|---|---|"""
OVERVIEW_HEADER = """| language | prompt | read | written | browser | desktop | phone |
|---|---|---|---|---|---|---|"""
PROMPTED_SCREENS = ("computer", "phone")
NOT_ON_A_PAGE: tuple[type[Action], ...] = (OpenApp, PhoneButton)
NOT_ON_A_PHONE: tuple[type[Action], ...] = ()
NOT_ON_A_DESKTOP = (OpenApp, PhoneButton, LongPress, GoBack, OpenUrl, SelectOption)


def section() -> Iterator[str]:
    """The section of the page."""
    yield HEADER
    for family in FAMILIES:
        counts = map(str, counted(family))
        yield f"| `{family}` | {prompts(family)} | {' | '.join(counts)} | {history(family)} |"


def overview() -> Iterator[str]:
    """README's table: of each language's turns all (✓), or how many."""
    yield OVERVIEW_HEADER
    for family in FAMILIES:
        turns, read, written, page, phone, desktop = counted(family)
        columns = (read, written, page, desktop, phone)
        shares = ("✓" if count == turns else f"{count}/{turns}" for count in columns)
        screens = prompts(family)
        prompt = "✓" if screens == ", ".join(PROMPTED_SCREENS) else screens
        yield f"| `{family}` | {prompt} | {' | '.join(shares)} |"


def prompts(family: str) -> str:
    """Kinds of screens for which the language has a prompt."""
    language = action_format(family)
    return ", ".join(screen for screen in PROMPTED_SCREENS if screen in language.prompts) or "–"


def history(family: str) -> str:
    """What ``environment.history: language`` sets."""
    chosen = action_format(family).history("computer")
    settings = ", ".join(f"{name}: {value!r}" for name, value in chosen.items())
    return f"`{{{settings}}}`" if settings else "`full`"


def counted(family: str) -> tuple[int, int, int, int, int, int]:
    """Golden turns, and those read, written, and carried out by a page, a phone and a desktop."""
    turns = golden_turns(family)
    return (
        len(turns),
        sum(map(is_read, turns)),
        sum(map(is_written, turns)),
        sum(does_all(turn, NOT_ON_A_PAGE) for turn in turns),
        sum(does_all(turn, NOT_ON_A_PHONE) for turn in turns),
        sum(does_all(turn, NOT_ON_A_DESKTOP) for turn in turns),
    )


def is_read(turn: GoldenTurn) -> bool:
    found = action_format(turn.family).read(turn.text, screen(turn.family))
    return isinstance(found, Actions) and found.actions == turn.actions


def is_written(turn: GoldenTurn) -> bool:
    language = action_format(turn.family)
    found = language.read(turn.text, screen(turn.family))
    if not isinstance(found, Actions):
        return False
    try:
        text = language.write(found, screen(turn.family))
    except ValueError:
        return False
    return language.read(text, screen(turn.family)) == found


def does_all(turn: GoldenTurn, lacking: tuple[type[Action], ...]) -> bool:
    """Whether a screen without some kinds of actions carries out a turn that is read."""
    return is_read(turn) and first_lacking(turn, lacking) is None


def first_lacking(turn: GoldenTurn, lacking: tuple[type[Action], ...]) -> int | None:
    """The place in the turn of the first action that a screen without some kinds lacks."""
    unit = screen(turn.family)
    basic = BasicActions(unit.columns, unit.rows, Point(0, 0), touch=lacking is NOT_ON_A_PHONE)
    for number, action in enumerate(turn.actions):
        if not does(action, basic, lacking):
            return number
    return None


def does(action: Action, basic: BasicActions, lacking: tuple[type[Action], ...]) -> bool:
    """Whether a screen without some kinds of actions carries out an action."""
    if isinstance(action, Finish | CallUser):
        return True
    try:
        parts = basic.of(action if lacking is NOT_ON_A_DESKTOP else placed(action))
    except ValueError:
        return False
    if any(isinstance(part, lacking) for part in parts):
        return False
    button = getattr(action, "button", "left")
    if lacking is NOT_ON_A_PAGE:
        return button not in ("back", "forward")
    if lacking is NOT_ON_A_PHONE:
        # A page may have these buttons, and the shipped phone does not.
        return button == "left" and action not in (PhoneButton("menu"), PhoneButton("recent"))
    return True


def placed(action: Action) -> Any:
    """The action at the place of its element, where a page shows the numbers of elements."""
    place = getattr(action, "at", None)
    has_number = isinstance(place, Mark) and place.name.isdecimal()
    changed: Any = action
    return dataclasses.replace(changed, at=Point(0, 0)) if has_number else action
