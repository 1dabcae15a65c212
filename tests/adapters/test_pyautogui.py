"""What the published pyautogui presses for the programs that OSWorld's machine gets, seen by a
client of a real X server.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloop.envs.grammar import calls
from rayloop.envs.grammar.actions import Action, HoldKey, Hotkey, Type
from rayloop.envs.osworld.environment import code
from tests.envs.programs import needs
from tests.support.runs import ROOT, eventually

PYTHON = ROOT / ".venv-pyautogui/bin/python"
pytestmark = [
    pytest.mark.adapters,
    needs("Xvfb"),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="pyautogui is not installed here (make test-adapters installs it)",
    ),
]
LISTENER = """
import json, sys
from Xlib import X, display
screen = display.Display()
mask = X.KeyPressMask | X.KeyReleaseMask
window = screen.screen().root.create_window(0, 0, 800, 600, 0, screen.screen().root_depth, event_mask=mask)
window.map()
screen.sync()
window.set_input_focus(X.RevertToParent, X.CurrentTime)
screen.sync()
print("ready", flush=True)
while True:
    event = screen.next_event()
    if event.type in (X.KeyPress, X.KeyRelease):
        shifted = bool(event.state & X.ShiftMask)
        keysym = screen.keycode_to_keysym(event.detail, int(shifted)) or screen.keycode_to_keysym(event.detail, 0)
        print(json.dumps([event.type == X.KeyPress, keysym, bool(event.state & X.ControlMask)]), flush=True)
"""
"""Prints each key: whether it went down, its keysym with Shift applied, and whether Control was
held.
"""
MODIFIERS = range(0xFFE1, 0xFFEF)
"""Keysyms of Shift, Control, Alt and the like."""
CONTROLS = {0xFF0D: "\n", 0xFF09: "\t"}


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of programs that use an X server of this module."""
    folder = tmp_path_factory.mktemp("x")
    (folder / "none").touch()
    shown, number = os.pipe()
    command = ["Xvfb", "-displayfd", str(number), "-screen", "0", "800x600x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[number], stderr=subprocess.DEVNULL)
    os.close(number)
    with os.fdopen(shown) as file:
        display = file.readline().strip()
    yield {**os.environ, "DISPLAY": f":{display}", "XAUTHORITY": str(folder / "none")}
    server.terminate()
    server.wait(10)


def pressed(screen: dict[str, str], *actions: Action) -> list[tuple[bool, int, bool]]:
    """The keys that arrive while the actions are carried out, and then a Pause that ends them."""
    programs = [code(action) for action in actions]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "keys"
        with open(log, "wb") as file:
            listener = subprocess.Popen([PYTHON, "-c", LISTENER], env=screen, stdout=file)
        eventually(
            lambda: "ready\n" in log.read_text(encoding="utf-8"), "the window has the keyboard", 60
        )
        program = "\n".join(
            ["import pyautogui", "pyautogui.PAUSE = 0", *programs, "pyautogui.press('pause')"]
        )
        subprocess.run([PYTHON, "-c", program], env=screen, check=True, timeout=120)
        eventually(
            lambda: str(0xFF13) in log.read_text(encoding="utf-8"), "the last key arrived", 60
        )
        listener.kill()
        listener.wait(10)
        lines = (
            log.read_text(encoding="utf-8").partition("ready\n")[2].splitlines()
        )  # Xlib warns before
    keys = [(down, keysym, control) for down, keysym, control in map(json.loads, lines)]
    return [key for key in keys if key[1] != 0xFF13]


def text_of(keys: list[tuple[bool, int, bool]]) -> str:
    """The characters that a field would show."""
    down = [keysym for is_down, keysym, _ in keys if is_down and keysym not in MODIFIERS]
    return "".join(CONTROLS.get(keysym, chr(keysym)) for keysym in down)


@pytest.mark.parametrize(
    "text", ["".join(map(chr, range(32, 127))), "=IF(A1<5,1,0)", "<<a<", "one\n\ttwo <b>"]
)
def test_a_text_arrives_as_it_was_written(screen: dict[str, str], text: str) -> None:
    assert text_of(pressed(screen, Type(text))) == text


def test_each_character_of_a_keyboard_is_pressed_as_a_key(screen: dict[str, str]) -> None:
    written = string.ascii_lowercase + string.digits + string.punctuation
    assert text_of(pressed(screen, *[Hotkey((key,)) for key in written])) == written


def test_every_named_key_is_known(screen: dict[str, str]) -> None:
    keys = pressed(screen, *[Hotkey((key,)) for key in calls.NAMED])
    assert [down for down, _, _ in keys] == [True, False] * len(calls.NAMED), (
        "a name that pyautogui lacks presses nothing"
    )


def test_a_key_is_pressed_while_another_is_held(screen: dict[str, str]) -> None:
    held = pressed(screen, HoldKey("ctrl", True), Hotkey(("<",)), HoldKey("ctrl", False))
    assert [chr(keysym) for down, keysym, control in held if down and control and keysym < 128] == [
        "<"
    ]
    together = pressed(screen, Hotkey(("ctrl", "<")))
    assert [
        chr(keysym) for down, keysym, control in together if down and control and keysym < 128
    ] == ["<"]
    alone = pressed(screen, HoldKey("<", True), HoldKey("<", False))
    assert [(down, chr(keysym)) for down, keysym, _ in alone if keysym < 128] == [
        (True, "<"),
        (False, "<"),
    ]
