"""``score``: what is printed about saved completions, and what is not a score."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop import recipes
from rayloop.cli import main
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.data.rows import parsed
from rayloop.measure import intervals
from rayloop.measure.intervals import interval
from rayloop.rewards.saved import texts_of, truth_of

COMPLETIONS = Path(__file__).parents[2] / "data" / "chart_rvr" / "completions.jsonl"
Asked = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    """Lines of stdout as JSON, and stderr."""

    def ask(*words: object) -> tuple[list[dict[str, Any]], str]:
        assert main(["score", *map(str, words)]) == 0
        out, err = capsys.readouterr()
        return [json.loads(line) for line in out.splitlines()], err

    return ask


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows),
            encoding="utf-8",
        )
        return path

    return write


def test_the_answers_of_real_completions_are_those_that_were_extracted(asked: Asked) -> None:
    """Of the 100 rows, four have no answer tag: all else is read alike, and scored as the published
    evaluation did.
    """
    given = [json.loads(line) for line in COMPLETIONS.read_text(encoding="utf-8").splitlines()]
    lines, err = asked("chart_rvr", COMPLETIONS)
    untagged = [i for i, row in enumerate(given) if "<answer>" not in row["completion"]]
    assert [line["row"] for line in lines] == list(range(1, 101))
    assert [i for i in range(100) if lines[i]["answer"] != given[i]["extracted_answer"]] == untagged
    assert "answers equal to extracted_answer: 96 of 100 (96.00 %)" in err
    assert len(untagged) == err.count("read None") == 4
    original, err = asked("chart_rvr", COMPLETIONS, "--variant", "original")
    assert [line["answer"] for line in original] == [row["extracted_answer"] for row in given]
    relaxed = sum(line["components"]["relaxed"] for line in original) / 100
    exact = sum(line["components"]["exact"] for line in original) / 100
    assert f"extracted_answer as published: relaxed {relaxed:.4f}, exact {exact:.4f}" in err
    assert (
        exact == sum(row["extracted_answer"].lower() == row["gold"].lower() for row in given) / 100
    )


def test_the_summary_has_means_with_intervals_and_counts(
    asked: Asked, file: Callable[..., Path]
) -> None:
    rows = [
        {"completion": f"<think></think><answer>{i % 2}</answer>", "label": "1"} for i in range(40)
    ]
    lines, err = asked("chart_rvr", file(*rows), "--reward", "accuracy_reward")
    assert [line["value"] for line in lines] == [0.0, 1.0] * 20
    assert lines[0]["components"] == {"accuracy": 0.0}
    mean, low, high = interval([0.0, 1.0] * 20)
    assert f"reward    {mean:.4f}  [{low:.4f}, {high:.4f}]" in err
    assert err.startswith("40 scored (corrected), 0 unscored\n")
    assert "unparsable_table 40" in err
    assert "components/s" in err


def test_what_has_no_reward_says_why(asked: Asked, file: Callable[..., Path]) -> None:
    good = {"completion": "<think></think><answer>1</answer>", "label": "1"}
    path = file(
        good,
        "{no json",
        [1],
        {"label": "1"},
        {"completion": "x"},
        good | {"table": [1]},
        good | {"label": " "},
    )
    lines, err = asked("chart_rvr", path)
    assert [line.get("unscored") for line in lines] == [None] + ["bad_data"] * 6
    assert all("value" not in line and line["reason"] for line in lines[1:])
    assert [line["row"] for line in lines] == list(range(1, 8))
    assert err.startswith("1 scored (corrected), 6 unscored: bad_data 6\n")


def test_the_process_reward_needs_an_embedder_and_takes_one(
    asked: Asked, file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reasoning = "<step-1>: read"
    path = file({"completion": f"<think>{reasoning}</think>", "label": "1", "reasoning": reasoning})
    assert main(["score", "chart_rvr", str(path), "--reward", "process"]) == ConfigError.exit_code
    assert "none is configured" in capsys.readouterr().err
    words = "embedder.use=rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder"
    (line,), _ = asked("chart_rvr", path, "--reward", "process_style_reward", "--with", words)
    assert line["value"] == pytest.approx(1.0)
    gone = (
        "embedder={use: rayloop.recipes.chart_rvr.rewards.embedders:OpenAiEmbedder, with: {url:"
        " http://127.0.0.1:9/v1}}"
    )
    (line,), _ = asked("chart_rvr", path, "--reward", "process", "--with", gone)
    assert line["unscored"] == "reward_unavailable"


def test_grounding_is_scored_from_a_file_and_from_a_runs_rollouts(
    asked: Asked, file: Callable[..., Path]
) -> None:
    turns = [
        {"role": "assistant", "text": "<bbox>[0,0,1,1]</bbox>", "sampled": True},
        {"role": "tool", "text": "<bbox>[0,0,1,1]</bbox>", "sampled": False},
        {"role": "assistant", "text": "<bbox>[0.1,0.1,0.3,0.3]</bbox>", "sampled": True},
    ]
    path = file(
        {"completion": "<bbox>[0.1,0.1,0.2,0.3]</bbox>", "ground_truth": "[0.1, 0.1, 0.3, 0.3]"},
        {"task": "t7", "turns": turns, "truth": [0.1, 0.1, 0.3, 0.3]},
        {"task": "t8", "turns": turns, "truth": [1, 2, 3, 4]},
    )
    lines, _ = asked("arc_vision", path, "--reward", "iou")
    assert [line.get("value") for line in lines] == [pytest.approx(0.5), pytest.approx(1.0), None]
    assert lines[1]["id"] == "t7"
    assert lines[1]["answer"] == "[0.1,0.1,0.3,0.3]"
    pixels = file(
        {"completion": "<box>100, 100, 200, 300</box>", "ground_truth": [0.1, 0.1, 0.3, 0.3]}
    )
    assert asked("arc_vision", pixels)[0][0]["components"]["format"] == 0.0
    assert asked("arc_vision", pixels, "--variant", "original")[0][0]["components"]["format"] == 1.0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--variant", "mine"], "has corrected, original, fork, paper"),
        (["--reward", "mine"], "has format, accuracy"),
        (["--with", "tolerance"], "expected KEY=VALUE"),
        (["--with", "tolerance=2"], "tolerance: Input should be less than 1"),
        (["--with", "variant.x=2"], "variant has no keys"),
        (["--with", "colour=red"], "colour: Extra inputs"),
    ],
)
def test_what_cannot_be_asked_for_is_named(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", "chart_rvr", str(COMPLETIONS), *words]) == ConfigError.exit_code
    assert why in capsys.readouterr().err


def test_completions_are_found_in_the_usual_columns() -> None:
    said = {"role": "assistant", "content": "b"}
    assert texts_of({"completion": "a"}, "x") == texts_of({"texts": ["a"]}, "x") == ("a",)
    assert texts_of({"messages": [{"role": "user", "content": "a"}, said]}, "x") == ("b",)
    for row in (
        {},
        {"completion": 7},
        {"turns": []},
        {"messages": [{"role": "user", "content": "a"}]},
    ):
        with pytest.raises(DataFailure, match="x: "):
            texts_of(row, "x")
    assert truth_of({"gold": 0, "label": None}, ("label", "gold"), "x") == 0
    assert [parsed(value) for value in ("[1]", "[a]", "7", None)] == [[1], "[a]", "7", None]


def test_recipes_that_score_name_what_they_have() -> None:
    assert {"arc_vision", "chart_rvr"} <= set(recipes.having("score"))


def test_an_interval_of_many_items_picks_them_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50).tolist()
    whole = interval(values)
    monkeypatch.setattr(intervals, "BLOCK_ITEMS", 170)
    assert interval(values) == whole


BOXED = "<answer>\n\\boxed{blue}\n</answer>"
CODE = {
    "role": "assistant",
    "text": "<code>\n```python\nx\n```\n</code>",
    "sampled": True,
    "executed": True,
    "images": [],
}
SEEN = {"role": "user", "text": "...", "sampled": False, "images": [{"width": 9, "height": 9}]}


@pytest.mark.parametrize(
    ("recipe", "variant", "row", "value"),
    [
        ("digits", "corrected", {"completion": "1 2 3", "ground_truth": [1, 2, 4]}, 2 / 3),
        ("arpo", "corrected", {"completions": ["Action: wait()"], "env_result": 0.25}, 0.25),
        ("arpo", "original", {"completion": "Action: press(key='a')", "eval_result": 1}, 0.5),
        ("arpo", "corrected", {"completion": "no", "components": {"success": 1.0}}, 0.5),
        ("pyvision", "corrected", {"completion": BOXED, "answer": "blue", "calls": 3}, 1.3),
        (
            "pyvision",
            "corrected",
            {"turns": [CODE, SEEN, {**CODE, "text": BOXED}], "truth": "blue"},
            1.2,
        ),
        (
            "pyvision",
            "original",
            {"completion": "x", "transcript": BOXED, "answer": "blue", "data_source": "vstar"},
            1.0,
        ),
        (
            "pyvision",
            "deepeyes",
            {"turns": [CODE, SEEN, {**CODE, "text": BOXED}], "truth": "blue"},
            2.0,
        ),
        ("pyvision", "deepeyes-original", {"completion": "blue", "answer": "blue"}, 0.8),
        (
            "arc_vision",
            "corrected",
            {
                "completion": "<bbox>[300,300,700,700]</bbox>",
                "ground_truth": [0.3, 0.3, 0.7, 0.7],
                "image_size": [1000, 1000],
            },
            0.63,
        ),
        (
            "arc_vision",
            "library",
            {"completion": "[0.3,0.3,0.7,0.7]", "ground_truth": [0.3, 0.3, 0.7, 0.7]},
            0.63,
        ),
    ],
)
def test_every_recipe_scores_what_was_saved(
    recipe: str,
    variant: str,
    row: dict[str, Any],
    value: float,
    asked: Asked,
    file: Callable[..., Path],
) -> None:
    (line,), _ = asked(recipe, file(row), "--variant", variant)
    assert line["value"] == pytest.approx(value)
    assert {"components", "flags", "answer"} <= set(line)


def test_every_recipe_with_a_reward_can_be_scored() -> None:
    assert recipes.having("score") == [
        "arc_vision",
        "arpo",
        "chart_rvr",
        "digits",
        "pyvision",
        "reasoning",
    ]


def test_a_saved_episode_without_a_result_has_no_reward(
    asked: Asked, file: Callable[..., Path]
) -> None:
    lines, err = asked(
        "arpo", file({"completion": "Action: wait()"}, {"completion": "x", "env_result": "much"})
    )
    assert [line["unscored"] for line in lines] == ["invalid_reward", "bad_data"]
    assert "0 scored (corrected), 2 unscored" in err


def test_stated_confidences_are_reported_with_their_calibration(
    asked: Asked, file: Callable[..., Path]
) -> None:
    rows = [
        {
            "completion": f"<confidence>0.9</confidence><bbox>{box}</bbox>",
            "ground_truth": [0.1, 0.1, 0.2, 0.2],
        }
        for box in ("[0.1,0.1,0.2,0.2]", "[0.5,0.5,0.9,0.9]")
    ]
    _, err = asked("arc_vision", file(*rows))
    assert "expected calibration error of 2 stated confidences: 0.4000" in err
