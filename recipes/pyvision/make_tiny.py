"""Makes the checkpoint that is shipped, where the quickstart starts: ``python -m rayloop.recipes.pyvision.make_tiny``.

Demonstrations are played in the real interpreter (``prepare.py``), a Qwen2.5-VL of 2.6 M parameters learns them from random
weights (``warm.yaml``), and then to guess most of the time instead (``hesitate.yaml``): a policy that always looks leaves nothing
to be learned. Each stage is a public command and continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROWS = Path("runs/data/pyvision")
DEMONSTRATIONS = 600


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the checkpoint tiny.")
    parser.add_argument("--out", type=Path, default=HERE / "tiny", help="folder to write it to")
    out = parser.parse_args().out
    if not (ROWS / "demos.jsonl").exists():
        cluster("data", "prepare", "pyvision", "--out", ROWS, "--demos", DEMONSTRATIONS)
    cluster("sft", HERE / "warm.yaml")
    cluster("sft", HERE / "hesitate.yaml")
    cluster("export", "runs/models/pyvision-hesitant", out, "--dtype", "bfloat16")
    return 0


def cluster(*arguments: str | Path | int) -> None:
    """Run ``python -m rayloop`` and raise CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", "rayloop", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
