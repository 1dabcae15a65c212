"""``bench sandbox``: what an interpreter in the sandbox costs: being ready, a call, fifty episodes
at once and their memory.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

from benchmarks.measure import machine, tree_memory
from rayloop.sandbox import levels
from rayloop.sandbox.host import Interpreter, Sandbox
from rayloop.sandbox.options import Level, Options

FIGURE = "plt.imshow(image_clue_0.crop((100, 100, 900, 700))); plt.title('x'); plt.show()"
_DEADLINE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level", choices=list(Level), help="default: the strongest that works here"
    )
    parser.add_argument("--episodes", type=int, default=50, help="that play at once")
    parser.set_defaults(run=_sandbox)


def _sandbox(arguments: argparse.Namespace) -> int:
    level = Level(arguments.level) if arguments.level else levels.reached().level
    assert level is not None
    began = time.perf_counter()
    sandbox = Sandbox(level, Options(spares=0))  # so that each is made when it is asked for
    sandbox.interpreter().close()
    result: dict[str, Any] = {
        "level": level,
        "episodes": arguments.episodes,
        "server_s": round(time.perf_counter() - began, 2),
    }
    try:
        result |= _alone(sandbox) | _together(sandbox, arguments.episodes)
    finally:
        sandbox.close()
    print(json.dumps({**result, "load": os.getloadavg()[0], "machine": machine()}))
    return 0


def _alone(sandbox: Sandbox, rounds: int = 40) -> dict[str, float]:
    """Milliseconds until an interpreter is ready, and of its calls."""
    ready, first, later = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        one = sandbox.interpreter()
        ready.append(time.perf_counter() - began)
        first.append(_seconds(lambda one=one: one.run("print(1)", _DEADLINE_S)))  # type: ignore[misc]
        later += [_seconds(lambda one=one: one.run("print(1)", _DEADLINE_S)) for _ in range(10)]  # type: ignore[misc]
        one.close()
    return {**_spread("ready", ready), **_spread("first_print", first), **_spread("print", later)}


def _together(sandbox: Sandbox, episodes: int) -> dict[str, float]:
    """Milliseconds of calls that all make at once, and MiB of the fork server with all of them
    (PSS).
    """
    encoded = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (1000, 1500, 3), dtype="uint8")
    Image.fromarray(noise).save(encoded, "PNG")
    with ThreadPoolExecutor(episodes) as threads:
        began = time.perf_counter()
        all_of_them = list(threads.map(lambda _: sandbox.interpreter(), range(episodes)))
        spawned = time.perf_counter() - began

        def each(call: Callable[[Interpreter], object]) -> list[float]:
            return list(threads.map(lambda one: _seconds(lambda: call(one)), all_of_them))

        result: dict[str, float] = {"spawn_all_s": round(spawned, 2)}
        prints = [
            took for _ in range(10) for took in each(lambda one: one.run("print(1)", _DEADLINE_S))
        ]
        result |= _spread("print_together", prints) | {"idle_mib": _memory(sandbox)}
        each(lambda one: one.images({"image_clue_0": encoded.getvalue()}, _DEADLINE_S))
        result |= {"with_image_mib": _memory(sandbox)}
        result |= _spread("figure_together", each(lambda one: one.run(FIGURE, _DEADLINE_S)))
        result |= {"with_figure_mib": _memory(sandbox)}
        for one in all_of_them:
            one.close()
    return result


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        f"{name}_p50_ms": round(1000 * median(seconds), 2),
        f"{name}_p99_ms": round(1000 * p99, 2),
    }


def _memory(sandbox: Sandbox) -> int:
    """MiB of the fork server and all that it started; pages that they share counted once."""
    assert sandbox.pid is not None
    return round(tree_memory(psutil.Process(sandbox.pid))[1])
