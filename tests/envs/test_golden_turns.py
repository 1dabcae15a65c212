"""Every golden turn of every language is carried out in a browser: the page gets the buttons, keys,
places, texts and turns of the wheel that the turn means.

It writes down what reaches it. What a browser lacks is an error that the policy sees.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.types import Message, Task
from rayloop.envs.grammar import basic
from rayloop.envs.grammar.actions import (
    Action,
    GoBack,
    Mark,
    OpenApp,
    OpenUrl,
    PhoneButton,
    Point,
    SelectOption,
    Unsupported,
)
from rayloop.envs.grammar.rules import Extent
from tests.envs.golden_effects import (
    FORMER_TEXT,
    MIDDLE,
    PAUSE_S,
    Effects,
    Screen,
    assert_seen,
    assert_written_equal,
    key_names,
    preparing,
    released,
    screen_of,
    unit,
)
from tests.envs.pages import host, write
from tests.envs.programs import needs
from tools.pages.compatible.golden_turns import FAMILIES, GoldenTurn, golden_turns
from tools.pages.compatible.languages import NOT_ON_A_PAGE, does_all

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser import inputs
from rayloop.envs.browser.tab import Files
from rayloop.envs.browser.web import HOST, WebPage

pytestmark = [
    pytest.mark.env,
    needs("chromium-headless-shell", "bwrap"),
]
PAGE = """<textarea id=field style="position:fixed;right:0;bottom:0;width:1px;height:1px;opacity:0">
</textarea><div style="height:9000px;width:9000px"></div><script>
    window.log = []; window.turned = [0, 0]; const field = document.getElementById('field');
    const named = ['left', 'middle', 'right', 'back', 'forward'];
    const put = (...event) => log.push(event);
    addEventListener('mousemove', e => put('move', e.clientX, e.clientY));
    for (const [kind, name] of [['mousedown', 'down'], ['mouseup', 'up']])
        addEventListener(kind, e => { put(name, named[e.button], e.clientX, e.clientY); e.preventDefault() });
    for (const [kind, down] of [['keydown', true], ['keyup', false]])
        addEventListener(kind, e => put('key', e.key, down));
    addEventListener('contextmenu', e => e.preventDefault());
    addEventListener('wheel', e => { turned[0] += e.deltaX; turned[1] += e.deltaY;
        put('wheel', e.clientX, e.clientY); e.preventDefault() }, {passive: false});
    function begin(old) { log.length = 0; turned[0] = turned[1] = 0; field.value = old; field.focus() }
    function seen() { return [log, turned, field.value] }
    function list(x, y, item) { const made = document.createElement('select'); made.id = 'list';
        made.style = `position:fixed;left:${x - 20}px;top:${y - 10}px;width:40px;height:20px`;
        for (const text of ['Other', item]) made.add(new Option(text)); document.body.append(made) }
</script>"""
"""A page that writes down what it gets. Its field keeps the focus."""
PAGE_LACKS = (OpenApp, PhoneButton, Unsupported)


@pytest.fixture(autouse=True, scope="module")
def _short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic, "MAX_PAUSE_S", PAUSE_S)
        patch.setattr(inputs, "WAIT_S", PAUSE_S)
        patch.setattr(inputs, "LONG_PRESS_S", PAUSE_S)
        yield


def is_refused(turn: GoldenTurn, lacking: tuple[type[Action], ...], buttons: bool) -> bool:
    """Whether a screen that lacks some kinds of actions refuses a turn.

    ``buttons``: whether it has the buttons of a mouse that go back and forward.
    """
    if "refused" in turn.others:
        return True
    for action in turn.actions:
        has_mark = isinstance(getattr(action, "at", None), Mark)
        other_button = getattr(action, "button", "left") in ("back", "forward")
        if isinstance(action, lacking) or has_mark or (other_button and not buttons):
            return True
    return False


# The browser -----------------------------------------------------------------------------------


class Visited(WebPage):
    """Also the page of a host that a golden turn opens."""

    def _files(self) -> Files:
        folder = str(self._web.folder)
        return Files({HOST: folder, "baidu.com": folder})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("golden"), listening=PAGE, index=PAGE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_browser_does_what_the_turns_mean(folder: Path, family: str) -> None:
    screen = screen_of(family)
    settings = WebPage.Settings.model_validate(
        {
            "folder": str(folder),
            "width": screen.width,
            "height": screen.height,
            "settle": 0.0,
            "language": family,
            "pointing": {"max_pixels": 4_000_000},
        }
    )
    page = Visited(settings)
    columns = {"url": "listening.html", "check": "0", "instruction": "Go."}
    try:
        page.reset(Task("t", (Message("user", ("{instruction}",)),), extra=columns))
        for turn in golden_turns(family):
            is_carried_out = in_browser(page, turn, screen)
            # The table counts elements with a number, and live sites.
            of_the_table = not ("refused" in turn.others or marks(turn) or goes_out(turn))
            if of_the_table:
                assert is_carried_out == does_all(turn, NOT_ON_A_PAGE), turn
    finally:
        page.close()


def marks(turn: GoldenTurn) -> bool:
    """Whether a place is the number of an element."""
    return any(isinstance(getattr(action, "at", None), Mark) for action in turn.actions)


def goes_out(turn: GoldenTurn) -> bool:
    """Whether it opens a page, which a browser without network refuses."""
    return any(isinstance(action, OpenUrl) for action in turn.actions)


def asked(page: WebPage, expression: str) -> Any:
    assert page._tab is not None
    return host(page).run(page._tab.evaluate(expression), 10)


def in_browser(page: WebPage, turn: GoldenTurn, screen: Screen) -> bool:
    """Carry out a turn and look at the page. Returns whether it was carried out."""
    extent = unit(turn.family, screen)
    refused = is_refused(turn, PAGE_LACKS, buttons=False)
    page._carry_out(preparing(turn, *extent))
    middle = Point(screen.width * MIDDLE, screen.height * MIDDLE)
    asked(page, f"begin('{FORMER_TEXT}')" if clears(turn) else "begin('')")
    before = asked(page, "location.href")
    chosen = [action for action in turn.actions if isinstance(action, SelectOption)]
    if chosen and not refused:
        [select] = chosen
        assert isinstance(select.at, Point)
        x, y = select.at.x * screen.width / extent[0], select.at.y * screen.height / extent[1]
        asked(page, f"list({x}, {y}, {json.dumps(select.value)})")
    opened = [action for action in turn.actions if isinstance(action, OpenUrl)]
    went_back = any(isinstance(action, GoBack) for action in turn.actions)
    if went_back:
        page._carry_out([OpenUrl("http://pages/index.html")])
    if opened and not before.startswith("http://baidu.com"):
        refused = "://" in opened[0].url
    start_time = time.monotonic()
    step = page.step(turn.text)
    seconds = time.monotonic() - start_time
    if refused:
        assert step.error, turn
        return False
    assert step.error is None, (turn, step.error)
    if opened or went_back:
        expected_host = opened[0].url if opened else "pages"
        assert asked(page, "location.host") == expected_host
        asked(page, "location.href = 'http://pages/listening.html'")
        return True
    if chosen:
        assert asked(page, "document.getElementById('list').value") == chosen[0].value
        asked(page, "document.getElementById('list').remove()")
        return True
    expected = Effects(turn, screen, middle)
    expected.events = key_names(expected.events, 0)
    log, turned, text = asked(page, "seen()")
    assert_seen(expected, [tuple(event) for event in log], text, turned)
    assert step.done == expected.ends, turn
    assert seconds >= min(expected.seconds, PAUSE_S)
    assert_written_equal(turn, Extent(*extent))
    page._carry_out(released(turn))
    return True


def clears(turn: GoldenTurn) -> bool:
    return any(getattr(action, "clear", False) for action in turn.actions)
