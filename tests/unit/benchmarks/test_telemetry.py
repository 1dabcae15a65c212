"""The traces that Arc Vision planned, from a run's rollouts: every line is JSON, with the fields
that they were to have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.telemetry import FILES, main, telemetry
from rayloop.core.failures import DataFailure
from rayloop.run.records.rollouts import RolloutDump, RolloutRecord, RolloutTurn

LARGE, SMALL = [0.3, 0.3, 0.7, 0.7], [0.4, 0.4, 0.5, 0.5]
ZOOM = "<use_tool>zoom_ui_element</use_tool>"
WAIT = '<tool_call>{"name": "wait_for_ui"}</tool_call>'


def said(box: list[float]) -> str:
    return f"<bbox>{box}</bbox>"


def record(truth: Any, *texts: str, sample: int = 0) -> RolloutRecord:
    turns = [
        turn
        for text in texts
        for turn in (RolloutTurn("assistant", text, True), RolloutTurn("tool", ZOOM, False))
    ]
    return RolloutRecord(
        3,
        sample,
        0,
        "row-1",
        "arc_vision",
        "find it",
        (),
        tuple(turns[:-1]),
        "done",
        0.5,
        truth=truth,
        length=90,
        sampled_tokens=20,
    )


def written(folder: Path, *records: RolloutRecord) -> dict[str, list[dict[str, Any]]]:
    (folder / "rollouts").mkdir(exist_ok=True)
    RolloutDump(folder / "rollouts").write(7, records, {})
    telemetry(folder)
    return {
        name: [
            json.loads(line)
            for line in (
                (folder / "telemetry" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            )
        ]
        for name in FILES
    }


def test_a_good_answer_after_two_calls(tmp_path: Path) -> None:
    text = "<reasoning>It is hard to see.</reasoning>" + ZOOM
    found = written(tmp_path, record(SMALL, text, WAIT, said(SMALL)))
    (trace,), (effect,), (pattern,), (odd,) = (found[name] for name in FILES)
    assert {key: trace[key] for key in ("step", "group", "sample", "task")} == {
        "step": 7,
        "group": 3,
        "sample": 0,
        "task": "row-1",
    }
    assert (trace["prompt_length"], trace["response_length"]) == (70, 20)
    assert (trace["reasoning_text"], trace["reasoning_length"], trace["has_reasoning"]) == (
        "It is hard to see.",
        18,
        True,
    )
    assert (trace["tools_used"], trace["tool_invocations"], trace["has_tool_calls"]) == (
        ["zoom", "wait"],
        2,
        True,
    )
    assert (trace["actual_iou"], trace["ground_truth_bbox"]) == (1.0, SMALL)
    assert (trace["confidence"], effect["confidence"]) == (None, None)
    assert (
        effect["tool_effective"],
        effect["performance_category"],
        effect["difficulty_category"],
    ) == (True, "excellent", "hard")
    assert effect["bbox_area"] == pattern["ground_truth_area"] == pytest.approx(0.01)
    assert [pattern[f"used_{tool}"] for tool in ("zoom", "wait", "inspect")] == [True, True, False]
    assert pattern["multiple_tools"]
    assert pattern["tool_effective"]
    assert [name for name, value in odd["contradictions"].items() if value] == [
        "unnecessary_tool_use"
    ]
    assert (odd["contradiction_count"], odd["reasoning_snippet"]) == (1, "It is hard to see.")
    assert (odd["actual_iou"], odd["tools_used"], odd["tool_count"], odd["reasoning_length"]) == (
        1.0,
        ["zoom", "wait"],
        2,
        18,
    )


ORIGINAL = {
    "reasoning_traces": (
        "timestamp prompt_length response_length reasoning_text reasoning_length tools_used"
        " tool_invocations actual_iou ground_truth_bbox has_reasoning has_tool_calls"
    ),
    "tool_effectiveness": (
        "timestamp tool_used tools_used tool_count actual_iou bbox_area is_small_object"
        " is_edge_object tool_effective performance_category difficulty_category"
    ),
    "tool_patterns": (
        "timestamp tools_used tool_count actual_iou tool_effective ground_truth_area used_zoom"
        " used_wait used_inspect multiple_tools"
    ),
    "contradictions": (
        "timestamp actual_iou tools_used tool_count reasoning_length contradictions"
        " contradiction_count reasoning_snippet"
    ),
}
"""The fields of arc_vision_custom_reward.py of jbarnes850/verl at b2577e0."""


def test_each_file_has_the_fields_of_the_originals(tmp_path: Path) -> None:
    found = written(
        tmp_path, record(LARGE, "<think>" + "unclear " * 30 + "</think>" + ZOOM, said(SMALL))
    )
    assert [name for name in FILES if not set(ORIGINAL[name].split()) <= set(found[name][0])] == []
    (odd,) = found["contradictions"]
    kinds = {
        "unnecessary_tool_use",
        "missed_tool_opportunity",
        "ineffective_tool_use",
        "reasoning_tool_mismatch",
    }
    assert set(odd["contradictions"]) == kinds
    assert odd["reasoning_snippet"] == ("unclear " * 30)[:200] + "..."


@pytest.mark.parametrize(
    ("texts", "kinds"),
    [
        ((said(LARGE),), []),
        ((said([0.0, 0.0, 0.1, 0.1]),), ["missed_tool_opportunity"]),
        ((ZOOM, said([0.0, 0.0, 0.1, 0.1])), ["ineffective_tool_use"]),
        (("<reasoning>I am NOT SURE.</reasoning>" + said(LARGE),), ["reasoning_tool_mismatch"]),
    ],
)
def test_only_contradictions_are_written_as_such(
    texts: tuple[str, ...], kinds: list[str], tmp_path: Path
) -> None:
    odd = written(tmp_path, record(LARGE, *texts))["contradictions"]
    assert [[name for name, value in line["contradictions"].items() if value] for line in odd] == [
        kinds
    ] * bool(kinds)


@pytest.mark.parametrize(
    ("answer", "iou", "category"),
    [
        ([0.3, 0.3, 0.7, 0.66], 0.9, "excellent"),
        ([0.3, 0.3, 0.7, 0.54], 0.6, "good"),
        ([0.3, 0.3, 0.7, 0.38], 0.2, "poor"),
        ([0.0, 0.0, 0.1, 0.1], 0.0, "failed"),
    ],
)
def test_performance_by_overlap(
    answer: list[float], iou: float, category: str, tmp_path: Path
) -> None:
    (effect,) = written(tmp_path, record(LARGE, said(answer)))["tool_effectiveness"]
    assert (effect["actual_iou"], effect["performance_category"]) == (pytest.approx(iou), category)
    assert (effect["tool_used"], effect["tool_effective"], effect["difficulty_category"]) == (
        False,
        False,
        "easy",
    )


def test_the_command_counts_lines_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "keep_rollouts above 0" in capsys.readouterr().err
    written(tmp_path, record(LARGE, said(LARGE)), record(LARGE, said(LARGE), sample=1))
    assert main([str(tmp_path)]) == 0
    assert (
        "reasoning_traces 2, tool_effectiveness 2, tool_patterns 2, contradictions 0"
        in capsys.readouterr().out
    )
    with pytest.raises(DataFailure, match=r"step_000007\.jsonl:1"):
        written(tmp_path, record("no box", said(LARGE)))
