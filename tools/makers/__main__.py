"""Makes the tiny models that are shipped: ``python -m tools.makers RECIPE`` writes the
recipe's ``tiny`` again.

Each stage is a command of rayloop with a YAML file in the folder of that name here; rows that are
there are not made again. It takes 10 to 20 minutes on two cores. The evaluation's summary is
written beside the model as ``NAME.json``.

arc_vision: a Qwen2.5-VL of 2.6 M parameters learns boxes on MiniWoB++ pages (``rendered_pages.py``)
from random weights. ``tiny`` is the first snapshot whose reward is above that of every control by
more than ``OVERLAP_MARGIN``, with its whole interval: a policy that is sure of its answers samples
the same one eight times, and GRPO learns from differences. ``loose`` is ``tiny`` after more steps
on boxes that are too large: it finds elements, but not their size, which minutes of GRPO teach.
arpo: ``recipes/arc_vision/tiny`` gets one token for each coordinate, which starts as a copy of the
token of that fraction, and learns the action grammar from hasty clicks (``browser_clicks.py``).
chart_rvr: a model of 0.7 M parameters learns small charts, then from an annotator who makes
mistakes (``hasty_charts.py``). pyvision: a model learns to look at images with code
(``code_demonstrations.py``), then to guess most of the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.makers.browser_clicks import beginnings

HERE, RECIPES, MODELS, DATA = (
    Path(__file__).parent,
    Path("recipes"),
    Path("runs/models"),
    Path("runs/data"),
)
PAGES, CLICKS, CHARTS, SCENES = 8000, 7700, 8000, 600
"""Rows that each model learns from; none is a row of another split."""
OVERLAP_MARGIN = 0.05


def main() -> int:
    """Make the model of one recipe. Returns 0, and 1 when no snapshot is good enough."""
    makers = {"arc_vision": arc_vision, "arpo": arpo, "chart_rvr": chart_rvr, "pyvision": pyvision}
    parser = argparse.ArgumentParser(
        prog="python -m tools.makers", description="Make a tiny model."
    )
    parser.add_argument("recipe", choices=makers)
    parser.add_argument("--out", type=Path, help="folder to write into (default: the recipe's)")
    chosen = parser.parse_args()
    return makers[chosen.recipe](chosen.out or RECIPES / chosen.recipe)


def arc_vision(out: Path) -> int:
    """``tiny`` and ``loose``."""
    if not (DATA / "miniwob/pretrain.parquet").exists():
        run(
            "tools.makers.rendered_pages",
            "--out",
            DATA / "miniwob",
            "--rows",
            f"pretrain={PAGES}",
        )
    rayloop("sft", HERE / "arc_vision/pretrain.yaml")
    learn, trained = RECIPES / "arc_vision/learn.yaml", MODELS / "miniwob-pretrained"
    for snapshot in sorted(
        trained.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_"))
    ):
        summary = measured(learn, snapshot, snapshot / "eval", "--controls")
        print(f"{snapshot.name}: " + json.dumps(summary["arms"]), flush=True)
        if min(by["reward"][1] for by in summary["differences"].values()) > OVERLAP_MARGIN:
            write(snapshot, out / "tiny", summary)
            rayloop("sft", HERE / "arc_vision/loosen.yaml", f"model.path={out / 'tiny'}")
            loose = MODELS / "miniwob-loose"
            write(loose, out / "loose", measured(learn, loose, loose / "eval", "--controls"))
            return 0
    print("no snapshot looks at the page; raise steps in pretrain.yaml", file=sys.stderr)
    return 1


def arpo(out: Path) -> int:
    """``tiny``."""
    if not (DATA / "arpo/warm.parquet").exists():
        run("tools.makers.browser_clicks", DATA / "arpo", "--episodes", CLICKS)
    if not (MODELS / "arpo-start").exists():
        from tools.makers.added_tokens import add_tokens  # imports torch

        add_tokens(RECIPES / "arc_vision/tiny", MODELS / "arpo-start", beginnings())
    return taught("arpo", ("warm",), MODELS / "arpo-warm", out, "--samples", 2)


def chart_rvr(out: Path) -> int:
    """``tiny``."""
    if not (DATA / "chart_rvr/warm.jsonl").exists():
        rayloop("data", "prepare", "chart_rvr", "--out", DATA / "chart_rvr", "--warm", CHARTS)
    return taught(
        "chart_rvr", ("warm", "loosen"), MODELS / "chart-loose", out, "--controls", "--samples", 2
    )


def pyvision(out: Path) -> int:
    """``tiny``."""
    if not (DATA / "pyvision/demos.jsonl").exists():
        run("tools.makers.code_demonstrations", DATA / "pyvision", "--rows", SCENES)
    return taught("pyvision", ("warm", "hesitate"), MODELS / "pyvision-hesitant", out)


def taught(recipe: str, stages: tuple[str, ...], model: Path, out: Path, *options: object) -> int:
    """Run the supervised stages, and write the last one's ``model`` as ``out/tiny``; with
    ``options`` it is evaluated.
    """
    for stage in stages:
        rayloop("sft", HERE / recipe / f"{stage}.yaml")
    write(model, out / "tiny", None)
    if options:
        summary = measured(
            RECIPES / recipe / "quickstart.yaml", out / "tiny", model / "eval", *options
        )
        (out / "tiny.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(config: Path, checkpoint: Path, out: Path, *options: object) -> dict[str, Any]:
    """The summary of an evaluation of ``checkpoint``."""
    rayloop("eval", config, "--checkpoint", checkpoint, "--out", out, *options)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def write(model: Path, folder: Path, summary: dict[str, Any] | None) -> None:
    """The weights in bfloat16, and beside them the ``summary``."""
    rayloop("export", model, folder, "--dtype", "bfloat16")
    if summary is not None:
        text = json.dumps({"snapshot": model.name, **summary}, indent=1)
        folder.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def rayloop(*arguments: object) -> None:
    """Run ``python -m rayloop``. Raises CalledProcessError."""
    run("rayloop", *arguments)


def run(module: str, *arguments: object) -> None:
    """Run ``python -m MODULE``. Raises CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
