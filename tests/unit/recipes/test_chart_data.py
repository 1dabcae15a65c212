"""Chart-RVR's rows: charts that are drawn from their tables, the reader's prompt, and the
supervised answer.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.config.settings import check_components
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, ImageSource, Sampling, Trajectory, TrajectoryId
from rayloop.data.dataset import Dataset
from rayloop.recipes.chart_rvr.checkout import SHA256
from rayloop.recipes.chart_rvr.data import ChartAnswers, ChartRows
from rayloop.recipes.chart_rvr.prepare import charts
from rayloop.recipes.chart_rvr.rewards.reward import ChartReward
from rayloop.run.config import read
from tools.makers.drawn_charts import HEIGHT, KINDS, MADE, WIDTH, chart, figure, main

RECIPE = Path(__file__).parents[3] / "recipes/chart_rvr"
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("charts")
    assert main(["--out", str(out), "--train", "6", "--val", "2", "--test", "2"]) == 0
    return out


def dataset(folder: Path, split: str, **settings: Any) -> Dataset:
    return Dataset(
        folder / f"{split}.jsonl",
        ChartRows(ChartRows.Settings(**settings)),
        True,
        lambda failure: None,
    )


def test_what_is_written_is_read_with_images_of_the_size_that_is_trained(folder: Path) -> None:
    tasks = list(dataset(folder, "train"))
    assert [task.source for task in tasks] == [f"generated {kind}" for kind in KINDS]
    for task in tasks:
        (image,) = task.images
        assert isinstance(image, ImageSource)
        with Image.open(str(image.path)) as opened:
            assert opened.size == (WIDTH, HEIGHT)
    assert len(dataset(folder, "val")) == len(dataset(folder, "test")) == 2


def test_the_supervised_answers_earn_the_whole_reward(folder: Path) -> None:
    words = {"use": "rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder"}
    reward = ChartReward(ChartReward.Settings(weights={"process": 0}, embedder=words))
    for task in dataset(folder, "train"):
        outcome = reward.score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [ChartAnswers().answer(task, random.Random(0))])
        )
        assert isinstance(outcome, Scored)
        full = {
            "format": 2.0,
            "accuracy": 1.0,
            "tags": 2.0,
            "type": 1.0,
            "table": 2.25,
            "relaxed": 1.0,
            "exact": 1.0,
        }
        assert {name: outcome.components[name] for name in full} == full
        assert outcome.flags == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_chart_shows_its_table(kind: str) -> None:
    """Sizes of what is drawn, and every value as a text."""
    made = chart(kind, 1, "train", 3)
    axes = figure(made).axes[0]
    texts = " ".join(text.get_text() for text in axes.texts)
    assert all(value in texts for row in made.rows for value in row[1:])
    if kind in ("bar", "stacked bar"):
        heights = [round(bar.get_height()) for bar in axes.patches]
        assert heights == [value for i in range(1, len(made.columns)) for value in made.column(i)]
    elif kind == "line":
        assert [round(value) for value in axes.lines[0].get_ydata()] == made.column(1)
    elif kind == "scatterplot":
        assert axes.collections[0].get_offsets().tolist() == [
            [*map(float, row)] for row in made.rows
        ]
    elif kind == "pie":
        assert sum(made.column(1)) == 100
        assert [
            round((wedge.theta2 - wedge.theta1) / 3.6) for wedge in axes.patches
        ] == made.column(1)
    else:
        drawn = axes.collections[0].get_paths()[0].vertices[:, 1].tolist()
        assert set(map(float, made.column(1))) <= set(drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_from_the_table(kind: str) -> None:
    """Worked out again from the question's words, over many seeds."""
    asked = set()
    for index in range(60):
        made = chart(kind, 7, "train", index)
        by_item = {
            row[0]: dict(zip(made.columns[1:], map(int, row[1:]), strict=True)) for row in made.rows
        }
        items = [item for item in by_item if f" {item}" in made.question.replace("?", " ?")]
        names = [
            name for name in made.columns[1:] if f" {name} " in made.question.replace("?", " ?")
        ]
        values = [by_item[item] for item in items]
        word = next(
            w
            for w in ("difference", "sum", "larger", "highest", "lowest", "total", "value")
            if w in made.question
        )
        asked.add(word)
        if word == "total":
            assert int(made.answer) == sum(values[0].values())
            continue
        (name,) = names
        if word in ("highest", "lowest"):
            best = (max if word == "highest" else min)(
                by_item, key=lambda item: by_item[item][name]
            )
            assert made.answer == best
        elif word == "value":
            assert int(made.answer) in [value[name] for value in values]
        elif word == "larger":
            first, second = (item for item in made.question.rstrip("?").split() if item in by_item)
            assert made.answer == ("Yes" if by_item[first][name] > by_item[second][name] else "No")
        else:
            pair = [
                by_item[item][name] for item in made.question.rstrip("?").split() if item in by_item
            ]
            assert int(made.answer) == (sum(pair) if word == "sum" else max(pair) - min(pair))
    assert len(asked) >= 6


def test_equal_seeds_make_equal_charts_and_no_split_has_anothers() -> None:
    assert chart("pie", 3, "train", 5) == chart("pie", 3, "train", 5)
    assert chart("pie", 3, "train", 5) != chart("pie", 4, "train", 5)
    seen: set[tuple[Any, ...]] = set()
    made = [one for split in ("train", "val") for one in charts(MADE, 150, ["pie"], 0, split, seen)]
    assert len({(one.columns, one.rows) for one in made}) == 300


def test_a_kind_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such chart: radar"):
        main(["--out", str(tmp_path), "--kinds", "bar,radar"])
    with pytest.raises(ValueError, match="radar"):
        chart("radar", 0, "train", 0)


def row(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "image": "a.png", "query": "How many?", "label": "7"} | changes


def test_columns_and_prompt_are_settings() -> None:
    reader = ChartRows(
        ChartRows.Settings(
            query="question", label="answers", template="direct", suffix=" Answer yes or no."
        )
    )
    task = reader.task(
        row(question="Is it?", answers=["Yes", "yes"], table='{"columns": [], "rows": []}'),
        "rows:1",
        Path(),
    )
    system, user = task.messages
    assert "<think>" not in system.parts[0]
    assert user.parts[1] == "Is it? Answer yes or no."
    assert (task.ground_truth, task.extra["table"]) == ("Yes", {"columns": [], "rows": []})
    assert "<table>" in str(
        ChartRows(ChartRows.Settings()).task(row(), "rows:1", Path()).messages[0].parts[0]
    )


@pytest.mark.parametrize(
    "changes", [{"label": None}, {"label": " "}, {"label": {}}, {"query": ""}, {"image": None}]
)
def test_a_row_without_question_answer_or_chart_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataFailure, match="rows:1"):
        ChartRows(ChartRows.Settings()).task(row(**changes), "rows:1", Path())


def test_a_row_without_rationale_has_no_supervised_answer() -> None:
    task = ChartRows(ChartRows.Settings()).task(row(chart_type="bar"), "rows:1", Path())
    with pytest.raises(DataFailure, match="no table and no reasoning"):
        ChartAnswers().answer(task, random.Random(0))


@pytest.mark.parametrize(
    ("name", "rows", "epochs", "answers"),
    [
        ("paper", 34_194, 4, 4),
        ("safe", 34_194, 1, 4),
        ("moderate", 34_194, 1, 2),
        ("fast", 10_000, 1, 2),
        ("ultra_fast", 1_000, 1, 2),
        ("one_gpu", 34_194, 1, 4),
        ("faithful", 34_194, 4, 4),
    ],
)
def test_a_preset_plays_as_many_answers_as_it_says(
    name: str, rows: int, epochs: int, answers: int
) -> None:
    config = read(RECIPE / f"presets/{name}.yaml", [])
    check_components(config)
    assert config.algorithm.group_size == answers
    assert config.steps * config.algorithm.target == rows * epochs * answers
    assert config.name == f"chart-rvr-{name.replace('_', '-')}"
    assert {path.stem for path in (RECIPE / "presets").glob("*.yaml")} == {
        "paper",
        "safe",
        "moderate",
        "fast",
        "ultra_fast",
        "one_gpu",
        "faithful",
    }


def test_rows_are_plain_json(folder: Path) -> None:
    first = json.loads((folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert set(first) == {
        "id",
        "image",
        "query",
        "label",
        "table",
        "chart_type",
        "reasoning",
        "data_source",
    }


PUBLISHED = (
    'SYSTEM_PROMPT_TEMPLATES = {\n    # 4: """other"""\n    4: """\n  As \\ it is.\n""",\n}\nraise'
    ' SystemExit("it ran")\n'
)


def test_the_published_prompt_is_read_from_a_checkout_and_nothing_of_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.py").write_text(PUBLISHED, encoding="utf-8")
    text = "\n  As \\ it is.\n"
    monkeypatch.setitem(SHA256, 4, hashlib.sha256(text.encode()).hexdigest())
    settings = ChartRows.Settings.model_validate({"template": {"checkout": str(tmp_path)}})
    assert ChartRows(settings).task(row(), "rows:1", Path()).messages[0].parts == (text,)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("x = 1\n", "has no SYSTEM_PROMPT_TEMPLATES"),
        (PUBLISHED, "is not the published one"),
        ("(", "to read"),
    ],
)
def test_a_checkout_without_the_published_prompt_says_where_it_looked(
    content: str | None, why: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "prompts.py").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as found:
        ChartRows(ChartRows.Settings.model_validate({"template": {"checkout": str(tmp_path)}}))
    assert str(tmp_path / "prompts.py") in str(found.value)
    assert "git clone https://github.com/sanchit97/chartrl" in str(found.value)
