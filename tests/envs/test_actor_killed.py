"""An environment actor of a real Ray is killed while programs of the policy run: nothing of any
environment is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayloop.core.types import Message, Task
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind
from rayloop.launch.ray_variables import SUBREAPER
from tests.envs.pages import CLICK, SETTINGS, button, write
from tests.envs.programs import PACKAGES, needs
from tests.support.runs import eventually

pytest.importorskip("playwright", reason="make test-env installs playwright")
pytestmark = [pytest.mark.env, needs(*PACKAGES), pytest.mark.timeout(180)]

LOOP = "<code>\n```python\nwhile True: pass\n```\n</code>"
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "interpreter": (
        {"use": "rayloop.envs.interpreter.environment:PythonInterpreter"},
        LOOP,
        "rayloop.sandbox.server",
    ),
    "browser": (
        {"use": "rayloop.envs.browser.web:WebPage", "with": SETTINGS},
        CLICK,
        "--type=renderer",
    ),
    "desktop": (
        {"use": "rayloop.envs.desktop.environment:DesktopTasks"},
        "Action: type(content='(setsid sleep 999 &) ; while true; do :; done\\n')",
        "sleep 999",
    ),
}
"""Its settings, what the policy does that does not end, and what stands in the command line of a
process that it then has.
"""


class Player:
    """What an environment actor does with its environments."""

    def __init__(self, kind: EnvironmentKind) -> None:
        self._environments = Environments(kind, {})
        self._acting: list[asyncio.Task[Any]] = []

    async def play(self, task: Task, said: str) -> int:
        """Begin an episode, and let the policy act without waiting for it.

        Returns this process's id.
        """
        instance = self._environments.of(task)
        await instance.make(60)
        await instance.call("reset", task, timeout=60)
        self._acting.append(asyncio.create_task(instance.call("step", said, timeout=600)))
        return os.getpid()


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    """Without the raylet's own care for what a worker leaves (Ray has none on nodes that run jobs)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SUBREAPER, "false")
        small = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        ray.init(address="local", log_to_driver=False, **small)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_left(name: str, isolation: str, tmp_path: Path) -> None:
    assert left(name, isolation, tmp_path, frozen=False) == []


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_left_of_what_hangs(name: str, tmp_path: Path) -> None:
    """What runs inside answers nobody and takes no notice; bwrap and the drivers, which no policy
    can stop, do.
    """
    assert left(name, "thread", tmp_path, frozen=True) == []


def left(name: str, isolation: str, folder: Path, frozen: bool) -> list[str]:
    """The command lines of what still runs ten seconds after the actor was killed; it is ended
    then.
    """
    settings, said, mark = KINDS[name]
    if name == "browser":
        pages = str(write(folder / "pages", hangs=button("while (true) {}")))
        settings = {**settings, "with": {**SETTINGS, "folder": pages}}
    kind = EnvironmentKind.model_validate({**settings, "isolation": isolation})
    extra = {"url": "hangs.html", "check": "false", "desktop": "sort-lines"}
    actor: Any = ray.remote(num_cpus=0.1)(Player).remote(kind)
    pid = ray.get(
        actor.play.remote(Task("t", (Message("user", ("{instruction}",)),), extra=extra), said),
        timeout=120,
    )
    eventually(lambda: any(mark in line for line in lines(pid)), f"{mark} in {lines(pid)}", 30)
    started = psutil.Process(pid).children(recursive=True)
    for one in started if frozen else ():
        if one.name() not in ("bwrap", "node") and "inside.driver" not in " ".join(one.cmdline()):
            one.suspend()
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=10)
    found = [" ".join(one.cmdline()) for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    for one in alive:
        one.kill()
    return found


def lines(pid: int) -> list[str]:
    """The command lines of all that descends from a process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
