"""Makes the checkpoint that is shipped, where the quickstart starts: ``python -m rayloop.recipes.chart_rvr.make_tiny``.

A Qwen2.5-VL of 0.7 M parameters learns small charts from random weights (``warm.yaml``), and then what a hasty annotator makes of
them (``loosen.yaml``): a policy that is always right leaves nothing to be learned. Each stage is a public command, and is not
repeated when its model is there. What was measured is written beside it, as ``tiny.json``; ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROWS = Path("runs/data/chart_rvr")
WARM, LOOSE = Path("runs/models/chart-warm"), Path("runs/models/chart-loose")
TAUGHT = 8000
"""Charts of the supervised stages, none of which is a row of another split."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the checkpoint tiny.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write it into")
    out = parser.parse_args().out
    if not (ROWS / "warm.jsonl").exists():
        cluster("data", "prepare", "chart_rvr", "--small", "--out", ROWS, "--warm", TAUGHT)
    for stage, made in (("warm", WARM), ("loosen", LOOSE)):
        if not (made / "config.json").exists():
            cluster("sft", HERE / f"{stage}.yaml")
    cluster("export", LOOSE, out / "tiny", "--dtype", "bfloat16")
    measured = LOOSE / "eval"
    cluster("eval", HERE / "quickstart.yaml", "--checkpoint", out / "tiny", "--controls", "--samples", 2, "--out", measured)
    summary = json.loads((measured / "summary.json").read_text(encoding="utf-8"))
    (out / "tiny.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def cluster(*arguments: object) -> None:
    """Run ``python -m rayloop`` and raise CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", "rayloop", *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
