"""The reasons for which ours may differ from the originals: each holds under its conditions, and
under no others.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.vector_rules.entries import Entry
from tests.vectors import check


def verdict(reward: str, inputs: dict[str, Any], expected: Any, recipe: str = "pyvision_rl") -> str:
    """Of one entry alone: agree, deviate, MISMATCH or unknown."""
    found = Entry(recipe, reward, inputs, expected)
    answer = check(found, [found])
    return (
        "unknown"
        if answer.ok is None
        else "agree"
        if answer.ok
        else "deviate"
        if answer.why
        else "MISMATCH"
    )


SMALL, LARGE = [0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.7, 0.7]
TOOL_ONLY = {
    "score": 0.1,
    "r_task": 0.0,
    "r_tool": 0.1,
    "r_gate": 0.0,
    "iou": 0.0,
    "response_type": "tool_only",
}
ZOOM, EXACT = "<use_tool>zoom_ui_element</use_tool>", "<bbox>[0.1, 0.1, 0.2, 0.2]</bbox>"


@pytest.mark.parametrize(
    ("response", "truth", "expected", "outcome"),
    [
        ("<use_tool>zoom</use_tool><box>0.1, 0.1, 0.2, 0.2</box>", SMALL, TOOL_ONLY, "agree"),
        (ZOOM + "<bbox>[0.1, 0.2", SMALL, TOOL_ONLY, "agree"),
        (ZOOM + "<bbox>[1e-1]\n</bbox>", SMALL, TOOL_ONLY, "agree"),
        (ZOOM + "<bbox>[1e-1]\n</bbox>", SMALL, TOOL_ONLY | {"score": 0.2}, "MISMATCH"),
        (
            "<tool_call>wait</tool_call><tool_call>crop</tool_call>" + EXACT,
            SMALL,
            {"score": 0.715},
            "agree",
        ),
        ("<tool_call>wait</tool_call>" + EXACT, SMALL, {"score": 0.72}, "MISMATCH"),
        ("<BBOX>[0.8, 0.8, 0.9, 0.9]</BBOX>" + EXACT, SMALL, {"score": -0.03, "iou": 0.0}, "agree"),
        (EXACT, SMALL, {"score": 0.0, "iou": 0.0}, "MISMATCH"),
        (EXACT, [0.2, 0.1, 0.1, 0.2], {"score": 0.0}, "MISMATCH"),
    ],
)
def test_arc_visions_function_is_reproduced(
    response: str, truth: Any, expected: Any, outcome: str
) -> None:
    inputs = {"response": response, "ground_truth": truth}
    assert verdict("arc_vision_custom_reward.score", inputs, expected, "arc_vision") == outcome


def test_the_librarys_single_precision_is_reproduced() -> None:
    exactly = {
        "response": "<bbox>[0.25, 0.25, 0.5, 0.45]</bbox>",
        "ground_truth": [0.25, 0.25, 0.5, 0.45],
    }
    for expected, outcome in ((0.6, "agree"), (0.63, "MISMATCH"), (0.5, "MISMATCH")):
        assert (
            verdict("arc_vision_reward.compute_score", exactly, expected, "arc_vision") == outcome
        )
    larger = exactly | {"ground_truth": [0.25, 0.25, 0.5, 0.46]}
    assert verdict("arc_vision_reward.compute_score", larger, 0.6, "arc_vision") == "MISMATCH"


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        (
            "ZoomTool.execute x4",
            {"region": [0, 0, 1, 1], "zoom_factor": 2.0},
            [-0.05, -0.05, -0.2, -0.2],
        ),
        (
            "ZoomTool.execute x2",
            {"region": [-1, 0, 0.5, 2], "zoom_factor": 0.1},
            [0.1 - 0.15, 0.1 - 0.15],
        ),
        ("ZoomTool.execute x2", {}, [0.3, 0.24]),
        ("WaitTool.execute x2", {"duration": 9.0}, [0.15, -0.2]),
        ("WaitTool.execute x3", {"duration": 0.1}, [0.15, 0.105, -0.1]),
        ("InspectTool.execute x4", {"type": "properties"}, [0.15, 0.12, 0.096, -0.05]),
        ("InspectTool.execute x3", {"type": "structure"}, [0.1, 0.08, -0.05]),
    ],
)
def test_rewards_of_simulated_steps_are_reproduced(
    name: str, inputs: dict[str, Any], expected: list[float]
) -> None:
    assert verdict(name, inputs, expected, "arc_vision") == "agree"
    assert verdict(name, inputs, [value + 0.01 for value in expected], "arc_vision") == "MISMATCH"


def boxed(answer: str) -> str:
    return f"<answer>\n\\boxed{{{answer}}}\n</answer>"


WRONG, RIGHT = {"score": 0.0, "is_answer_right": False}, {"score": 1.0, "is_answer_right": True}
RAISES = {"raises": "TimeoutError"}


@pytest.mark.parametrize(
    ("name", "response", "truth", "reply", "expected", "outcome"),
    [
        ("multi_task", boxed("blue"), "blue", "1", RIGHT, "agree"),
        ("multi_task", boxed("blue"), "blue", "1", WRONG, "MISMATCH"),
        ("multi_task", boxed("navy"), "blue", "1", RIGHT, "agree"),
        ("multi_task", boxed("navy"), "blue", "0", WRONG, "agree"),
        ("multi_task", boxed("navy"), "blue", " 1\n", RIGHT, "agree"),
        ("multi_task", boxed("7"), "5", "1", RIGHT, "agree"),
        ("multi_task", boxed("7"), "5", "0", RIGHT, "MISMATCH"),
        ("multi_task", boxed("x" * 1000), "blue", "1", RIGHT, "MISMATCH"),
        (
            "general",
            boxed("x" * 1000),
            "blue",
            "correct: yes",
            {"score": 0.0, "is_answer_right": True},
            "agree",
        ),
        ("general", boxed("navy"), "blue", "Correct: no, or correct: yes", WRONG, "agree"),
        ("multi_task", "<answer>navy</answer>", "blue", "1", WRONG, "agree"),
        ("multi_task", boxed("navy") + "<answer>", "blue", "1", WRONG, "agree"),
        ("multi_task", boxed("navy").replace("\n", "\r\n"), "blue", "1", WRONG, "agree"),
        (
            "multi_task",
            boxed("navy") + "<|vision_start|><|image_pad|>",
            "blue",
            "1",
            WRONG,
            "agree",
        ),
        ("multi_task", boxed("navy"), "blue", "TimeoutError('down')", RAISES, "agree"),
        ("multi_task", boxed("navy"), "blue", "ConnectionError('down')", RAISES, "agree"),
        ("multi_task", boxed("navy"), "blue", "Judgement: 10/10 wrong", RIGHT, "agree"),
        (
            "multi_task",
            boxed("x" * 1000),
            "blue",
            "1",
            {"score": 0.0, "is_answer_right": True},
            "agree",
        ),
        ("general", boxed("navy"), "blue", "TimeoutError('down')", WRONG, "agree"),
        ("general", boxed("navy"), "blue", "correct: yes", RIGHT, "agree"),
        ("general", boxed("navy"), "blue", "1", WRONG, "agree"),
        ("vl", "<answer>navy</answer>", "blue", "TimeoutError('down')", WRONG, "agree"),
        ("vl", "navy", "blue", "TimeoutError('down')", WRONG, "agree"),
    ],
)
def test_the_verifiers_are_reproduced(
    name: str, response: str, truth: str, reply: str, expected: Any, outcome: str
) -> None:
    full = {"multi_task": "multi_task_verifier", "general": "general_verifier", "vl": "vl_agent"}[
        name
    ]
    inputs = {
        "response": response,
        "ground_truth": truth,
        "judge_reply": reply,
        "data_source": "deepeyes",
    }
    assert verdict(f"{full}.compute_score", inputs, expected) == outcome


def test_only_a_source_without_examples_makes_the_original_fail() -> None:
    inputs = {"response": boxed("navy"), "ground_truth": "blue", "judge_reply": "1"}
    for source, outcome in (("chart", "agree"), ("deepeyes", "MISMATCH")):
        row = inputs | {"data_source": source}
        assert (
            verdict("multi_task_verifier.compute_score", row, {"raises": "UnboundLocalError"})
            == outcome
        )


@pytest.mark.parametrize(
    ("text", "expected", "outcome"),
    [
        (boxed("blue"), "red", "MISMATCH"),
        (boxed("a\\}"), "a\\}", "agree"),
        (boxed("a}b"), "a}b", "agree"),
        (boxed("\\boxed{x}"), "\\boxed{x}", "agree"),
        ("<answer>blue</answer>", None, "agree"),
        (boxed("hack") + boxed("blue"), "hack", "agree"),
        ("<answer>\n\\boxed{a" + boxed("b"), "a<answer>\n\\boxed{b", "agree"),
        ("none", "blue", "MISMATCH"),
    ],
)
def test_the_first_block_is_read(text: str, expected: Any, outcome: str) -> None:
    assert verdict("env.extract_answer (verifier)", {"text": text}, expected) == outcome


@pytest.mark.parametrize(
    ("turn", "held"),
    [
        ("<answer>blue</answer>", "blue"),
        ("<answer>\n\\boxed{7}\n</answer>", "\n\\boxed{7}\n"),
        ("<code>\n```python\nprint(1)\n```\n</code><answer>a</answer> no, <answer>b</answer>", "b"),
    ],
)
def test_an_answer_ends_the_episode_unpaid_and_unanswered(turn: str, held: str) -> None:
    ended = {"obs": "", "reward": 0.0, "done": True, "info": {"final_answer": held}}
    assert verdict("env.execute", {"action": turn}, ended) == "agree"


@pytest.mark.parametrize(
    ("response", "truth", "score", "outcome"),
    [
        ("8.5", "10", 0.7, "agree"),
        ("1,000", "1000", 0.0, "agree"),
        ("12,345.6", "10", 0.6, "agree"),
        ("1,00", "1", 1.0, "agree"),
        ("１２", "12", 1.0, "agree"),
        ("0.00001", 1e-05, 1.0, "agree"),
        ("1000", "1000", 0.0, "MISMATCH"),
    ],
)
def test_the_first_number_is_read_up_to_a_comma(
    response: str, truth: Any, score: float, outcome: str
) -> None:
    inputs, expected = (
        {"response": response, "ground_truth": truth},
        {"score": score, "is_answer_right": score >= 0.5},
    )
    assert verdict("rule_match_verify.compute_score_rule_mra", inputs, expected) == outcome


@pytest.mark.parametrize(
    ("name", "recipe", "rewards", "expected", "outcome"),
    [
        (
            "grpo_w_anb advantage",
            "pyvision_rl",
            [1.3, 1.1, 1.0, 1.2],
            [3e5, 1e5, 0, 2e5],
            "deviate",
        ),
        ("grpo_w_anb advantage", "pyvision_rl", [1.3, 1.1, 1.0, 0], [3e5, 1e5, 0, 2e5], "MISMATCH"),
        ("grpo_outcome_advantage eps 1e-4", "verl", [1.0], [0.9999], "deviate"),
        ("grpo_outcome_advantage", "verl", [0.3] * 8, [0.0289] * 8, "deviate"),
        ("grpo_outcome_advantage", "verl", [1.0] * 8, [0.0289] * 8, "MISMATCH"),
        ("paper advantage (r-mean)/max(1, population std)", "chart_rvr", [5.0], [0.0], "deviate"),
        (
            "paper advantage (r-mean)/max(1, population std)",
            "chart_rvr",
            [5.0, 3.0],
            [0.0, 0.0],
            "MISMATCH",
        ),
    ],
)
def test_the_advantages_reasons_hold_under_their_conditions_only(
    name: str, recipe: str, rewards: Any, expected: Any, outcome: str
) -> None:
    assert verdict(name, {"group_rewards": rewards}, expected, recipe) == outcome


def test_the_std_of_the_binarised_baseline_is_that_of_success() -> None:
    inputs = {"group_rewards": [-0.2, 1, -0.2, 0.5], "norm_by_std": False}
    expected = {"advantages": [-1.2, 0, -1.2, -0.5], "group_std_unbiased": 0.0}
    assert verdict("grpo_w_anb advantage", inputs, expected) == "agree"


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ({"end_reason": ["DONE", "ON_GOING"]}, [0]),
        ({"reserve": ["OVER_LENGTH"]}, [0, 1]),
        ({"end_reason": ["DONE", "OVER_LENGTH"], "reserve": []}, []),
    ],
)
def test_the_filter_of_end_reasons(inputs: dict[str, Any], kept: list[int]) -> None:
    row = {"groups": "aa", "rewards": [1, 0], "filters": ["end_reason"]} | inputs
    assert verdict("partial dynamic filtering", row, kept) == "agree"


CLIP = "policy_loss clip .2/.3 dual 3 token-mean"


@pytest.mark.parametrize(
    ("name", "inputs", "expected", "outcome"),
    [
        (CLIP, {"ratios": [3.0], "advantage": -1}, {"pg_loss": 3.0, "clip_lo": 0.0}, "agree"),
        (
            CLIP,
            {"ratios": [1.5, 0.5, 3], "advantage": [1, -1, 1], "mask": [1, 1, 0]},
            {"pg_loss": -0.25},
            "agree",
        ),
        (CLIP, {"ratios": [[1.5, 0.5], [1, 2]], "advantage": [1, -1]}, {"pg_loss": 0.3}, "agree"),
        (
            CLIP,
            {"ratios": [[1.5, 0.5], [1, 2]], "advantage": [[1], [-1]]},
            {"pg_loss": 0.3},
            "agree",
        ),
        (
            CLIP,
            {"ratios": [1.0, 1.0], "advantage": [1, 2, 3]},
            {"raises": "ValueError"},
            "MISMATCH",
        ),
        ("agg_loss token-mean", {"loss": [[1, 2]], "mask": [[0, 0]]}, 0.0, "deviate"),
        ("agg_loss token-mean", {"loss": [[1, 2]], "mask": [[0, 1]]}, 0.0, "MISMATCH"),
        (
            "agg_loss seq-mean-token-mean",
            {"loss": [[1, 2], [3, 4]], "mask": [[1, 1], [0, 0]]},
            math.nan,
            "deviate",
        ),
        (
            "agg_loss seq-mean-token-mean",
            {"loss": [[1, 2], [3, 4]], "mask": [[1, 1], [0, 1]]},
            math.nan,
            "MISMATCH",
        ),
        ("low_var_kl", {"logp": -1.0, "ref_logp": -4.0}, 2.049787, "agree"),
        ("low_var_kl", {"logp": -9.0, "ref_logp": -1.0}, 10.0, "deviate"),
        ("low_var_kl", {"logp": -1.0, "ref_logp": -4.0}, 10.0, "MISMATCH"),
    ],
)
def test_the_losses_reasons_hold_under_their_conditions_only(
    name: str, inputs: dict[str, Any], expected: Any, outcome: str
) -> None:
    assert verdict(name, inputs, expected) == outcome


def test_replay_at_its_limits() -> None:
    name, stored = "replay step (n=2, buffer 8 per task)", ["s1_0"]
    fresh = {"batch_after": ["s1_0", "s1_1"], "buffer_after": stored}
    before = Entry("arpo", name, {"step": "s1", "evals": [1, 0]}, fresh)
    for results, first, outcome in (
        ([0.05, 0.15], "s2_0", "agree"),
        ([0.21, 0.11], "s1_0", "deviate"),
        ([0.21, 0.12], "s2_0", "MISMATCH"),
    ):
        kept = [f"s2_{i}" for i, result in enumerate(results) if result > 0.1]
        expected = {"batch_after": [first, "s2_1"], "buffer_after": stored + kept}
        row = Entry("arpo", name, {"step": "s2", "evals": results}, expected)
        answer = check(row, [before, row])
        assert ("agree" if answer.ok else "deviate" if answer.why else "MISMATCH") == outcome, (
            results
        )


def test_a_rule_that_breaks_is_no_error_of_ours() -> None:
    """Errors count as such when our code raises them on purpose, not when pydantic or torch refuse
    what the rule made.
    """
    broken = {"group_rewards": [1, 0], "eps": -1}
    assert verdict("grpo_outcome_advantage", broken, {"raises": "ValueError"}, "verl") == "MISMATCH"
    assert (
        verdict("grpo_outcome_advantage", {"group_rewards": []}, {"raises": "ValueError"}, "verl")
        == "agree"
    )
