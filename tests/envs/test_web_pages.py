"""Pages of a folder: every action as the page receives it, several sizes and spellings, checks,
sites, the tree.
"""

from __future__ import annotations

import asyncio
import http.server
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
    OpenUrl,
    PhoneButton,
    Point,
    Scroll,
    SelectOption,
    Swipe,
    Type,
)
from tests.envs.pages import CLICK, FORM, LISTENING, button, host, visiting, write
from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.inputs import Inputs
from rayloop.envs.browser.tab import Files
from rayloop.envs.browser.web import WebPage

RED = (255, 0, 0)
pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("pages"),
        form=FORM,
        listening=LISTENING,
        good=button("window.done = true"),
        link=button("location = 'good.html'"),
        late=button("setTimeout(() => window.done = true, 100)"),
        fields=(
            "<body style='margin:0'><input id=name value=old style='width:200px;height:40px'>"
            "<select id=size><option>Small<option>Large</select><div style='height:3000px'>"
        ),
    )


def happened(environment: WebPage) -> list[list[Any]]:
    """What the listening page wrote down since it was last asked; moves of the pointer left out."""
    assert environment._tab is not None
    asked = host(environment).run(environment._tab.evaluate("window.log.splice(0)"), 10)
    return [entry for entry in asked if entry[0] != "mousemove"]


def test_each_action_arrives(folder: Path) -> None:
    with visiting(folder, "listening.html", "0", width=224, height=224) as (environment, _):

        def does(action: str) -> list[list[Any]]:
            result = environment.step(f"Thought: now\nAction: {action}")
            assert result.error is None
            return happened(environment)

        at = [50, 60]
        down, up = ["mousedown", "", *at, 0], ["mouseup", "", *at, 0]
        click = [down, up, ["click", "", *at, 0]]
        assert does("click(start_box='(50,60)')") == click
        assert does("left_single(point='<point>50 60</point>')") == click
        assert does("left_double(start_box='<|box_start|>(50,60)<|box_end|>')") == [
            *click,
            *click,
            ["dblclick", "", *at, 0],
        ]
        assert [kind for kind, *_ in does("right_single(start_box='(50,60)')")] == [
            "mousedown",
            "contextmenu",
            "mouseup",
        ]
        assert does("drag(start_box='(50,60)', end_box='(100,110)')")[:2] == [
            down,
            ["mouseup", "", 100, 110, 0],
        ]
        assert does("long_press(start_box='(50,60)')") == click
        assert does("hover(start_box='(50,60)')") == []
        assert does("hotkey(key='ctrl c')") == [
            ["keydown", "Control", 0, 0, 0],
            ["keydown", "c", 0, 0, 0],
            ["keyup", "c", 0, 0, 0],
            ["keyup", "Control", 0, 0, 0],
        ]
        assert does("press(key='enter')") == [
            ["keydown", "Enter", 0, 0, 0],
            ["keyup", "Enter", 0, 0, 0],
        ]
        assert does("keydown(key='shift')") == [["keydown", "Shift", 0, 0, 0]]
        assert does("keyup(key='shift')") == [["keyup", "Shift", 0, 0, 0]]
        assert (
            environment.step("Action: scroll(start_box='(50,60)', direction='down')").error is None
        )
        assert environment._tab is not None
        assert host(environment).run(environment._tab.evaluate("scrollY"), 10) == 500
        assert [key for kind, key, *_ in does(r"type(content='aB ä\n')") if kind == "keydown"] == [
            "a",
            "B",
            " ",
            "Enter",
        ]
        assert does("wait()") == []


def test_actions_that_are_made_of_others_arrive(folder: Path) -> None:
    with visiting(folder, "listening.html", "0", width=224, height=224) as (environment, _):

        def does(*actions: Action) -> list[list[Any]]:
            environment._carry_out(actions)
            return happened(environment)

        at = Point(50, 60)
        assert ["click", "", 50, 60, 0] in does(Click(at))
        assert does(Click(at, "middle"))[0] == ["mousedown", "", 50, 60, 1]
        assert [kind for kind, *_ in does(Click(at, times=3))].count("click") == 3
        shifted = does(Click(at, keys=("shift",)))
        assert (shifted[0][:2], shifted[-1][:2]) == (["keydown", "Shift"], ["keyup", "Shift"])
        path = does(Drag(at, Point(100, 110), path=(Point(70, 60),)))
        assert (path[0], path[1]) == (
            ["mousedown", "", 50, 60, 0],
            ["mouseup", "", 100, 110, 0],
        )
        assert does(Drag(None, at))[0] == ["mousedown", "", 100, 110, 0]
        assert [kind for kind, *_ in does(HoldKey("a", seconds=0.1))] == ["keydown", "keyup"]
        for impossible in (Click(at, "back"), PhoneButton("recent")):
            with pytest.raises(ValueError, match="in a browser"):
                does(impossible)


def test_fields_lists_wheels_and_addresses_of_a_page(folder: Path) -> None:
    with visiting(folder, "fields.html", "0", width=308, height=224) as (environment, _):

        def after(expression: str, *actions: Action) -> Any:
            environment._carry_out(actions)
            assert environment._tab is not None
            return host(environment).run(environment._tab.evaluate(expression), 10)

        field, options = Point(50, 20), Point(220, 20)
        name = "document.getElementById('name').value"
        assert after(name, Click(field), Type("new", clear=True)) == "new"
        assert after(name, Type("", clear=True)) == ""
        size = "document.getElementById('size').value"
        assert after(size, SelectOption(options, "Large")) == "Large"
        with pytest.raises(ValueError, match="no list with 'Huge'"):
            after(size, SelectOption(options, "Huge"))
        assert after("scrollY", Scroll("down", Point(50, 150), 3)) == 300
        assert after("scrollY", Scroll("up", None, 0.5, "fraction")) == 188
        assert after("scrollY", Swipe(Point(50, 150), Point(50, 50))) == 288
        for address in ("http://elsewhere/", "none.html", "file:///etc/passwd"):
            with pytest.raises(ValueError, match="cannot be opened here"):
                after("0", OpenUrl(address))
        assert after("location.pathname", OpenUrl("pages/good.html")) == "/good.html"
        assert after("location.pathname", GoBack()) == "/fields.html"
        with pytest.raises(ValueError, match="no page to go back to"):
            after("0", GoBack())
        assert after("location.pathname") == "/fields.html"


@pytest.mark.parametrize(
    ("pointing", "said", "expected"),
    [
        ({}, "(50,60)", [50, 60]),
        ({"min_pixels": 4 * 224 * 224}, "(100,120)", [50, 60]),
        ({"max_pixels": 112 * 112}, "(25,30)", [50, 60]),
        ({"coordinates": "relative"}, "(500,250)", [112, 56]),
        ({}, "(3000,-5)", [223, 0]),
    ],
)
def test_coordinates_are_those_of_the_models_picture(
    folder: Path, pointing: dict[str, Any], said: str, expected: list[int]
) -> None:
    with visiting(folder, "listening.html", "0", pointing=pointing) as (environment, _):
        environment.step(f"Action: click(start_box='{said}')")
        assert happened(environment)[0][2:4] == expected


def test_several_actions_of_one_turn_fill_in_a_form(folder: Path) -> None:
    with visiting(folder, "form.html", "document.title === 'Ann true'") as (environment, first):
        assert first.messages[-1].parts[0] == "Go."
        turn = (
            r"click(start_box='(60,12)')"
            + "\n\ntype(content='Ann')\n\nhotkey(key='tab')\n\nhotkey(key='space')"
        )
        assert not environment.step(f"Thought: I fill it in.\nAction: {turn}").done
        assert environment.evaluate() == 0
        assert environment.step("Action: press(key='enter')").done
        assert environment.evaluate() == 1


def test_a_long_text_has_the_time_that_it_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy chooses how much it types: on a slow machine the page has not failed."""
    typing = Inputs.perform

    async def perform(self: Inputs, action: Action) -> None:
        if isinstance(action, Type):
            await asyncio.sleep(3)
        await typing(self, action)

    monkeypatch.setattr(Inputs, "perform", perform)
    check = "document.getElementById('name').value.length >= 200"
    with visiting(folder, "fields.html", check, browser={"action_timeout": 2.5}) as (
        environment,
        _,
    ):
        environment.step("Action: click(start_box='(60,20)')")
        refused = environment.step(f"Action: type(content='{'x' * 4001}')")
        assert refused.error == "one action types at most 4000 characters, not 4001"
        assert environment.step(f"Action: type(content='{'x' * 200}')").done


def test_the_tree_is_given_on_request(folder: Path) -> None:
    for observe, images, texts in (
        (["tree"], 0, 1),
        (["screenshot", "tree"], 1, 1),
        (["screenshot"], 1, 0),
    ):
        with visiting(folder, "form.html", "0", observe=observe) as (environment, first):
            for parts in (
                first.messages[-1].parts[1:],
                environment.step("Action: wait()").observation.messages[-1].parts,
            ):
                found = [part for part in parts if isinstance(part, str)]
                assert (len(parts) - len(found), len(found)) == (images, texts)
                assert all(
                    'button "Send"' in tree and "[box=" in tree and "[ref=" not in tree
                    for tree in found
                )


def test_a_page_that_leads_to_another_is_followed(folder: Path) -> None:
    with visiting(folder, "link.html") as (environment, _):
        assert not environment.step(CLICK).done
        assert environment.step(CLICK).done
        assert environment.evaluate() == 1


def test_what_a_page_does_late_is_waited_for(folder: Path) -> None:
    with visiting(folder, "late.html", settle=0.5) as (environment, _):
        assert environment.step(CLICK).done


def test_a_check_that_comes_true_ends_the_episode_unless_settings_differ(folder: Path) -> None:
    with visiting(folder, "good.html", stop=False) as (environment, _):
        assert not environment.step(CLICK).done
        assert environment.step("Action: finished(content='x')").done
        assert environment.evaluate() == 1


class Site(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/away" else 200)
        self.send_header("Location", "/second") if self.path == "/away" else None
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(button("location = 'http://localhost:1/other'").encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_site_that_is_named_is_reached_and_no_other(folder: Path, site: str) -> None:
    with visiting(
        folder, f"http://{site}/away", "location.pathname === '/never'", sites=[site]
    ) as (environment, _):
        assert environment._tab is not None
        assert (
            host(environment).run(environment._tab.evaluate("location.pathname"), 10) == "/second"
        )
        assert Site.asked[-2:] == ["/away", "/second"]
        result = environment.step(CLICK)
        assert not result.done
        assert environment._tab.refused == {"network": 1}


def test_an_icon_that_a_click_shows_is_on_the_screen_however_late_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        index=button("this.className = `late`")
        + "<style>.late { background: url(icon.png) }</style>",
    )
    Image.new("RGB", (224, 224), RED).save(tmp_path / "icon.png")
    find = Files.find

    def slowly(self: Files, url: str) -> tuple[bytes, str] | None:
        time.sleep(0.3 * url.endswith(".png"))
        return find(self, url)

    monkeypatch.setattr(Files, "find", slowly)
    with visiting(tmp_path, "index.html", settle=0.0) as (environment, _):
        assert red(environment.step(CLICK).observation) > 0.5


def test_a_page_that_asks_for_files_without_end_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "dot.txt").write_text(".")
    write(
        tmp_path,
        index=button("setInterval(() => fetch('dot.txt'), 5); this.style.background = `red`"),
    )
    with visiting(tmp_path, "index.html", settle=0.0) as (environment, _):
        assert red(environment.step(CLICK).observation) > 0.5


def red(observation: Observation | None) -> float:
    """The share of red pixels on the screen that is shown."""
    assert observation is not None
    [source] = [
        part
        for message in observation.messages
        for part in message.parts
        if isinstance(part, ImageSource)
    ]
    pixels = np.asarray(Image.open(io.BytesIO(source.data or b"")).convert("RGB"))
    return float((pixels == RED).all(axis=2).mean())


def test_a_turn_of_another_language_acts_on_the_page(folder: Path) -> None:
    shape = {"width": 224, "height": 224, "language": "qwen3_vl"}
    with visiting(folder, "listening.html", "0", **shape) as (environment, _):
        call = '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [500, 250]}}'
        step = environment.step(f"Action: Click.\n<tool_call>\n{call}\n</tool_call>")
        assert step.error is None
        assert happened(environment)[0][2:4] == [112, 56]
        refused = environment.step("Action: click(start_box='(50,60)')")
        assert refused.error
        assert "<tool_call>" in refused.error
