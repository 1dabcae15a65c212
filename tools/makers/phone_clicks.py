"""Demonstrations for a tiny policy on the shipped phone: ``python -m tools.makers.phone_clicks
FILE``.

A script taps the app that an ``open-app`` row asks for, hastily: its taps are spread over ``haste``
times the icon, and some miss. It teaches the grammar, and roughly where to tap.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayloop.core.types import Message, Task
from rayloop.envs.browser.phone import Phone, tasks
from rayloop.envs.grammar.actions import Actions
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.ui_tars import write
from tools.makers.browser_clicks import PAGES_AT_ONCE, hasty

SETTINGS = Phone.Settings(
    width=336, height=448, scale=0.5, pointing=Pointing(coordinates="relative")
)
"""As in recipes/phone/tiny.yaml."""
TASK = "open-app"
BOX = """(name => {
    const box = document.querySelector(`[aria-label=${name}]`).getBoundingClientRect()
    return [box.left, box.top, box.right, box.bottom]
})"""


def demonstrated(seed: str, haste: float) -> dict[str, Any]:
    """The first turn of an episode, as a row for ``sft``."""
    app = tasks()[TASK].drawn(seed)["app"]
    phone = Phone(SETTINGS)
    try:
        prompt = (Message("user", ("{instruction}",)),)
        first = phone.reset(Task(seed, prompt, extra={"phone": TASK, "seed": seed}))
        assert phone._tab is not None
        assert phone._host is not None
        box = phone._host.run(phone._tab.evaluate(f"{BOX}('{app}')"), 10)
        size = (phone.size.width, phone.size.height)
        answer = write(Actions("", (hasty(tuple(box), size, haste, random.Random(seed)),)))
        message = first.messages[-1]
        text = "".join(part for part in message.parts if isinstance(part, str))
        return {
            "id": seed,
            "data_source": TASK,
            "answer": answer,
            "prompt": [{"role": "user", "content": f"{text}<image>"}],
            "images": [{"bytes": message.images[0].data}],
        }
    finally:
        phone.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--haste", type=float, default=1.6)
    options = parser.parse_args()
    import pyarrow
    import pyarrow.parquet

    seeds = [f"warm-{number}" for number in range(options.episodes)]
    with ThreadPoolExecutor(PAGES_AT_ONCE) as pool:
        rows = list(pool.map(lambda seed: demonstrated(seed, options.haste), seeds))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, options.file, compression="zstd")


if __name__ == "__main__":
    main()
