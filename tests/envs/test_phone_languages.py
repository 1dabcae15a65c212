"""Golden turns of the phone's languages in a real Chromium: what each does on the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.grammar.actions import (
    Action,
    Answer,
    Click,
    Drag,
    Finish,
    Hotkey,
    LongPress,
    OpenApp,
    PhoneButton,
    Point,
    Screenshot,
    Scroll,
    Sleep,
    Swipe,
    Type,
    Unsupported,
)
from tests.envs.pages import host, visiting, write
from tests.envs.programs import needs
from tools.pages.compatible.golden_turns import GoldenTurn, golden_turns

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.web import WebPage

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap"), pytest.mark.timeout(300)]

VIEW = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1,minimum-scale=1'>"
BUTTONS = "".join(f"<button>Button {number}</button>" for number in range(14))
PAGE = f"""{VIEW}<style>button {{ display: block; height: 40px }}</style>
    <div style="width:1500px;height:5000px"><div style="position:fixed">{BUTTONS}</div></div>
    <form onsubmit="log.push(['submit', text.value]); return false">
    <input id=text value=old style="position:fixed;bottom:0;right:0;pointer-events:none"></form><script>
    window.log = []; scrollTo(600, 1500)
    for (const kind of ["touchstart", "click", "dblclick", "contextmenu", "keydown", "input"])
    addEventListener(kind, e => log.push([kind, e.key ?? "",
        e.touches?.[0]?.clientX ?? e.clientX ?? 0, e.touches?.[0]?.clientY ?? e.clientY ?? 0]))
    addEventListener("click", () => text.focus())</script>"""
SEEN = """({log: log.splice(0), x: scrollX, y: scrollY, text: document.getElementById("text").value,
    place: location.pathname + location.hash})"""
FOCUS = "text.focus(), text.setSelectionRange(3, 3), scrollTo(600, 1500)"
APPS = ("Clock", "Settings", "微信", "Markor", "Chrome", "WeChat", "Contacts", "File Manager")
FAMILIES = ("android_world", "mobilegym", "qwen2_5_vl", "qwen3_vl", "gui_owl", "ui_tars")
ON_PHONES = ("press_home", "press_back", "open_app", "long_press")
"""Functions of UI-TARS's golden turns that only a phone has."""


def is_for_phones(turn: GoldenTurn) -> bool:
    if turn.family in ("android_world", "mobilegym"):
        return True
    if turn.family == "ui_tars":
        return any(f"{name}(" in turn.text for name in ON_PHONES)
    return "mobile_use" in turn.text


def turns(family: str) -> list[GoldenTurn]:
    return [
        turn
        for turn in golden_turns(family)
        if is_for_phones(turn) and "refused" not in turn.others
    ]


@contextmanager
def phone(folder: Path, family: str) -> Iterator[WebPage]:
    more: dict[str, Any] = {"pointing": {"max_pixels": 1 << 30}}
    more |= {"observe": ["screenshot", "elements"], "max_actions": 8, "settle": 0.05}
    shape = {"device": "phone", "width": None, "height": None, "language": family}
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
    pixels = environment._screen.pointing.on(Click(point), 1080, 2400)
    assert isinstance(pixels, Click)
    assert isinstance(pixels.at, Point)
    return pixels.at.x / 3, pixels.at.y / 3


def check(environment: WebPage, action: Action, after: dict[str, Any], result: StepResult) -> None:
    kinds = [kind for kind, *_ in after["log"]]
    match action:
        case Click(at, _, times):
            assert kinds.count("touchstart") == kinds.count("click") == times
            assert kinds.count("dblclick") == (times == 2)
            if isinstance(at, Point):
                found = [entry[2:] for entry in after["log"] if entry[0] == "touchstart"]
                assert found[0] == pytest.approx(place(environment, at), abs=0.01)
        case LongPress():
            assert "contextmenu" in kinds
            assert "click" not in kinds
        case Swipe(start, end, direction):
            if start is not None and end is not None:
                across, down = end.x - start.x, end.y - start.y
                ways = ("right" if across > 0 else "left", "down" if down > 0 else "up")
                direction = ways[0] if abs(across) > abs(down) else ways[1]  # type: ignore[assignment]
            moved = {"up": after["y"] - 1500, "left": after["x"] - 600}
            moved |= {"down": -moved["up"], "right": -moved["left"]}
            assert moved[str(direction)] > 20, (direction, after)
        case Scroll("down"):
            assert after["y"] > 1600
        case Drag():
            assert kinds[0] == "touchstart"
            assert after["x"] != 600
        case Type(text, clear):
            expected = text if clear else "old" + text
            assert after["text"] == expected.rstrip("\n")
            assert ("submit" in kinds) == text.endswith("\n")
        case Hotkey(("enter",)):
            assert ["submit", "old"] in after["log"]
        case PhoneButton("home" | "back"):
            assert after["place"] in ("/", "/index.html")
        case OpenApp():
            assert after["place"].startswith("/app.html#")
        case Sleep() | Screenshot() | Answer() | Finish():
            assert kinds == []
            assert result.done == isinstance(action, Finish)
        case _:
            raise AssertionError(f"{action} has no check here")


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_turns_do_on_the_page_what_they_say(folder: Path, family: str) -> None:
    kinds = set()
    with phone(folder, family) as environment:
        for turn in turns(family):
            begin(environment)
            # The numbers of the elements are those of the last screen.
            environment._carry_out(())
            result = environment.step(turn.text)
            lacking = [one for one in turn.actions if isinstance(one, Unsupported)]
            if (
                lacking
                or PhoneButton("menu") in turn.actions
                or PhoneButton("recent") in turn.actions
            ):
                assert result.error, turn.text
                continue
            assert result.error is None, (turn.text, result.error)
            after = seen(environment)
            for action in turn.actions:
                try:
                    check(environment, action, after, result)
                except AssertionError as error:
                    raise AssertionError(f"{turn.text}: {after}") from error
                kinds.add(type(action).__name__)
    print(f"\n{family}: {len(turns(family))} turns, {', '.join(sorted(kinds))}")
    assert len(turns(family)) >= 3


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
