"""Actions that are made of simpler ones, and what no screen can do."""

from __future__ import annotations

import pytest

from rayloop.envs.browser.inputs import extra_time
from rayloop.envs.grammar.actions import (
    Action,
    Answer,
    Click,
    Drag,
    HoldKey,
    Hotkey,
    Hover,
    Mark,
    MouseButton,
    Point,
    Screenshot,
    Scroll,
    Sleep,
    Swipe,
    Type,
    Unsupported,
)
from rayloop.envs.grammar.basic import (
    MAX_NOTCHES,
    MAX_PAUSE_S,
    MAX_TYPED_CHARACTERS,
    BasicActions,
    notches,
)
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings

A, B, C = Point(10, 20), Point(30, 40), Point(50, 60)
PARTS: dict[Action, tuple[Action, ...]] = {
    Click(A): (Click(A),),
    Click(A, keys=("ctrl", "shift")): (
        HoldKey("ctrl"),
        HoldKey("shift"),
        Click(A),
        HoldKey("shift", down=False),
        HoldKey("ctrl", down=False),
    ),
    Drag(A, C, path=(B,)): (
        Hover(A),
        MouseButton(True),
        Hover(B),
        Hover(C),
        MouseButton(False),
    ),
    HoldKey("shift", seconds=2): (HoldKey("shift"), Sleep(2), HoldKey("shift", down=False)),
    HoldKey("shift"): (HoldKey("shift"),),
    Type("new", clear=True): (Hotkey(("ctrl", "a")), Type("new")),
    Type("", clear=True): (Hotkey(("ctrl", "a")), Hotkey(("delete",))),
    Type("new"): (Type("new"),),
    Sleep(): (Sleep(),),
    Sleep(1e9): (Sleep(MAX_PAUSE_S),),
    Screenshot(): (),
    Answer("42"): (),
    Swipe(Point(500, 800), Point(500, 300)): (Scroll("down", Point(500, 800), 0.5, "fraction"),),
    Swipe(Point(100, 500), Point(900, 400)): (Scroll("left", Point(100, 500), 0.8, "fraction"),),
    Swipe(direction="up"): (Scroll("down", Point(500, 500), 0.5, "fraction"),),
}


@pytest.mark.parametrize("action", PARTS, ids=str)
def test_an_action_is_made_of_basic_ones(action: Action) -> None:
    assert BasicActions(1000, 1000).of(action) == PARTS[action]


def test_what_has_no_place_happens_where_the_pointer_is() -> None:
    basic = BasicActions(1000, 1000)
    with pytest.raises(ValueError, match="give a place"):
        basic.of(Click())
    basic.of(Hover(A))
    assert basic.of(Click(times=2)) == (Click(A, times=2),)
    assert basic.of(Drag(None, B)) == (Drag(A, B),)
    assert basic.of(Click()) == (Click(B),)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Click(Mark("4")), "have no marks"),
        (Unsupported("new_tab"), "this screen has no new_tab"),
        (Swipe(), "a swipe needs a direction"),
    ],
)
def test_what_no_screen_can_do_is_said(action: Action, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BasicActions(1000, 1000).of(action)


def test_how_far_a_wheel_turns() -> None:
    assert notches(Scroll("up"), 1000, 800) == 5
    assert notches(Scroll("up", amount=3), 1000, 800) == 3
    assert notches(Scroll("up", amount=300, unit="pixels"), 1000, 800) == 3
    assert notches(Scroll("up", amount=0.5, unit="fraction"), 1000, 800) == 4
    assert notches(Scroll("left", amount=0.5, unit="fraction"), 1000, 800) == 5
    assert notches(Scroll("up", amount=5, unit="pixels"), 1000, 800) == 1
    assert notches(Scroll("up", amount=1e300), 1000, 800) == MAX_NOTCHES


ON_TOUCH_SCREENS: dict[Action, tuple[Point, Point]] = {
    Swipe(A, B): (A, B),
    Swipe(None, B): (Point(500, 500), B),
    Swipe(direction="left"): (Point(550, 500), Point(50, 500)),
    Swipe(Point(500, 100), None, "up", 0.3): (Point(500, 350), Point(500, 50)),
    Scroll("down", Point(500, 600), 0.2, "fraction"): (Point(500, 600), Point(500, 400)),
    Scroll("up", None, 2): (Point(500, 500), Point(500, 750)),
    Scroll("right", None, 200, "pixels"): (Point(500, 500), Point(300, 500)),
    Scroll("down", None, 1e300): (Point(500, 850), Point(500, 50)),
    Scroll("down", None, 0): (Point(500, 550), Point(500, 50)),
    Scroll("down", None, 1e-9): (Point(500, 500), Point(500, 450)),
}
"""An action on a touch screen of 1000x1000 -> where its finger goes down and up."""


@pytest.mark.parametrize("action", ON_TOUCH_SCREENS, ids=str)
def test_a_finger_moves_the_content_of_a_touch_screen(action: Action) -> None:
    [swipe] = BasicActions(1000, 1000, touch=True).of(action)
    assert isinstance(swipe, Swipe)
    for found, expected in zip((swipe.start, swipe.end), ON_TOUCH_SCREENS[action], strict=True):
        assert found is not None
        assert (found.x, found.y) == pytest.approx((expected.x, expected.y))


@pytest.mark.parametrize(
    ("action", "across", "down"),
    [
        (Swipe(direction="left"), -200, 0),
        (Swipe(direction="up", amount=0.25), 0, -200),
        (Scroll("right"), -200, 0),
        (Scroll("down", None, 200, "pixels"), 0, -200),
        (Scroll("right", None, 200, "pixels"), -200, 0),
        (Scroll("left", None, 0.25, "fraction"), 100, 0),
    ],
    ids=str,
)
def test_a_finger_goes_by_the_side_of_the_screen_in_its_direction(
    action: Action, across: float, down: float
) -> None:
    """On a phone of 400x800 pixels."""
    [swipe] = BasicActions(400, 800, touch=True).of(action)
    assert isinstance(swipe, Swipe)
    start, end = swipe.start, swipe.end
    assert start is not None
    assert end is not None
    assert (end.x - start.x, end.y - start.y) == pytest.approx((across, down))


@pytest.mark.parametrize(
    ("language", "meant"),
    [
        ("ui_tars", Scroll("down")),
        ("gui_owl", Scroll("down", amount=400, unit="pixels")),
        ("webgym", Scroll("down", amount=0.94, unit="fraction")),
    ],
)
def test_a_language_says_how_far_its_scroll_goes(language: str, meant: Scroll) -> None:
    screen = SquareScreen(ScreenSettings(language=language))
    assert screen.basic(Scroll("down")) == (meant,)
    assert screen.basic(Scroll("down", amount=3)) == (Scroll("down", amount=3),)


class SquareScreen(ScreenEnvironment):
    """A screen that carries out nothing."""

    def screen_size(self) -> tuple[int, int]:
        return 800, 800


def test_a_swipe_that_leads_nowhere_is_said_on_a_touch_screen() -> None:
    with pytest.raises(ValueError, match="a swipe needs a direction"):
        BasicActions(1000, 1000, touch=True).of(Swipe())


def test_a_page_waits_as_long_as_an_action_takes() -> None:
    assert extra_time(Click(A)) == 0
    assert extra_time(Sleep(2.5)) == 2.5
    assert extra_time(Type("four hundred characters" * 20)) > 20
    assert extra_time(Type("x" * 400)) == 2 * extra_time(Type("x" * 200))


def test_one_action_types_a_text_of_bounded_length() -> None:
    longest = "x" * MAX_TYPED_CHARACTERS
    screen = BasicActions(100, 100)
    assert screen.of(Type(longest)) == (Type(longest),)
    with pytest.raises(ValueError, match="at most 4000 characters, not 4001"):
        screen.of(Type(f"{longest}x"))
