"""Android over adb, with a stand-in for adb: the commands of actions, and what is said without a
device.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.types import EndReason, ImageSource, Message, Sampling, Task
from rayloop.envs.adapters.android import Android, command
from rayloop.envs.grammar.actions import Hotkey, Hover, Mark, SelectOption, Type
from tests.support import hostile_turns
from tests.support.pictures import picture
from tests.support.played import all_scored, episode_settings

TASK = Task("t", (Message("user", ("{instruction}",)),), extra={"instruction": "Open it."})
ADB = """#!/bin/sh
printf '%s\\n' "$*" >> "$ADB_LOG"
case "$*" in *screencap*) exec cat "$ADB_SCREEN";; esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a stand-in for adb, in a file."""
    (tmp_path / "adb").write_text(ADB, encoding="utf-8")
    (tmp_path / "adb").chmod(0o755)
    (tmp_path / "screen.png").write_bytes(picture(108, 240))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ADB_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("ADB_SCREEN", str(tmp_path / "screen.png"))
    return tmp_path / "log"


def device(**options: object) -> Android:
    settings = {"serial": "emulator-5554", "language": "mobilegym", **options}
    return Android(Android.Settings.model_validate(settings))


def test_without_adb_or_a_device_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFailed, match=r"no Android device 'emulator-5554'.*install adb"):
        device().reset(TASK)
    (tmp_path / "adb").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "adb").chmod(0o755)
    with pytest.raises(EnvironmentFailed, match=r"exit status 1.*connect the device"):
        device().reset(TASK)


def test_actions_become_commands_of_the_device(log: Path) -> None:
    environment = device()
    first = environment.reset(TASK)
    assert first.messages[-1].parts[0] == "Open it."
    assert isinstance(first.messages[-1].parts[1], ImageSource)
    turns = {
        '{"action": "CLICK", "point": [500, 500]}': "input tap 540 1200",
        '{"action": "DOUBLE_TAP", "point": [500, 500]}': "input tap 540 1200; input tap 540 1200",
        '{"action": "LONGPRESS", "point": [0, 1000]}': "input swipe 0 2399 0 2399 800",
        '{"action": "SWIPE", "point1": [500, 800], "point2": [500, 300]}': (
            "input swipe 540 1920 540 720 400"
        ),
        '{"action": "TYPE", "value": "it\'s $(me)"}': "input text 'it'\"'\"'s%s$(me)'",
        '{"action": "BACK"}': "input keyevent KEYCODE_BACK",
        '{"action": "RECENT"}': "input keyevent KEYCODE_APP_SWITCH",
        '{"action": "ENTER"}': "input keyevent KEYCODE_ENTER",
        '{"action": "AWAKE", "value": "a; reboot"}': (
            "monkey -p 'a; reboot' -c android.intent.category.LAUNCHER 1"
        ),
        '{"action": "WAIT"}': "sleep 1",
    }
    for turn, expected in turns.items():
        result = environment.step(turn)
        assert result.error is None
        assert not result.done
        call, look = log.read_text(encoding="utf-8").splitlines()[-2:]
        assert call == f"-s emulator-5554 shell {expected}"
        assert look == "-s emulator-5554 exec-out screencap -p"
    assert environment.step('{"action": "COMPLETE"}').done
    assert environment.evaluate() is None


def test_what_adb_cannot_do_is_said_to_the_policy() -> None:
    for action in (SelectOption(Mark("1"), "x"), Hover(Mark("1")), Hotkey(("ctrl", "a"))):
        with pytest.raises(ValueError, match="over adb"):
            command(action)
    assert command(Type("a b")) == "input text a%sb"


def test_hostile_texts_are_scored(log: Path) -> None:
    settings = episode_settings(
        {
            "use": "rayloop.envs.adapters.android:Android",
            "with": {"serial": "x", "language": "mobilegym"},
        },
        max_turns=6,
        max_tokens=200_000,
        max_prompt_tokens=100_000,
        step_timeout=60.0,
    )
    texts = [*hostile_turns.phone_calls(), *hostile_turns.texts(10)[::5]]
    paid = all_scored(TASK, texts, settings, Sampling(max_tokens=200_000), NOTHING)
    assert {one.end for one in paid} <= {EndReason.MAX_TURNS, EndReason.DONE}


NOTHING = "tests.contracts.test_hostile:nothing"
