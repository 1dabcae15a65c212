"""Makes the checkpoints that are shipped, ``tiny`` and ``loose``: ``python -m rayloop.recipes.arc_vision.pretrain_tiny``.

``tiny``, where the evidence in docs/results.md starts: renders the pages of the ``pretrain`` split, trains a Qwen2.5-VL of 2.6 M
parameters from random weights with answers only (``pretrain.yaml``), and measures the controls of every snapshot on the
validation split. Chosen is the first snapshot whose reward with the right image is above that of every control by more than
``MARGIN``, with its whole interval. Early, because a policy that is already sure of its answers samples the same one eight times,
and GRPO learns from differences.

``loose``, where the quickstart starts: ``tiny`` after a few more supervised steps on the same pages with the boxes of a hasty
annotator, drawn too large (``loosen.yaml``). It finds elements as well as before, but not how large they are: that is one thing to
learn on every page, so minutes of GRPO show it.

What was measured is written beside each, as ``tiny.json`` and ``loose.json``. Each stage is a public command and continues where
it was interrupted; twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = Path("runs/data/miniwob")
TRAINED = Path("runs/models/miniwob-pretrained")
LOOSE = Path("runs/models/miniwob-loose")
ROWS = 8000
MARGIN = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the checkpoints tiny and loose.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write both into")
    out = parser.parse_args().out
    if not (PAGES / "pretrain.parquet").exists():
        cluster("data", "prepare", "arc_vision", "--out", PAGES, "--rows", f"pretrain={ROWS}")
    cluster("sft", HERE / "pretrain.yaml")
    for snapshot in sorted(TRAINED.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_"))):
        summary = controls(snapshot)
        print(f"{snapshot.name}: " + json.dumps(summary["arms"]), flush=True)
        if min(by["reward"][1] for by in summary["differences"].values()) > MARGIN:
            write(out / "tiny", snapshot, summary)
            cluster("sft", HERE / "loosen.yaml", f"model.path={out / 'tiny'}")
            write(out / "loose", LOOSE, controls(LOOSE))
            return 0
    print("no snapshot looks at the page; raise steps in pretrain.yaml", file=sys.stderr)
    return 1


def cluster(*arguments: str | Path) -> None:
    """Run ``python -m rayloop`` and raise CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", "rayloop", *map(str, arguments)], check=True)


def write(folder: Path, snapshot: Path, summary: dict[str, Any]) -> None:
    """The snapshot's weights in bfloat16, and beside them what was measured."""
    cluster("export", snapshot, folder, "--dtype", "bfloat16")
    folder.with_suffix(".json").write_text(json.dumps({"snapshot": snapshot.name, **summary}, indent=1) + "\n", encoding="utf-8")


def controls(snapshot: Path) -> dict[str, Any]:
    """The summary of the snapshot's evaluation with controls on the validation split."""
    folder = snapshot / "eval"
    cluster("eval", HERE / "learn.yaml", "--checkpoint", snapshot, "--controls", "--out", folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


if __name__ == "__main__":
    sys.exit(main())
