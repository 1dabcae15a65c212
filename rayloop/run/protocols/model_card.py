"""The model card of an exported checkpoint: its run, and each number with its protocol."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayloop.core.files import write_whole
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.folder import RunFolder

CARD = "README.md"
NUMBERS = (("val", "greedy"), ("val_sampled", "sampled"))
"""The metrics of a run's evaluations, and what they are called."""


def write_card(checkpoint: Checkpoint, out: Path) -> None:
    """Write README.md into the exported folder ``out``; the base model's is renamed.

    Raises OSError.
    """
    run = RunFolder.at(checkpoint.folder.parents[1])
    base = run.configuration["model"]["path"]
    card = out / CARD
    if card.exists():
        # The export has copied the base model's files.
        card.rename(out / "README-of-the-base-model.md")
    rows = [*_while_trained(run, checkpoint.step), *_evaluated(run, checkpoint)]
    lines = [
        f"# {run.path.name}, step {checkpoint.step}",
        "",
        f"Trained from {base} with rayloop. `eval --like` measures a number with a protocol again.",
        "",
        "|measured on|answers|score|mean and 95 % interval|protocol|",
        "|---|---|---|---|---|",
        *(f"|{'|'.join(row)}|" for row in rows),
    ]
    write_whole(card, ("\n".join(lines) + "\n").encode())


def _while_trained(run: RunFolder, step: int) -> Iterator[tuple[str, ...]]:
    """The run's own evaluation at the step; its protocol is that of the newest start."""
    protocol = ""
    for event in run.events:
        if event["event"] == "start":
            protocol = event.get("protocol", "")
        if event["event"] != "evaluated" or event["step"] != step:
            continue
        for prefix, answers in NUMBERS:
            bounds = [event.get(f"{prefix}/reward/{name}") for name in ("mean", "low", "high")]
            if bounds[0] is not None:
                yield "held-out rows of the run", answers, "reward", _shown(bounds), protocol


def _evaluated(run: RunFolder, checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """The numbers that ``eval`` measured in folders next to the run."""
    name = f"{run.path.name}-{checkpoint.folder.name}-{checkpoint.lineage}"
    for file in sorted(run.path.parent.glob(f"{run.path.name}-*/results.json")):
        results = json.loads(file.read_bytes())
        if Path(results["model"]).name != name:
            continue
        for arm, scores in results["arms"].items():
            for score, bounds in scores.items():
                yield results["data"], arm, score, _shown(bounds), results.get("protocol", "")


def _shown(bounds: Any) -> str:
    mean, low, high = bounds
    return f"{mean:.3f}" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"
