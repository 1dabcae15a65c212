"""A small stand-in for a checkout of MobileGym: a page and the classes that rayloop uses of it."""

from __future__ import annotations

from pathlib import Path

PAGE = """<!doctype html><meta name=viewport content="width=device-width,initial-scale=1">
<button style="width:360px;height:400px" onclick="state.alarm = true">Alarm</button>
<button style="width:360px;height:400px" onclick="state.other = true">Other</button><script>
    const state = {alarm: false, other: false, app: "launcher", answers: null}
    window.__SIM__ = {getState: () => state}
    window.__OS__ = {openApp: id => { state.app = id }, goHome: () => { state.app = "launcher" },
        handleBack: () => { state.app = "back" }, getAppRoute: () => ({app: state.app})}
    window.__SIM_INPUT__ = {recent: () => { state.app = "recent" }}</script>"""
PHONE = """
from dataclasses import dataclass, field

@dataclass
class Observation:
    state: dict = field(default_factory=dict)
    route: dict = field(default_factory=dict)

class MobileGymEnv:
    def __init__(self, *, url, verbose):
        self.url = url

    async def get_state(self):
        return await self._page.evaluate("__SIM__.getState()")

    async def get_route(self):
        return await self._page.evaluate("__OS__.getAppRoute()")

class Task:
    description = "Turn the alarm on."

    def __init__(self, _seed):
        self.id, self.seed = "clock.TurnOn", _seed

class TaskRegistry:
    def get_by_id(self, name):
        if name != "clock.TurnOn":
            raise ValueError(f"Task {name!r} not found")
        return Task
"""
RUNNER = """
from types import SimpleNamespace
from bench_env.env.mobile_gym import Observation

class Controller:
    @staticmethod
    async def setup(env, task):
        assert env._fresh
        return Observation(await env.get_state(), await env.get_route()), {}

class Evaluator:
    async def evaluate(self, task, first, last, execution):
        assert execution.agent_answer is None
        error = "no seed" if task.seed == 13 else None
        changed = {key for key in first.state if first.state[key] != last.state[key]} - {"app"}
        return SimpleNamespace(passed=changed == {"alarm"}, judge_error=error)
"""


def make(folder: Path) -> Path:
    """Write a checkout below a folder, and return it."""
    files = {
        "dist/index.html": PAGE,
        "bench_env/__init__.py": "",
        "bench_env/env/__init__.py": "",
        "bench_env/env/mobile_gym.py": PHONE,
        "bench_env/runner/__init__.py": "",
        "bench_env/runner/base.py": RUNNER,
    }
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return folder
