"""Evidence for the spine: two tasks, each warmed by supervised steps and then trained by GRPO over all the actors.

    python -m benchmarks.evidence.spine --grounding FOLDER      writes benchmarks/evidence/spine.json

FOLDER holds train.jsonl and test.jsonl of MiniWoB++ screenshots with instructions and boxes (recipes/arc_vision). The
text task makes its own rows. Held-out scores are those of the presets (digits: greedy; grounding: sampled at
the run's temperature), before the first and after the last GRPO step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rayloop.core.jsonl import JsonLines

RESULT = Path(__file__).with_suffix(".json")


def timed(*arguments: str) -> float:
    """Run ``python -m ...`` and return its seconds. Raises CalledProcessError."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", *arguments], check=True)
    return round(time.monotonic() - began, 1)


def evidence(recipe: str, run: str, warm: str, preset: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Warm up, train, and collect what the run recorded."""
    model = folder / f"{run}-warm"
    warm_overrides = [o for o in overrides if o.startswith("data.train")]
    tiny = f"model.path={folder / f'{run}-tiny'}"
    warm_seconds = timed("cluster", "sft", f"recipes/{recipe}/{warm}", f"output={model}", tiny, *warm_overrides)
    train_seconds = timed(
        "cluster", "train", f"recipes/{recipe}/{preset}", f"output={folder}", f"model.path={model}", *overrides
    )
    events = list(JsonLines(folder / run / "events.jsonl"))
    metrics = list(JsonLines(folder / run / "metrics.jsonl"))
    scores = [{k: v for k, v in e.items() if k.startswith("val/")} for e in events if e["event"] == "evaluated"]
    steps = sorted(m["timing_s/step"] for m in metrics)
    return {
        "presets": [f"recipes/{recipe}/{warm}", f"recipes/{recipe}/{preset}"],
        "warm_up_seconds": warm_seconds,
        "train_seconds": train_seconds,
        "steps": len(metrics),
        "median_step_seconds": round(steps[len(steps) // 2], 2),
        "parity": next(e["mean"] for e in events if e["event"] == "parity"),
        "reward_by_step": [round(m["reward/mean"], 4) for m in metrics],
        "held_out_before": scores[0],
        "held_out_after": scores[-1],
        "ledger": next(e["ledger"] for e in events if e["event"] == "finished"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grounding", type=Path, required=True)
    rows = parser.parse_args().grounding
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        digits = folder / "digits-rows"
        timed("recipes.digits.prepare", "--out", str(digits))
        results = {
            "digits": evidence(
                "digits", "digits", "warm.yaml", "quickstart.yaml", folder,
                [f"data.train={digits / 'train.jsonl'}", f"data.eval={digits / 'eval.jsonl'}"],
            ),
            "grounding": evidence(
                "arc_vision", "grounding", "warm.yaml", "tiny.yaml", folder,
                [f"data.train={rows / 'train.jsonl'}", f"data.eval={rows / 'test.jsonl'}"],
            ),
        }  # fmt: skip
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results.items():
        before, after = found["held_out_before"]["val/reward/mean"], found["held_out_after"]["val/reward/mean"]
        print(
            f"{name}: held-out reward {before:.3f} -> {after:.3f} in {found['steps']} steps, {found['train_seconds']} s"
        )


if __name__ == "__main__":
    main()
