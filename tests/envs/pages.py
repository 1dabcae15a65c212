"""Pages that do what they should not, for the browser's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayloop.core.protocols import Observation
from rayloop.core.types import Message, Task
from rayloop.envs.browser.host import Host, host_of
from rayloop.envs.browser.web import WebPage

FORM = """<form onsubmit="document.title = name_.value + ' ' + agree.checked; return false">
    <input id=name_ autofocus><br><input id=agree type=checkbox> agree <button id=send>Send</button></form>"""
LISTENING = """<div style="width:400px;height:3000px;user-select:none">text to select</div><script>window.log = [];
    for (const kind of ['mousemove', 'mousedown', 'mouseup', 'click', 'dblclick', 'contextmenu', 'keydown', 'keyup'])
    addEventListener(kind, e => { log.push([kind, e.key || '', e.clientX || 0, e.clientY || 0, e.button || 0]);
    if (kind == 'contextmenu') e.preventDefault() })</script>"""
"""A page that writes down what is done to it."""


def write(folder: Path, **pages: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(
            f"<!doctype html><html><body style='margin:0'>{body}</body></html>", encoding="utf-8"
        )
    return folder


def button(script: str) -> str:
    """A page that is one button, with what a click on it does; ``this`` cannot hold quotes of one
    kind.
    """
    return f'<button style="width:100vw;height:100vh" onclick="{script}">Go</button>'


SETTINGS: dict[str, Any] = {"width": 224, "height": 224, "settle": 0.05}
CLICK = "Action: click(start_box='(100,100)')"


@contextmanager
def visiting(
    folder: Path, url: str, check: str = "window.done === true", **settings: Any
) -> Iterator[tuple[WebPage, Observation]]:
    """An episode on a page of the folder, and what it showed first."""
    environment = WebPage(
        WebPage.Settings.model_validate({"folder": str(folder), **SETTINGS, **settings})
    )
    task = Task(
        "t",
        (Message("user", ("{instruction}",)),),
        extra={"url": url, "check": check, "instruction": "Go."},
    )
    try:
        yield environment, environment.reset(task)
    finally:
        environment.close()


def host(environment: WebPage) -> Host:
    return host_of(environment._settings.browser)
