"""The action languages of families of GUI models, with their golden turns."""

from __future__ import annotations

from collections.abc import Iterator

from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    CallUser,
    Finish,
    GoBack,
    LongPress,
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

Golden turns of `tests/data/languages`, which names the source of each: turns, those read as what
they mean, those written and read again equal, those whose actions a web page and a desktop can
carry out. `environment.language` takes the name; `auto` takes that of the model, by its name and
`model_type`. The last column is what `environment.history: language` sets for a computer, as the
makers have it.

| language | turns | read | written | web page | desktop | history |
|---|---|---|---|---|---|---|"""
NOT_ON_A_PAGE = (OpenApp, PhoneButton)
NOT_ON_A_DESKTOP = (OpenApp, PhoneButton, LongPress, GoBack, OpenUrl, SelectOption)


def section() -> Iterator[str]:
    """The section of the page."""
    yield HEADER
    for family in FAMILIES:
        counts = map(str, counted(family))
        yield f"| `{family}` | {' | '.join(counts)} | {history(family)} |"


def history(family: str) -> str:
    """What ``environment.history: language`` sets."""
    chosen = action_format(family).history("computer")
    settings = ", ".join(f"{name}: {value!r}" for name, value in chosen.items())
    return f"`{{{settings}}}`" if settings else "`full`"


def counted(family: str) -> tuple[int, int, int, int, int]:
    """Golden turns, and those read, written, and carried out by a page and by a desktop."""
    turns = golden_turns(family)
    return (
        len(turns),
        sum(map(is_read, turns)),
        sum(map(is_written, turns)),
        sum(does_all(turn, NOT_ON_A_PAGE) for turn in turns),
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
    if not is_read(turn):
        return False
    unit = screen(turn.family)
    basic = BasicActions(unit.columns, unit.rows, Point(0, 0))
    for action in turn.actions:
        if isinstance(action, Finish | CallUser):
            continue
        try:
            parts = basic.of(action)
        except ValueError:
            return False
        if any(isinstance(part, lacking) for part in parts):
            return False
        has_button = getattr(action, "button", "left") not in ("back", "forward")
        if lacking is NOT_ON_A_PAGE and not has_button:
            return False
    return True
