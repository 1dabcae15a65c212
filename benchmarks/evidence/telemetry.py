"""``python -m benchmarks.evidence.telemetry RUN...`` reports how a policy used its tools, from kept
rollouts: JSONL in ``RUN/telemetry`` with the names and fields (``FIELDS``) of Arc Vision's planned
logs, a line for each trajectory.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.core.files import write_whole
from rayloop.recipes.arc_vision.boxes import confidence
from rayloop.recipes.arc_vision.data import box
from rayloop.recipes.arc_vision.reward import ArcVisionReward, EpisodeTexts, arc_vision, inside
from rayloop.rewards.saved import texts_of
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import SCHEMA_VERSION, JsonLines, encode

FIELDS = {
    "reasoning_traces": (
        "prompt_length",
        "response_length",
        "reasoning_text",
        "reasoning_length",
        "tools_used",
        "tool_invocations",
        "actual_iou",
        "ground_truth_bbox",
        "has_reasoning",
        "has_tool_calls",
        "confidence",
    ),
    "tool_effectiveness": (
        "tool_used",
        "tools_used",
        "tool_count",
        "actual_iou",
        "bbox_area",
        "is_small_object",
        "is_edge_object",
        "tool_effective",
        "performance_category",
        "difficulty_category",
        "confidence",
    ),
    "tool_patterns": (
        "tools_used",
        "tool_count",
        "actual_iou",
        "tool_effective",
        "ground_truth_area",
        "used_zoom",
        "used_wait",
        "used_inspect",
        "multiple_tools",
    ),
    "contradictions": (
        "actual_iou",
        "tools_used",
        "tool_count",
        "reasoning_length",
        "contradictions",
        "contradiction_count",
        "reasoning_snippet",
    ),
}
FILES = tuple(FIELDS)
TOOLS = ("zoom", "crop", "wait", "inspect")
"""Names of tools: the first that a call contains is its name.

Other calls are counted without a name.
"""
UNSURE = ("unclear", "difficult", "hard to see", "not sure")
"""Words of reasoning about a box that needs a closer look."""
PERFORMANCE = ((0.8, "excellent"), (0.5, "good"), (0.1, "poor"), (-1.0, "failed"))
SNIPPET_CHARACTERS = 200
"""Characters of the reasoning beside a contradiction."""


def telemetry(run: Path) -> dict[str, int]:
    """Write the four files; return the lines of each.

    Raises ConfigError without rollouts, DataFailure for a truth without box.
    """
    files = RunFolder.at(run).rollouts.files()
    if not files:
        raise ConfigError(
            f"{run} has no rollouts: give a run folder of a run with keep_rollouts above 0"
        )
    lines: dict[str, list[str]] = {name: [] for name in FILES}
    for file in files.values():
        written = file.stat().st_mtime
        for number, record in enumerate(JsonLines(file), start=1):
            for name, found in _lines(record, f"{file}:{number}"):
                who = {key: record[key] for key in ("step", "group", "sample", "task")}
                lines[name].append(
                    encode({"schema_version": SCHEMA_VERSION, "timestamp": written, **who, **found})
                )
    folder = run / "telemetry"
    folder.mkdir(exist_ok=True)
    for name, every in lines.items():
        write_whole(
            folder / f"{name}.jsonl", "".join(f"{line}\n" for line in every).encode(), durable=False
        )
    return {name: len(every) for name, every in lines.items()}


def _lines(record: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of one trajectory, each with the name of its file; none for a trajectory without
    turns.
    """
    texts, settings = texts_of(record, where), ArcVisionReward.Settings()
    if not texts:
        return
    truth = box(record["truth"], where)
    found = arc_vision(EpisodeTexts(texts), truth, settings).components
    calls = [
        call.lower() for tag in settings.call_tags for text in texts for call in inside(tag, text)
    ]
    names = [name for call in calls if (name := next((tool for tool in TOOLS if tool in call), ""))]
    reasoning = "\n".join(
        part for tag in ("reasoning", "think") for text in texts for part in inside(tag, text)
    ).strip()
    overlap, small, edge = found["iou"], bool(found["small"]), bool(found["edge"])
    odd = _contradictions(len(calls), overlap, reasoning)
    facts = {
        "prompt_length": record["length"] - record["sampled_tokens"],
        "response_length": record["sampled_tokens"],
        "reasoning_text": reasoning,
        "reasoning_length": len(reasoning),
        "has_reasoning": bool(reasoning),
        "tools_used": names,
        "tool_used": bool(calls),
        "has_tool_calls": bool(calls),
        "multiple_tools": len(names) > 1,
        "tool_invocations": len(calls),
        "tool_count": len(calls),
        "used_zoom": "zoom" in names or "crop" in names,
        "used_wait": "wait" in names,
        "used_inspect": "inspect" in names,
        "tool_effective": bool(calls) and overlap > 0.5,
        "actual_iou": overlap,
        "ground_truth_bbox": truth,
        "bbox_area": found["area"],
        "ground_truth_area": found["area"],
        "is_small_object": small,
        "is_edge_object": edge,
        "difficulty_category": "hard" if small else "medium" if edge else "easy",
        "performance_category": next(word for least, word in PERFORMANCE if overlap > least),
        "confidence": confidence(texts[-1]),
        "contradictions": odd,
        "contradiction_count": sum(odd.values()),
        "reasoning_snippet": reasoning[:SNIPPET_CHARACTERS]
        + "..." * (len(reasoning) > SNIPPET_CHARACTERS),
    }
    for name, fields in FIELDS.items():
        if name != "contradictions" or any(odd.values()):
            yield name, {field: facts[field] for field in fields}


def _contradictions(calls: int, overlap: float, reasoning: str) -> dict[str, bool]:
    return {
        "unnecessary_tool_use": calls > 0 and overlap > 0.8,
        "missed_tool_opportunity": calls == 0 and overlap < 0.3,
        "ineffective_tool_use": calls > 0 and overlap < 0.5,
        "reasoning_tool_mismatch": calls == 0 and any(word in reasoning.lower() for word in UNSURE),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 with one line that says why there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence.telemetry", description="See the recipe's README."
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    runs: list[Path] = parser.parse_args(arguments).runs
    for run in runs:
        try:
            counts = telemetry(run)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        print(
            f"{run / 'telemetry'}: "
            + ", ".join(f"{name} {count}" for name, count in counts.items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
