"""The reward of chance: an actor that writes valid actions and clicks anywhere, with as many turns
as the policy has.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

from rayloop.core.types import Message, Task
from rayloop.envs.browser.miniwob import MiniWob
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.ui_tars import write
from rayloop.measure.controls import Item

ARM, AT_ONCE = "random", 8
SETTINGS = MiniWob.Settings(pointing=Pointing(coordinates="relative"), success_at=1.0)


def play(rows: Sequence[Mapping[str, Any]], turns: int, samples: int, seed: int = 0) -> list[Item]:
    """Each row ``samples`` times, at most ``turns`` clicks an episode; items of the arm ``random``,
    the result as reward.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(
            pool.map(
                lambda asked: _episode(asked[0], asked[1], turns, seed),
                product(rows, range(samples)),
            )
        )


def _episode(row: Mapping[str, Any], sample: int, turns: int, seed: int) -> Item:
    rng = random.Random(f"{seed}-{row['id']}-{sample}")
    page = MiniWob(SETTINGS)
    try:
        page.reset(Task(row["id"], (Message("user", (row["prompt"],)),), extra=row))
        for _ in range(turns):
            if page.step(
                write(Actions("", (Click(Point(rng.randrange(1001), rng.randrange(1001))),)))
            ).done:
                break
        result = page.evaluate()
        return Item(ARM, row["id"], row["page"], sample, result, {"success": result})
    finally:
        page.close()
