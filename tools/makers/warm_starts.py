"""Makes the start models of the experiments ``languages`` and ``histories``: ``python -m
tools.makers.warm_starts``.

Hasty clicks (``browser_clicks.py``) are demonstrated in UI-TARS' language, and ``rayloop data
convert`` writes them in each language, its own included. ``recipes/arc_vision/tiny`` gets a token
for each coordinate of a language, and learns it in a supervised stage (``languages/warm.yaml``).
The third model learns UI-TARS' language with one image in view. A file that exists is not made
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from tools.makers.__main__ import DATA, HERE, MODELS, RECIPES, rayloop, run
from tools.makers.browser_clicks import COORDINATE_STEP, beginnings

PAGES = (
    "click-dialog-2",
    "click-tab",
    "focus-text",
    "focus-text-2",
    "click-button-sequence",
    "click-collapsible",
)
"""The pages of recipes/arpo/short.yaml, and two that need two clicks."""
EPISODES_OF_DEMONSTRATIONS = 3000
DEMONSTRATIONS = DATA / "languages"
STARTS = MODELS / "languages"
RELATIVE = {"coordinates": "relative"}
UI_TARS = json.dumps({"language": "ui_tars", "pointing": RELATIVE})
IMAGE_PIXELS = 37632
"""``model.max_pixels`` of the recipe, and ``model.min_pixels``."""
RESIZED_SIZE = (168, 224)
"""The sides of a screenshot of so many pixels, in which Qwen2.5-VL writes its points."""
QWEN = json.dumps(
    {"language": "qwen2_5_vl", "pointing": {"min_pixels": IMAGE_PIXELS, "max_pixels": IMAGE_PIXELS}}
)
OPENING = (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": ['
)
CLOSING = "}}\n</tool_call>"
LAST_IMAGE = "history={last_images: 1}"


def main() -> None:
    """Make the three models. Raises CalledProcessError."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not (DEMONSTRATIONS / "warm.parquet").exists():
        episodes = ["--episodes", EPISODES_OF_DEMONSTRATIONS, "--pages", *PAGES]
        run("tools.makers.browser_clicks", DEMONSTRATIONS, *episodes)
    in_qwen = converted("qwen2_5_vl", QWEN)
    in_ui_tars = converted("ui_tars", UI_TARS)
    taught("qwen2_5_vl", in_qwen, calls())
    taught("ui_tars", in_ui_tars, beginnings())
    taught("ui_tars_last_image", in_ui_tars, beginnings(), LAST_IMAGE)


def converted(name: str, language: str) -> Path:
    """The demonstrations in another language, or in their own again."""
    folder = DEMONSTRATIONS / name
    file = folder / "train.jsonl"
    if not file.exists():
        rows = DEMONSTRATIONS / "warm.parquet"
        languages = ["--from", UI_TARS, "--to", language]
        rayloop("data", "convert", rows, *languages, "--out", folder)
    return file


def calls() -> dict[str, str]:
    """Each new token of Qwen2.5-VL's language -> the token whose weights it starts with.

    A click is four of them, as in UI-TARS' language.
    """
    width, height = RESIZED_SIZE
    columns = {f"{x}, ": nearest(x, width) for x in range(width + 1)}
    rows = {f"{y}]": nearest(y, height) for y in range(height + 1)}
    return {OPENING: "<bbox>[", CLOSING: "]</bbox>", **columns, **rows}


def nearest(place: int, side: int) -> str:
    """The token of ``recipes/arc_vision/tiny`` for about this fraction of a side."""
    steps = 1000 // COORDINATE_STEP
    return f"{round(place / side * steps) / steps:.2f}"


def taught(name: str, rows: Path, tokens: Mapping[str, str], *options: str) -> None:
    """Write the model ``name``, which has learned the rows."""
    from tools.makers.added_tokens import add_tokens  # imports torch

    start, out = STARTS / f"{name}-untaught", STARTS / name
    if (out / "config.json").exists():
        return
    add_tokens(RECIPES / "arc_vision/tiny", start, tokens)
    settings = [f"output={out}", f"model.path={start}", f"data.train={rows}"]
    rayloop("sft", HERE / "languages/warm.yaml", *settings, *options)


if __name__ == "__main__":
    main()
