"""Demonstrations for ARPO's tiny model, from live pages: ``python -m
tools.makers.browser_clicks OUT --episodes N``.

A script knows the right element and clicks hastily: its clicks are spread over ``haste`` times the
element's width and height, so some miss, and it tries again as long as the page allows. It teaches
the grammar, roughly where to click, and to try again after a miss; GRPO teaches to hit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayloop.core.protocols import Observation
from rayloop.core.types import Message, Task
from rayloop.envs.browser.miniwob import MiniWob
from rayloop.envs.browser.tab import Screen
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.ui_tars import write
from rayloop.recipes.arpo.prepare import PAGES, rows

WARM_PAGES = (*PAGES, "click-color", "click-widget")
"""The pages of recipes/arpo/tiny. ``targets.js`` has a rule for each, and for click-collapsible."""
HASTE, TURNS, PAGES_AT_ONCE = 1.6, 4, 8
TARGETS = Path(__file__).parent / "arpo/targets.js"
COORDINATE_STEP = 10
"""Thousandths of the screen between two coordinates that the tiny model can write: each is one
token.
"""
POINTING = Pointing(coordinates="relative")
SETTINGS = MiniWob.Settings(pointing=POINTING, success_at=1.0, reload=False)
Box = tuple[float, float, float, float]


class Pointed(MiniWob):
    """A page whose ``box`` is that of the element to click next, in pixels; None when there is
    none.
    """

    STATE = f"[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, {TARGETS.read_text(encoding='utf-8')}]"
    box: Box | None = None

    def _seen(self, screen: Screen) -> bool:
        *state, box = screen.value
        self.box = tuple(box) if box else None
        return super()._seen(replace(screen, value=state))


def record(file: Path, rows: Sequence[Mapping[str, Any]], haste: float) -> tuple[float, int]:
    """Play each row once, and write a row for each turn: what was seen until then, and what was
    done. Returns the share of solved episodes and the number of turns.
    """
    import pyarrow
    import pyarrow.parquet

    with ThreadPoolExecutor(PAGES_AT_ONCE) as pool:
        played = list(pool.map(lambda row: demonstrated(row, haste), rows))
    turns = [turn for found, _ in played for turn in found]
    random.Random(0).shuffle(turns)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(turns), file, compression="zstd")
    return sum(result for _, result in played) / len(played), len(turns)


def demonstrated(row: Mapping[str, Any], haste: float) -> tuple[list[dict[str, Any]], float]:
    """The turns of an episode as rows for ``sft``, and its result."""
    rng = random.Random(row["seed"])
    page = Pointed(SETTINGS)
    turns: list[dict[str, Any]] = []
    said: list[dict[str, str]] = []
    images: list[dict[str, bytes | None]] = []
    try:
        seen: Observation | None = page.reset(
            Task(row["id"], (Message("user", (row["prompt"],)),), extra=row)
        )
        while seen is not None and page.box is not None and len(turns) < TURNS:
            last = seen.messages[-1]
            texts = "".join(part for part in last.parts if isinstance(part, str))
            said.append({"role": "user", "content": f"{texts}<image>"})
            images.append({"bytes": last.images[0].data})
            answer = write(
                Actions("", (hasty(page.box, (page.size.width, page.size.height), haste, rng),))
            )
            turn = {"id": f"{row['id']}-{len(turns)}", "data_source": row["page"], "answer": answer}
            turns.append({**turn, "prompt": list(said), "images": list(images)})
            said.append({"role": "assistant", "content": answer})
            seen = page.step(answer).observation
        return turns, page.evaluate()
    finally:
        page.close()


def hasty(box: Box, size: tuple[int, int], haste: float, rng: random.Random) -> Click:
    """A click in the box, widened to ``haste`` times its sides, as the model writes it."""
    (left, top, right, bottom), (width, height) = box, size
    x = (left + right) / 2 + (rng.random() - 0.5) * haste * (right - left)
    y = (top + bottom) / 2 + (rng.random() - 0.5) * haste * (bottom - top)
    return Click(Point(_rounded(x / width), _rounded(y / height)))


def _rounded(fraction: float) -> int:
    return COORDINATE_STEP * round(min(max(fraction, 0.0), 1.0) * 1000 / COORDINATE_STEP)


class DemonstratedClicks:
    """The supervised answer is what the demonstrator wrote in that turn.

    An action is four of the ``tokens``.
    """

    tokens = (
        "Action: click(start_box='",
        "')",
        *(f"({x}," for x in range(0, 1001, COORDINATE_STEP)),
        *(f"{y})" for y in range(0, 1001, COORDINATE_STEP)),
    )

    def answer(self, task: Task, rng: random.Random) -> str:
        """The demonstrated turn."""
        return str(task.ground_truth)


def beginnings() -> dict[str, str]:
    """Each new token -> the token of ``recipes/arc_vision/tiny`` whose weights it starts with."""
    known = [f"{n / 1000:.2f}" for n in range(0, 1001, COORDINATE_STEP)]
    return dict(
        zip(DemonstratedClicks.tokens, ("<bbox>[", "]</bbox>", *known, *known), strict=True)
    )


def main() -> int:
    """Write ``OUT/warm.parquet``."""
    parser = argparse.ArgumentParser(prog="python -m tools.makers.browser_clicks")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument(
        "--haste", type=float, default=HASTE, help="spread of the clicks (default: %(default)s)"
    )
    parser.add_argument(
        "--pages",
        nargs="+",
        default=WARM_PAGES,
        help="names of MiniWoB++ pages (default: those of recipes/arpo/tiny)",
    )
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "warm.parquet"
    asked = list(rows("warm", chosen.episodes, pages=tuple(chosen.pages)))
    wins, count = record(file, asked, chosen.haste)
    print(f"{file}: {count} turns of {chosen.episodes} episodes, {wins:.0%} of them solved")
    return 0


if __name__ == "__main__":
    main()
