"""MobileGym's tasks in a real Chromium: with a stand-in for its checkout, and with a checkout that
the variable MOBILEGYM names (built, with its data).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import DataFailure, EnvironmentFailed
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import Message, Task
from tests.envs.pages import host
from tests.envs.programs import needs
from tests.support import mobilegym_stand_in

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser import mobilegym
from rayloop.envs.browser.mobilegym import MobileGym

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap"), pytest.mark.timeout(300)]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    mobilegym.bench.cache_clear()
    yield mobilegym_stand_in.make(tmp_path)
    mobilegym.bench.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "bench_env"]:
        del sys.modules[name]


@contextmanager
def playing(checkout: str, name: Any, seed: Any = 1) -> Iterator[tuple[MobileGym, Observation]]:
    options = {"checkout": checkout, "language": "mobilegym", "settle": 0.5}
    environment = MobileGym(MobileGym.Settings.model_validate(options))
    prompt = (Message("user", ("{instruction}",)),)
    try:
        row = Task("t", prompt, extra={"mobilegym": name, "seed": seed})
        yield environment, environment.reset(row)
    finally:
        environment.close()


def does(environment: MobileGym, name: str, **arguments: Any) -> StepResult:
    result = environment.step(json.dumps({"action": name, **arguments}))
    assert result.error is None, result.error
    return result


def app(environment: MobileGym) -> str:
    tab = environment._tab
    assert tab is not None
    return str(host(environment).run(tab.evaluate("__OS__.getAppRoute().app"), 10))


def test_the_judge_scores_the_state_that_a_finger_left(checkout: Path) -> None:
    with playing(str(checkout), "clock.TurnOn") as (environment, first):
        assert first.messages[-1].parts[0] == "Turn the alarm on."
        assert environment.screen_size() == (1080, 2400)
        assert environment.evaluate() == 0
        does(environment, "CLICK", point=[500, 200])
        assert environment.evaluate() == 1
        assert not does(environment, "ANSWER", value="1").done
        does(environment, "CLICK", point=[500, 800])
        assert environment.evaluate() == 0, "something else was changed"
        assert does(environment, "COMPLETE").done


def test_its_page_carries_the_buttons_out(checkout: Path) -> None:
    with playing(str(checkout), "clock.TurnOn") as (environment, _):
        for name, expected in {"BACK": "back", "HOME": "launcher", "RECENT": "recent"}.items():
            does(environment, name)
            assert app(environment) == expected
        does(environment, "AWAKE", value="clock")
        assert app(environment) == "clock"


def test_what_is_wrong_is_said(checkout: Path, tmp_path: Path) -> None:
    for name, seed in (("clock.None", 1), (None, 1), ("clock.TurnOn", "x")):
        with pytest.raises(DataFailure, match="mobilegym"), playing(str(checkout), name, seed):
            pass
    with (
        playing(str(checkout), "clock.TurnOn", 13) as (environment, _),
        pytest.raises(EnvironmentFailed, match=r"judge of clock\.TurnOn: no seed"),
    ):
        environment.evaluate()
    (tmp_path / "dist/index.html").unlink()
    with (
        pytest.raises(DataFailure, match=r"index\.html is not a file"),
        playing(str(checkout), "clock.TurnOn"),
    ):
        pass


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    mobilegym.bench.cache_clear()
    with pytest.raises(EnvironmentFailed, match="MobileGym cannot be imported"):
        MobileGym(MobileGym.Settings.model_validate({"checkout": str(tmp_path)}))


@pytest.mark.skipif("MOBILEGYM" not in os.environ, reason="MOBILEGYM names a checkout")
def test_a_published_task_is_solved() -> None:
    with playing(os.environ["MOBILEGYM"], "clock.ToggleAlarm") as (environment, first):
        assert "06:20" in str(first.messages[-1].parts[0])
        assert environment.evaluate() == 0
        does(environment, "SWIPE", point1=[500, 700], point2=[500, 500])
        does(environment, "CLICK", point=[859, 690])
        assert environment.evaluate() == 1
        assert environment._tab is not None
        assert environment._tab.refused == {}
