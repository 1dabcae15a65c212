"""The report in a real Chromium: strips of episodes in live pages, marks where they were clicked,
nothing from elsewhere.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.core.types import Message, Task
from rayloop.run.folder import RunFolder
from rayloop.view.page import write_page
from tests.envs.pages import write
from tests.envs.programs import needs
from tests.support.episodes import recorded
from tests.unit.view.test_filmstrip import hostile as hostile
from tests.unit.view.test_trajectory_page import CONFIG as CONFIG
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

pytest.importorskip("playwright", reason="make test-env installs playwright")

from playwright import sync_api

from rayloop.envs.browser.web import WebPage

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]

PAINT = """<div style="width:100vw;height:100vh" onclick="const p = document.createElement('p');
    p.style = `position:fixed;margin:0;width:9px;height:9px;background:black;
      left:${event.clientX - 4}px;top:${event.clientY - 4}px`;
    document.body.append(p); if (document.querySelectorAll('p').length > 2) window.done = true"></div>"""
WIDE, HIGH = 224, 168
CLICKS = ((40, 30), (180, 120), (100, 100))


@contextmanager
def shown(file: Path, *, scripts: bool = True, dark: bool = False) -> Iterator[Any]:
    """The page in a browser; afterwards nothing was said on its console, and nothing was asked for
    elsewhere.
    """
    said: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        page = browser.new_page(
            java_script_enabled=scripts,
            viewport={"width": 1400, "height": 900},
            color_scheme="dark" if dark else "light",
        )
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        yield page
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", file.as_uri()))] == []


def check_clicks(page: Any, cells: Any) -> tuple[Image.Image, float]:
    """Marks lie where the page was clicked, and the second picture, which is returned with its
    scale, has what the first click painted.
    """
    page.wait_for_load_state("networkidle")
    for turn, (x, y) in enumerate(CLICKS):
        picture = cells.nth(turn).locator("svg.picture")
        box, mark = picture.bounding_box(), picture.locator("circle.dot").bounding_box()
        scale = box["width"] / WIDE
        found = (
            (mark["x"] + mark["width"] / 2 - box["x"]) / scale,
            (mark["y"] + mark["height"] / 2 - box["y"]) / scale,
        )
        assert found == pytest.approx((x + 0.5, y + 0.5), abs=1.5)
    later = cells.nth(1).locator("svg.picture")
    scale = later.bounding_box()["width"] / WIDE
    pixels = Image.open(io.BytesIO(later.screenshot())).convert("RGB")
    assert pixels.height == pytest.approx(HIGH * scale, abs=3)
    x, y = CLICKS[0]
    assert max(pixels.getpixel((round(x * scale), round(y * scale)))) < 60, (
        "what the first click painted"
    )
    assert min(pixels.getpixel((round((x + 30) * scale), round(y * scale)))) > 240
    return pixels, scale


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two members: one clicks three times, the other clicks elsewhere in its second turn."""
    root = tmp_path_factory.mktemp("painted")
    pages = write(root / "pages", paint=PAINT)
    settings = {
        "folder": str(pages),
        "width": WIDE,
        "height": HIGH,
        "pointing": {"coordinates": "relative"},
    }
    extra = {
        "url": "paint.html",
        "check": "window.done === true",
        "instruction": "Click three times.",
    }
    task = Task("paint", (Message("user", ("{instruction}",)),), extra=extra)

    def click(x: int, y: int) -> str:
        return f"Action: click(start_box='({round(1000 * x / WIDE)},{round(1000 * y / HIGH)})')"

    both = [click(*at) for at in CLICKS], [click(*CLICKS[0]), click(60, 140), click(10, 10)]
    return recorded(
        root,
        "painted",
        lambda: WebPage(WebPage.Settings.model_validate(settings)),
        task,
        both,
        **settings,
    )


def test_clicks_are_drawn_where_the_page_was_clicked(painted: RunFolder) -> None:
    file = write_page(painted.path, None, groups=10)
    with shown(file, scripts=False) as page:
        cells = page.locator("tr.member").first.locator("td.turn")
        assert cells.count() == 3
        pixels, scale = check_clicks(page, cells)
        red, green, _blue = pixels.getpixel(
            (round((CLICKS[1][0] + 0.5) * scale), round((CLICKS[1][1] + 0.5) * scale))
        )
        assert red > 200 > green, "the mark's own colour"
        assert page.locator("th.parts").inner_text() == "turn 3: members part here"
        page.screenshot(path=painted.path / "report.png", full_page=True)


@pytest.mark.parametrize("dark", [False, True])
def test_every_strip_is_visible_in_light_and_dark_without_scripts(
    painted: RunFolder, dark: bool
) -> None:
    with shown(write_page(painted.path, None, groups=10), scripts=False, dark=dark) as page:
        for picture in page.locator(".film svg.picture").all():
            picture.scroll_into_view_if_needed()
            assert picture.is_visible()
        assert page.locator(".film svg.picture").count() == 6
        assert page.locator(".controls").is_hidden(), "it would do nothing"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 24, 28)" if dark else "rgb(251, 251, 250)"
        )


def test_many_turns_scroll_within_their_strip(painted: RunFolder) -> None:
    with shown(write_page(painted.path, None, groups=10)) as page:
        page.set_viewport_size({"width": 700, "height": 900})
        strip = page.locator(".detail .scroll").first
        assert strip.evaluate("it => it.scrollWidth > it.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
            "the page itself does not"
        )


def test_groups_of_single_answers_have_their_boxes_and_can_be_filtered(
    evaluated: RunFolder,
) -> None:
    with shown(write_page(evaluated.path, None, groups=200)) as page:
        assert page.title() == "run – rayloop run"
        assert page.locator("#list > details").count() == 5
        assert page.locator("#list rect.true").first.is_visible()
        assert page.locator("#list > details[open] rect.answered").count() == 2
        assert page.locator("#learned > details").count() == 4
        page.get_by_label("verdict").select_option("replayed")
        assert page.locator("[name=count]").inner_text() == "1 of 5 groups"
        page.get_by_label("verdict").select_option("")
        page.get_by_label("order").select_option("lowest")
        assert page.locator("#list > details").first.get_attribute("data-mean") == "0.0"


def test_hostile_texts_are_shown_as_they_are(hostile: RunFolder) -> None:
    with shown(write_page(hostile.path, None, groups=10)) as page:
        assert page.title() == "run – rayloop run"
        assert page.locator("p.missing").first.is_visible()
        assert "document.title = 'owned'" in page.locator("td.turn pre.sampled").first.inner_text()
        assert page.locator("td.turn details").first.is_visible()
        assert page.locator("td.turn details pre").first.is_hidden(), "a megabyte is folded"
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
