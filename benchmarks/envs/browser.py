"""``bench browser``: steps of MiniWoB++ pages in the real Chromium, as an environment actor plays
them, without a policy.

A step is the text of a turn, read, clicked, and a screenshot with the page's reward; starts of
episodes count into the time and
into the CPU, not into the steps. ``cpu_ms`` is that of all processes, ``own_cpu_ms`` that of the
one which stands for the actor:
threads, grammar, Playwright's Python side. ``pss_mb`` is the memory of browser and driver with all
contexts open, what processes
share counted once; ``driver_mb`` the driver's part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import time

from benchmarks.measure import machine
from benchmarks.processes import Tree
from rayloop.core.types import Message, Task
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind

PAGES = (
    "click-test-2",
    "click-color",
    "click-button",
    "click-shape",
    "click-checkboxes",
    "click-dialog-2",
    "grid-coordinate",
    "identify-shape",
)
MAX_STEPS = 5
"""Of an episode, at most."""
CALL_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", type=int, default=len(PAGES), help="episodes at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured")
    parser.add_argument("--reload", action="store_true", help="load the page anew for each episode")
    parser.set_defaults(run=_browser)


def _browser(arguments: argparse.Namespace) -> int:
    found = asyncio.run(_measured(arguments.pages, arguments.seconds, arguments.reload))
    print(
        json.dumps(
            {"pages": arguments.pages, "reload": arguments.reload, **found, "machine": machine()}
        )
    )
    return 0


async def _measured(pages: int, seconds: float, reload: bool) -> dict[str, float | str]:
    from rayloop.envs.browser.containment import BrowserSettings, available
    from rayloop.envs.browser.host import host_of

    settings = {"reload": reload, "browser": {"pages": max(pages, 16), "recycle_episodes": 10**6}}
    kind = EnvironmentKind.model_validate(
        {"use": "rayloop.envs.browser.miniwob:MiniWob", "with": settings}
    )
    environments = Environments(kind, {})
    player = _Player(environments)
    await asyncio.gather(
        *(player.episode(n, 0) for n in range(pages))
    )  # browser, contexts and files are there
    player.took.clear()
    tree, own, began = Tree(os.getpid()), _own(), time.monotonic()
    tree.look()
    before, until = tree.seconds, began + seconds
    watching = asyncio.ensure_future(_look(tree))
    await asyncio.gather(*(player.play(n, until) for n in range(pages)))
    watching.cancel()
    tree.look()
    wall, steps = time.monotonic() - began, len(player.took)
    memory = _memory(os.getpid())
    await asyncio.to_thread(host_of(BrowserSettings.model_validate(settings["browser"])).end)
    took = sorted(player.took)
    return {
        "steps_per_s": round(steps / wall, 1),
        "cpu_ms": round(1000 * (tree.seconds - before) / steps, 2),
        "own_cpu_ms": round(1000 * (_own() - own) / steps, 2),
        "p50_ms": round(1000 * took[steps // 2], 1),
        "p99_ms": round(1000 * took[int(0.99 * steps)], 1),
        "episodes": player.episodes,
        "steps": steps,
        "pss_mb": round(sum(memory.values()) / 1e6),
        "driver_mb": round(memory.get("driver", 0) / 1e6),
        "contained": str(available()),
    }


class _Player:
    """Random clicks, the same ones each time. ``took``: seconds of each step."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.took: list[float] = []
        self.episodes = 0

    async def play(self, number: int, until: float) -> None:
        seed = 0
        while time.monotonic() < until:
            seed += 1
            await self.episode(number, seed)

    async def episode(self, number: int, seed: int) -> None:
        extra = {"page": PAGES[number % len(PAGES)], "seed": f"{number}-{seed}"}
        task = Task(f"{number}-{seed}", (Message("user", ("{instruction}",)),), extra=extra)
        clicks = random.Random(f"{number}-{seed}")
        environment = self._environments.of(task)
        try:
            await environment.make(CALL_TIMEOUT_S)
            await environment.call("reset", task, timeout=CALL_TIMEOUT_S)
            for _ in range(MAX_STEPS):
                at = f"({clicks.randrange(168)},{clicks.randrange(53, 224)})"
                began = time.monotonic()
                result = await environment.call(
                    "step", f"Action: click(start_box='{at}')", timeout=CALL_TIMEOUT_S
                )
                self.took.append(time.monotonic() - began)
                if result.done:
                    break
            await environment.call("evaluate", timeout=CALL_TIMEOUT_S)
            self.episodes += 1
        finally:
            await environment.close(CALL_TIMEOUT_S)


async def _look(tree: Tree) -> None:
    """Often enough that hardly anything of a process that ends is missed."""
    while True:
        await asyncio.sleep(1.0)
        tree.look()


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(root: int) -> dict[str, int]:
    """Bytes (PSS) of the processes below this one, by kind: the driver, and what is held in."""
    from rayloop.envs.browser import processes

    found: dict[str, int] = {}
    for pid in processes.tree(root)[1:]:
        kind = "driver" if "run-driver" in processes.command_line(pid) else "browser"
        found[kind] = found.get(kind, 0) + _pss(pid)
    return found


def _pss(pid: int) -> int:
    """Bytes; 0 for a process that is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
            [line] = [line for line in file if line.startswith("Pss:")]
            return int(line.split()[1]) * 1024
    except OSError:
        return 0
