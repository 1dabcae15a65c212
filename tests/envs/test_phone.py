"""A phone: what a finger, the keyboard and the buttons do on a page in a real Chromium."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.core.protocols import Observation
from rayloop.core.types import ImageSource
from rayloop.envs.grammar.actions import (
    Action,
    Click,
    Drag,
    GoBack,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    MouseButton,
    OpenApp,
    PhoneButton,
    Point,
    Scroll,
    SelectOption,
    Swipe,
    Type,
)
from tests.envs.pages import host, visiting, write
from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.web import WebPage

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]

VIEW = "<meta name=viewport content='width=device-width,initial-scale=1,minimum-scale=1'>"
KINDS = "touchstart touchend mousedown click dblclick contextmenu keydown keyup wheel"
LISTENING = f"""{VIEW}<div style="width:2000px;height:5000px">content</div><script>
    window.log = []; window.moves = 0
    addEventListener("touchmove", () => moves++)
    for (const kind of "{KINDS}".split(" ")) addEventListener(kind, e => {{
        const at = e.changedTouches?.[0] ?? e
        log.push([kind, e.key ?? "", Math.round(at.clientX ?? 0), Math.round(at.clientY ?? 0)])
    }})</script>"""
HOME = f"""{VIEW}<a href=notes.html>Notes</a> <a href=listening.html aria-label=Clock>icon</a>
    <a href=fields.html>Fields</a>"""
FIELDS = f"""{VIEW}<form onsubmit="window.sent = text.value; return false">
    <input id=text value=old style="position:fixed;top:0;left:0;width:200px;height:40px"></form>
    <input id=slider type=range style="position:fixed;top:100px;left:30px;width:300px;height:40px">
    <select id=size style="position:fixed;top:200px;left:0;width:200px;height:40px">
    <option>Small<option>Large</select>"""
OWN = f"""{VIEW}<script>window.done = []; window.phone = {{
    home: () => {{ done.push("home") }}, back: () => {{ done.push("back") }},
    recent: () => {{ done.push("recent") }}, menu: () => false,
    open: name => {{ done.push(name) }}}}</script>"""
SLIDER = "document.getElementById('slider').value"
PHONE: dict[str, Any] = {"device": "phone", "width": None, "height": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("phone"),
        index=HOME,
        notes=f"{VIEW}<a href=#two>Second</a>",
        listening=LISTENING,
        fields=FIELDS,
        own=OWN,
    )


class Phone:
    """An episode on a page; points are pixels of the page, a third of the screenshot's."""

    def __init__(self, environment: WebPage) -> None:
        self.environment = environment

    def value(self, expression: str) -> Any:
        tab = self.environment._tab
        assert tab is not None
        return host(self.environment).run(tab.evaluate(expression), 10)

    def does(self, *actions: Action) -> list[list[Any]]:
        """Carry actions out; returns what the page wrote down meanwhile."""
        self.environment._carry_out(actions)
        log: list[list[Any]] = self.value("(window.log ?? []).splice(0)")
        return log


@contextmanager
def phone(folder: Path, url: str, **settings: Any) -> Iterator[Phone]:
    pointing = {"factor": 1, "max_pixels": 1 << 30}
    options = {**PHONE, "pointing": pointing, **settings}
    with visiting(folder, url, "0", **options) as (environment, _):
        yield Phone(environment)


def at(x: float, y: float) -> Point:
    return Point(3 * x, 3 * y)


def size(observation: Observation) -> tuple[int, int]:
    [source] = [part for part in observation.messages[-1].parts if isinstance(part, ImageSource)]
    return Image.open(io.BytesIO(source.data or b"")).size


def test_a_page_sees_a_phone(folder: Path) -> None:
    with visiting(folder, "index.html", "0", **PHONE) as (environment, first):
        assert size(first) == environment.screen_size() == (1080, 2400)
        shown = (
            "[devicePixelRatio, innerWidth, innerHeight, matchMedia('(pointer: coarse)').matches]"
        )
        assert Phone(environment).value(shown) == [3, 360, 800, True]
        assert "Android" in Phone(environment).value("navigator.userAgent")
        result = environment.step("Action: wait()")
        assert result.observation is not None
        assert size(result.observation) == (1080, 2400)


def test_a_finger_taps_and_presses(folder: Path) -> None:
    with phone(folder, "listening.html") as one:
        start, end = ["touchstart", "", 50, 60], ["touchend", "", 50, 60]
        tap = [start, end, ["mousedown", "", 50, 60], ["click", "", 50, 60]]
        assert one.does(Click(at(50, 60))) == tap
        assert one.does(Click(at(50, 60), times=2)) == [*tap, *tap, ["dblclick", "", 50, 60]]
        menu = [start, ["contextmenu", "", 50, 60], end]
        assert one.does(LongPress(at(50, 60))) == menu
        assert one.does(LongPress(at(50, 60), seconds=0.6)) == menu
        assert one.does(LongPress(at(50, 60), seconds=0.1)) == tap
        assert one.does(Hover(at(20, 30))) == []
        with pytest.raises(ValueError, match="no right mouse button"):
            one.does(Click(at(50, 60), "right"))


@pytest.mark.parametrize(
    ("action", "x", "y"),
    [
        (Swipe(direction="up"), 0, 400),
        (Swipe(direction="left"), 180, 0),
        (Swipe(at(180, 700), at(180, 300)), 0, 400),
        (Swipe(direction="up", amount=0.25), 0, 200),
        (Scroll("down"), 0, 400),
        (Scroll("right"), 180, 0),
        (Scroll("down", at(180, 790), 3), 0, 300),
        (Scroll("down", None, 0.25, "fraction"), 0, 200),
        (Scroll("down", None, 10_000, "pixels"), 0, 640),
        (Drag(at(180, 700), at(180, 500)), 0, 200),
        (Drag(at(180, 700), at(180, 500), path=(at(180, 600),)), 0, 200),
    ],
    ids=str,
)
def test_the_content_follows_the_finger(folder: Path, action: Action, x: int, y: int) -> None:
    with phone(folder, "listening.html") as one:
        log = one.does(action)
        assert [kind for kind, *_ in log] == ["touchstart", "touchend"]
        assert one.value("moves") > 0
        moved_x, moved_y = one.value("[scrollX, scrollY]")
        # Chromium takes the first pixels of a way as those of a tap.
        assert moved_x == pytest.approx(x, abs=20)
        assert moved_y == pytest.approx(y, abs=20)
        assert one.value("new Promise(done => setTimeout(() => done(scrollY), 300))") == moved_y


def test_content_goes_back_where_it_was(folder: Path) -> None:
    with phone(folder, "listening.html") as one:
        one.does(Scroll("down"), Scroll("right"))
        one.does(Swipe(direction="down"), Swipe(direction="right"))
        assert one.value("[scrollX, scrollY]") == [0, 0]


def test_a_finger_that_is_left_on_the_page_does_no_harm(folder: Path) -> None:
    with phone(folder, "listening.html") as one:
        one.does(MouseButton(False))
        one.does(Hover(at(50, 60)), MouseButton(True), MouseButton(True))
        kinds = [kind for kind, *_ in one.does(Click(at(150, 160)))]
        assert kinds[-2:] == ["mousedown", "click"]


def test_the_keyboard_types_and_enter_submits(folder: Path) -> None:
    with phone(folder, "fields.html") as one:
        one.does(Click(at(50, 20)), Type("new ä", clear=True))
        assert one.value("document.getElementById('text').value") == "new ä"
        assert one.value("window.sent ?? null") is None
        one.does(Hotkey(("enter",)))
        assert one.value("sent") == "new ä"
        one.does(Type(" and more\n"))
        assert one.value("sent") == "new ä and more"
        one.does(HoldKey("a", seconds=0.05), Type("\n"))
        assert one.value("sent") == "new ä and morea"


def test_a_slider_is_dragged_and_a_list_is_chosen_from(folder: Path) -> None:
    with phone(folder, "fields.html") as one:
        one.does(Drag(at(180, 120), at(330, 120)))
        assert int(one.value(SLIDER)) >= 95
        one.does(Swipe(at(325, 120), at(30, 120)))
        assert int(one.value(SLIDER)) <= 5
        one.does(SelectOption(at(100, 220), "Large"))
        assert one.value("document.getElementById('size').value") == "Large"


def test_buttons_and_apps(folder: Path) -> None:
    place = "location.pathname + location.hash"
    with phone(folder, "index.html") as one:
        one.does(PhoneButton("back"))
        assert one.value(place) == "/index.html"
        one.does(OpenApp("notes"))
        assert one.value(place) == "/notes.html"
        one.does(Click(at(20, 10)))
        assert one.value(place) == "/notes.html#two"
        one.does(PhoneButton("back"))
        assert one.value(place) == "/notes.html"
        one.does(OpenApp("Clock"))
        assert one.value(place) == "/listening.html"
        one.does(GoBack())
        assert one.value(place) == "/", "an app lies on the home page, not on the app before"
        one.does(OpenApp("Notes"), PhoneButton("home"))
        assert one.value(place) == "/"
        with pytest.raises(ValueError, match="no app 'Bank'; there are Notes, Clock, Fields"):
            one.does(OpenApp("Bank"))
        for button in ("menu", "recent"):
            with pytest.raises(ValueError, match=f"no {button} button"):
                one.does(PhoneButton(button))


def test_back_from_an_app_that_came_first_leads_home(folder: Path) -> None:
    with phone(folder, "notes.html") as one:
        one.does(PhoneButton("back"))
        assert one.value("location.pathname") == "/"


def test_a_page_may_have_buttons_of_its_own(folder: Path) -> None:
    with phone(folder, "own.html") as one:
        one.does(PhoneButton("home"), PhoneButton("back"), PhoneButton("recent"), OpenApp("Mail"))
        assert one.value("done") == ["home", "back", "recent", "Mail"]
        with pytest.raises(ValueError, match="no menu button"):
            one.does(PhoneButton("menu"))


def test_a_desktop_has_no_phone_buttons(folder: Path) -> None:
    with phone(folder, "index.html", device="desktop") as one:
        for action in (PhoneButton("home"), OpenApp("Notes")):
            with pytest.raises(ValueError, match="in a browser"):
                one.does(action)
