"""Makes the checkpoint that is shipped, ``tiny``: ``python -m rayloop.recipes.arpo.make_tiny``.

It begins with ``recipes/arc_vision/tiny``, which has learnt to look at such pages, but answers with boxes. An action gets tokens of
its own, each coordinate beginning with what the model knows of the same fraction; then it learns the grammar from the hasty
demonstrator (``demonstrations.py``, ``warm.yaml``). It is stopped early: a policy that writes some turns wrong and misses often
leaves GRPO something to learn, and its group members differ.

What was measured is written beside it, as ``tiny.json``. Each stage is a public command and is not repeated when its result is
there; some fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rayloop.recipes.arpo.demonstrations import STEP, Demonstrated

HERE = Path(__file__).parent
LOOKS = HERE.parent / "arc_vision" / "tiny"
DATA, START, WARM = Path("runs/data/arpo"), Path("runs/models/arpo-start"), Path("runs/models/arpo-warm")
EPISODES = 7700


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the checkpoint tiny.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write it into")
    out = parser.parse_args().out
    if not (DATA / "warm.parquet").exists():
        cluster("data", "prepare", "arpo", "--out", DATA, "--demonstrations", EPISODES)
    if not START.exists():
        from rayloop.engines.added_tokens import add_tokens  # imports torch

        add_tokens(LOOKS, START, beginnings())
    cluster("sft", HERE / "warm.yaml")
    cluster("export", WARM, out / "tiny", "--dtype", "bfloat16")
    measured = WARM / "eval"
    cluster("eval", HERE / "quickstart.yaml", "--checkpoint", out / "tiny", "--samples", 2, "--out", measured)
    summary = json.loads((measured / "summary.json").read_text(encoding="utf-8"))
    (out / "tiny.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def beginnings() -> dict[str, str]:
    """New token -> the one of ``LOOKS`` that it begins with."""
    known = [f"{n / 1000:.2f}" for n in range(0, 1001, STEP)]
    return dict(zip(Demonstrated.tokens, ("<bbox>[", "]</bbox>", *known, *known), strict=True))


def cluster(*arguments: object) -> None:
    """Run ``python -m rayloop`` and raise CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", "rayloop", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
