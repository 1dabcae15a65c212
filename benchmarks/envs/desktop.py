"""``bench desktop``: what local desktops cost: being up, an editor's window, screenshots, clicks,
being closed, and memory.

``pss_mib`` is the memory of all of them with an editor each, what processes share counted once;
``cpu_percent`` is that of all of them while nobody touches them, of one core. Nothing acts at once:
figures are those of one call at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median

import psutil

from benchmarks.measure import machine, rollup, tree_memory
from benchmarks.processes import Tree
from rayloop.core.failures import ConfigError
from rayloop.envs.desktop.session import Desktop, DesktopLimits, missing

NOTES = "Documents/notes.txt"
SHOTS_PER_DESKTOP = 5
"""Of each desktop."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--desktops", type=int, default=12, help="at once")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds in which nobody touches them"
    )
    parser.set_defaults(run=_desktop)


def _desktop(arguments: argparse.Namespace) -> int:
    if lacks := missing():
        raise ConfigError(f"this machine lacks what a desktop needs: {lacks}")
    desktops: list[Desktop] = []
    try:
        found = _measured(desktops, arguments.desktops, arguments.idle)
    finally:
        closed = [_seconds(one.close) for one in desktops]
    found |= _spread("close_ms", closed, 1000)
    print(
        json.dumps(
            {
                "desktops": arguments.desktops,
                **found,
                "load": os.getloadavg()[0],
                "machine": machine(),
            }
        )
    )
    return 0


def _measured(desktops: list[Desktop], count: int, idle: float) -> dict[str, float]:
    """Starts them one after the other into ``desktops``."""
    up = [_seconds(lambda: desktops.append(Desktop(DesktopLimits()))) for _ in range(count)]
    for one in desktops:
        one.put(NOTES, b"hello\n")
    windows = [_seconds(lambda one=one: one.launch(["mousepad", NOTES])) for one in desktops]  # type: ignore[misc]
    for one in desktops:
        one.screenshot(settle=2)
    shots = [_seconds(one.screenshot) for one in desktops for _ in range(SHOTS_PER_DESKTOP)]
    clicks = [_seconds(lambda one=one: one.ask("click", x=600, y=400)) for one in desktops]  # type: ignore[misc]
    time.sleep(1)
    tree = Tree(os.getpid())
    tree.look()
    before = tree.seconds
    time.sleep(idle)
    tree.look()
    whole = tree_memory(psutil.Process())[1] - rollup(os.getpid())["Pss"]
    return {
        **_spread("up_s", up, 1),
        **_spread("editor_s", windows, 1),
        **_spread("screenshot_ms", shots, 1000),
        **_spread("click_ms", clicks, 1000),
        "idle_cpu_percent": round(100 * (tree.seconds - before) / idle, 2),
        "pss_mib": round(whole),
    }


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _spread(name: str, seconds: list[float], scale: int) -> dict[str, float]:
    return {
        name: round(scale * median(seconds), 2),
        f"{name}_worst": round(scale * max(seconds), 2),
    }
