"""Evidence on text: sorting digits, warmed by supervised steps and then trained by GRPO over all the actors.

    python -m rayloop.benchmarks.evidence.digits      writes benchmarks/evidence/digits.json

Held-out scores are greedy, before the first and after the last GRPO step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rayloop.run.records.jsonl import JsonLines

RESULT = Path(__file__).with_suffix(".json")


def timed(*arguments: str) -> float:
    """Run ``python -m ...`` and return its seconds. Raises CalledProcessError."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", *arguments], check=True)
    return round(time.monotonic() - began, 1)


def evidence(folder: Path) -> dict[str, Any]:
    """Make the rows, warm up, train, and collect what the run recorded."""
    rows, model = folder / "rows", folder / "warm"
    timed("rayloop.recipes.digits.prepare", "--out", str(rows))
    train = f"data.train={rows / 'train.jsonl'}"
    warm_seconds = timed("rayloop", "sft", "recipes/digits/warm.yaml", f"output={model}", f"model.path={folder / 'tiny'}", train)
    train_seconds = timed(
        "rayloop", "train", "recipes/digits/quickstart.yaml", f"output={folder}", f"model.path={model}", train,
        f"data.eval={rows / 'eval.jsonl'}",
    )  # fmt: skip
    events = list(JsonLines(folder / "digits" / "events.jsonl"))
    metrics = list(JsonLines(folder / "digits" / "metrics.jsonl"))
    scores = [{k: v for k, v in e.items() if k.startswith("val/")} for e in events if e["event"] == "evaluated"]
    steps = sorted(m["timing_s/step"] for m in metrics)
    return {
        "presets": ["recipes/digits/warm.yaml", "recipes/digits/quickstart.yaml"],
        "warm_up_seconds": warm_seconds,
        "train_seconds": train_seconds,
        "steps": len(metrics),
        "median_step_seconds": round(steps[len(steps) // 2], 2),
        "logprob_check": next(e["mean"] for e in events if e["event"] == "logprob_check"),
        "reward_by_step": [round(m["reward/mean"], 4) for m in metrics],
        "held_out_before": scores[0],
        "held_out_after": scores[-1],
        "ledger": next(e["ledger"] for e in events if e["event"] == "finished"),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        found = evidence(Path(temporary))
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    before, after = found["held_out_before"]["val/reward/mean"], found["held_out_after"]["val/reward/mean"]
    print(f"held-out reward {before:.3f} -> {after:.3f} in {found['steps']} steps, {found['train_seconds']} s")


if __name__ == "__main__":
    main()
