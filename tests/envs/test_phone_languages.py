"""Golden turns of the phone's languages in a real Chromium: what each does on the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.grammar import basic
from rayloop.envs.grammar.actions import (
    Action,
    Answer,
    CallUser,
    Click,
    Drag,
    Finish,
    GoBack,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    Mark,
    MouseButton,
    OpenApp,
    OpenUrl,
    PhoneButton,
    Point,
    Screenshot,
    Scroll,
    SelectOption,
    Sleep,
    Swipe,
    Type,
)
from tests.envs.golden_effects import OPPOSITE, preparing, released
from tests.envs.pages import host, visiting, write
from tests.envs.programs import needs
from tools.pages.compatible.golden_turns import FAMILIES, GoldenTurn, golden_turns
from tools.pages.compatible.languages import NOT_ON_A_PHONE, does_all

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser import inputs
from rayloop.envs.browser.web import WebPage

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap"), pytest.mark.timeout(300)]

VIEW = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1,minimum-scale=1'>"
BUTTONS = "".join(f"<button>Button {number}</button>" for number in range(14))
PAGE = f"""{VIEW}<style>button {{ display: block; height: 40px }}</style>
    <div style="width:1500px;height:5000px"><div style="position:fixed">{BUTTONS}</div></div>
    <form onsubmit="log.push(['submit', text.value]); return false">
    <input id=text value=old style="position:fixed;bottom:0;right:0;pointer-events:none"></form><script>
    window.log = []; scrollTo(600, 1500)
    for (const kind of ["touchstart", "click", "dblclick", "contextmenu", "keydown", "keyup", "touchend",
        "input"])
    addEventListener(kind, e => log.push([kind, e.key ?? "",
        e.touches?.[0]?.clientX ?? e.clientX ?? 0, e.touches?.[0]?.clientY ?? e.clientY ?? 0]))
    addEventListener("click", () => text.focus())
    function list(x, y, item) {{ const made = document.createElement("select"); made.id = "list"
        made.style = `position:fixed;left:${{x - 20}}px;top:${{y - 10}}px;width:40px;height:20px`
        for (const text of ["Other", item]) made.add(new Option(text)); document.body.append(made) }}
    </script>"""
SEEN = """({log: log.splice(0), x: scrollX, y: scrollY, text: document.getElementById("text").value,
    chosen: document.getElementById("list")?.value, place: location.pathname + location.hash})"""
FOCUS = "text.focus(), text.setSelectionRange(3, 3), scrollTo(600, 1500)"
APPS = (
    "Clock",
    "Settings",
    "微信",
    "Markor",
    "Chrome",
    "WeChat",
    "Contacts",
    "File Manager",
    "Cantook",
)
SCALE = 3
LEAST_PIXELS = 5
"""How far the shortest scroll moves the page, which does not follow a finger at first."""
WIDTH = 500
"""Pixels of the page: some golden turns click beyond a usual phone."""
KEYS = {"ctrl": "Control", "shift": "Shift", "enter": "Enter", "tab": "Tab", "f11": "F11"}
KEYS |= {"down": "ArrowDown", "pagedown": "PageDown"}
"""The grammar's names of keys -> those of DOM."""


def goes_out(turn: GoldenTurn) -> bool:
    """Whether it opens a page, which a browser without network refuses."""
    return any(isinstance(action, OpenUrl) for action in turn.actions)


def chooses_by_number(turn: GoldenTurn) -> bool:
    """Whether it takes an item of the list with a number, which is a button here."""
    return any(isinstance(one, SelectOption) and isinstance(one.at, Mark) for one in turn.actions)


@contextmanager
def phone(folder: Path, family: str) -> Iterator[WebPage]:
    more: dict[str, Any] = {"pointing": {"max_pixels": 1 << 30}}
    more |= {"observe": ["screenshot", "elements"], "max_actions": 8, "settle": 0.05}
    shape = {"device": "phone", "width": WIDTH, "height": None, "language": family}
    with visiting(folder, "index.html", "0", **shape, **more) as (environment, _):
        yield environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    links = " ".join(f"<a href=app.html#{name}>{name}</a>" for name in APPS)
    return write(
        tmp_path_factory.mktemp("phone"),
        index=VIEW + links + "<script>window.log = []</script><input id=text>",
        app=f"{VIEW}<script>window.log = []</script><input id=text>",
        page=PAGE,
    )


def seen(environment: WebPage) -> dict[str, Any]:
    tab = environment._tab
    assert tab is not None
    value: dict[str, Any] = host(environment).run(tab.evaluate(SEEN), 10)
    return value


def begin(environment: WebPage) -> None:
    """Show the page, with the home page behind it and the keyboard on its field."""
    tab = environment._tab
    assert tab is not None
    for page in ("index.html", "page.html"):
        host(environment).run(tab.load(f"http://pages/{page}"), 10)
    host(environment).run(tab.evaluate(FOCUS), 10)


def place(environment: WebPage, point: Point) -> tuple[float, float]:
    """Where the page's events are that a model's point stands for."""
    pixels = environment._screen.pointing.on(Click(point), *environment.screen_size())
    assert isinstance(pixels, Click)
    assert isinstance(pixels.at, Point)
    return pixels.at.x / SCALE, pixels.at.y / SCALE


def check(environment: WebPage, action: Action, after: dict[str, Any], is_alone: bool) -> None:
    """What an action did; ``is_alone``: nothing else was done."""
    kinds = [kind for kind, *_ in after["log"]]
    down, right = after["y"] - 1500, after["x"] - 600
    content_moved = {"down": down, "up": -down, "right": right, "left": -right}
    match action:
        case Click():
            check_touches(environment, action, after["log"], is_alone)
        case LongPress():
            assert "contextmenu" in kinds
            assert "click" not in kinds
        case Swipe():
            # The content follows the finger.
            assert content_moved[OPPOSITE[swiped(action)]] > LEAST_PIXELS
        case Scroll(direction):
            assert content_moved[direction] > LEAST_PIXELS
        case Drag():
            assert kinds[0] == "touchstart"
            assert down or right
        case Type() | Hotkey() | HoldKey():
            check_keys(action, after, is_alone)
        case MouseButton(is_down):
            assert ("touchstart" if is_down else "touchend") in kinds
        case SelectOption(_, value):
            assert after["chosen"] == value
        case PhoneButton("home" | "back") | GoBack():
            assert after["place"] in ("/", "/index.html")
        case OpenApp():
            assert after["place"].startswith("/app.html#")
        case Hover() | Sleep() | Screenshot() | Answer() | Finish() | CallUser():
            assert kinds == [] or not is_alone
        case _:
            raise AssertionError(f"{action} has no check here")


def swiped(swipe: Swipe) -> str:
    """The direction in which the finger goes."""
    if swipe.start is None or swipe.end is None:
        assert swipe.direction is not None
        return swipe.direction
    across, down = swipe.end.x - swipe.start.x, swipe.end.y - swipe.start.y
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "down" if down > 0 else "up"


def check_touches(environment: WebPage, click: Click, log: list[Any], is_alone: bool) -> None:
    """The page was touched there, so many times."""
    kinds = [kind for kind, *_ in log]
    touches, clicks = kinds.count("touchstart"), kinds.count("click")
    if is_alone:
        assert touches == clicks == click.times
        assert kinds.count("dblclick") == (click.times >= 2)
    assert min(touches, clicks) >= click.times
    if isinstance(click.at, Point):
        expected = pytest.approx(place(environment, click.at), abs=0.01)
        assert any(entry[2:] == expected for entry in log if entry[0] == "touchstart")


def check_keys(action: Action, after: dict[str, Any], is_alone: bool) -> None:
    """The page got the keys, and its field the text."""
    keys = [entry[:2] for entry in after["log"] if entry[0] in ("keydown", "keyup")]
    pressed = iter([key for kind, key in keys if kind == "keydown"])
    submitted = [entry[1] for entry in after["log"] if entry[0] == "submit"]
    match action:
        case Type(text, clear):
            typed = text.replace("\n", "")
            assert typed in after["text"]
            if is_alone:
                assert after["text"] == ("" if clear else "old") + typed
                assert len(submitted) == text.count("\n")
        case Hotkey(("enter",)):
            assert "Enter" in pressed
            assert submitted == ["old"] or not is_alone
        case Hotkey(names):
            assert all(KEYS.get(name, name) in pressed for name in names)
        case HoldKey(name, True, _):
            assert KEYS.get(name, name) in pressed
        case HoldKey(name):
            assert ["keyup", KEYS.get(name, name)] in keys


@pytest.fixture(autouse=True, scope="module")
def _short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic, "MAX_PAUSE_S", 0.6)
        patch.setattr(inputs, "WAIT_S", 0.3)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_turns_do_on_the_page_what_they_say(folder: Path, family: str) -> None:
    """And the table says which of them a phone carries out."""
    with phone(folder, family) as environment:
        unit = environment._screen.pointing.size(*environment.screen_size())
        for turn in golden_turns(family):
            begin(environment)
            # The numbers of the elements are those of the last screen.
            environment._carry_out(preparing(turn, *unit))
            for action in turn.actions:
                if isinstance(action, SelectOption) and isinstance(action.at, Point):
                    show_list(environment, action)
            seen(environment)
            result = environment.step(turn.text)
            if goes_out(turn) or chooses_by_number(turn):
                assert result.error, turn.text
                continue
            is_done = result.error is None
            assert is_done == does_all(turn, NOT_ON_A_PHONE), (turn.text, result.error)
            if is_done:
                check_turn(environment, turn, result)


def check_turn(environment: WebPage, turn: GoldenTurn, result: StepResult) -> None:
    """What a turn did, all of which was done."""
    after = seen(environment)
    for action in turn.actions:
        try:
            check(environment, action, after, len(turn.actions) == 1)
        except AssertionError as error:
            raise AssertionError(f"{turn.text}: {after}") from error
    ends = isinstance(turn.actions[-1], Finish | CallUser)
    assert result.done == ends, turn.text
    environment._carry_out(released(turn))


def show_list(environment: WebPage, action: SelectOption) -> None:
    """A list at a place, with the item of the action as its second one."""
    assert isinstance(action.at, Point)
    x, y = place(environment, action.at)
    tab = environment._tab
    assert tab is not None
    script = f"list({x}, {y}, {json.dumps(action.value)})"
    host(environment).run(tab.evaluate(script), 10)


def test_elements_are_numbered_lines(folder: Path) -> None:
    with phone(folder, "android_world") as environment:
        result = environment.step('{"action_type": "wait"}')
        assert result.observation is not None
        *_, text = result.observation.messages[-1].parts
        assert isinstance(text, str)
        assert text.splitlines()[:2] == ["0: a 'Clock'", "1: a 'Settings'"]
        assert environment.step('{"action_type": "click", "index": 1}').error is None
        assert seen(environment)["place"] == "/app.html#Settings"
        refused = environment.step('{"action_type": "click", "index": 77}')
        assert refused.error
        assert "give a point" in refused.error
