"""MobileGym's phone and its published tasks (arXiv:2605.26114), from a checkout of it.

Its code is under Apache-2.0, its data under CC BY-NC 4.0; neither is part of rayloop. The page is
built once (``npm ci``, ``npm run build``) and served as files, without its server. Its own Python
code sets a task up and judges the state of the phone; only a finger acts on it. Its texts are
Chinese and need a font such as fonts-noto-cjk.
"""

import dataclasses
import functools
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

from rayloop.config.settings import LocalPath, local_path
from rayloop.core.failures import DataFailure, EnvironmentFailed
from rayloop.core.types import Task
from rayloop.envs.browser.tab import Tab
from rayloop.envs.browser.web import WebPage

BUTTONS = """window.phone = {
    home: () => { __OS__.goHome() },
    back: () => { __OS__.handleBack() },
    recent: () => { __SIM_INPUT__.recent() },
    open: id => { __OS__.openApp(id) },
}"""
"""How MobileGym's page carries out the buttons of a phone."""


class MobileGym(WebPage):
    """A row names a ``mobilegym`` task, as ``clock.ToggleAlarm``, and a ``seed`` of its parameters.

    ``evaluate`` is 1 where its judge finds the goal reached and nothing else changed, else 0. An
    answer counts only in the phone's answer sheet, as in its ``grounded`` mode.
    """

    class Settings(WebPage.Settings):
        """Where MobileGym is, and how large the screen is."""

        device: Literal["phone"] = "phone"
        checkout: LocalPath
        """A checkout of MobileGym with its data and its built page (dist/)."""

    def __init__(self, settings: Settings) -> None:
        checkout = str(local_path(settings.checkout))
        self._phones, self._runner = bench(checkout)
        super().__init__(settings.model_copy(update={"folder": f"{checkout}/dist"}))
        self._task: Any = None
        self._phone: Any = None
        self._initial: Any = None

    def evaluate(self) -> float:
        """Return the judge's result. Raises EnvironmentFailed where the judge itself fails."""
        assert self._host is not None
        result = self._host.run(self._judged(), self._settings.browser.load_timeout)
        if result.judge_error:
            raise EnvironmentFailed(f"MobileGym's judge of {self._task.id}: {result.judge_error}")
        return float(result.passed)

    def _prepare(self, task: Task) -> None:
        name = task.extra.get("mobilegym")
        seed = task.extra.get("seed", 0)
        try:
            self._task = self._phones.TaskRegistry().get_by_id(str(name))(_seed=int(seed))
        except (TypeError, ValueError) as error:
            raise DataFailure(task.id, f"the row's `mobilegym` and `seed`: {error}") from error
        columns = {"url": "index.html", "check": "false", "instruction": ""}
        super()._prepare(dataclasses.replace(task, extra={**task.extra, **columns}))

    async def _begin(self, tab: Tab) -> str:
        await super()._begin(tab)
        phone = self._phones.MobileGymEnv(url=tab.address, verbose=False)
        # Its page is ours, which is loaded already: its own browser would have a network.
        phone._page = tab.page
        phone._fresh = True
        self._phone = phone
        self._initial, _ = await self._runner.Controller.setup(phone, self._task)
        await tab.evaluate(BUTTONS)
        return str(self._task.description)

    async def _judged(self) -> Any:
        phone = self._phone
        end = self._phones.Observation(state=await phone.get_state(), route=await phone.get_route())
        unsaid = SimpleNamespace(agent_answer=None)
        return await self._runner.Evaluator().evaluate(self._task, self._initial, end, unsaid)


@functools.cache
def bench(checkout: str) -> tuple[Any, Any]:
    """Return MobileGym's modules of the phone and of the runner.

    Raises EnvironmentFailed for a folder that is not a checkout, or lacks its packages.
    """
    sys.path.append(checkout)
    try:
        phone = import_module("bench_env.env.mobile_gym")
        return phone, import_module("bench_env.runner.base")
    except ImportError as error:
        sys.path.remove(checkout)
        raise EnvironmentFailed(
            f"MobileGym cannot be imported: {error}; pip install -r"
            f" {checkout}/bench_env/requirements.txt",
            bug=True,
        ) from error
