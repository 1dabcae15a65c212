"""The quickstart of Chart-RVR: small charts, what the tiny model was taught, the blind prior, and
the configurations.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.config.settings import check_components, load
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset
from rayloop.recipes.chart_rvr.data import ChartRows
from rayloop.recipes.chart_rvr.measure import EMPTY_TRAJECTORY, BlindChart
from rayloop.recipes.chart_rvr.prepare import (
    CHART_SIDE_PIXELS,
    COLOURS,
    COLUMN_PIXELS,
    KINDS,
    PAGE_COLOUR,
    UNIT_HEIGHT_PIXELS,
    drawn,
    main,
    small,
)
from rayloop.recipes.chart_rvr.rewards.reward import ChartReward
from rayloop.run.config import RunConfig, read
from rayloop.sft.stage import SftConfig
from tools.makers.hasty_charts import HastyAnswers

RECIPE = Path(__file__).parents[3] / "recipes/chart_rvr"
QUICKSTART = RECIPE / "quickstart.yaml"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    out = tmp_path_factory.mktemp("small")
    assert main(["--out", str(out), "--train", "80", "--val", "0", "--test", "20"]) == 0
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["test.jsonl", "train.jsonl"]
    return list(
        Dataset(out / "train.jsonl", ChartRows(ChartRows.Settings()), True, lambda failure: None)
    )


@pytest.mark.parametrize("index", range(10))
def test_a_bar_is_as_high_as_its_value_and_a_mark_where_its_top_would_be(index: int) -> None:
    bars, line = (small(kind, 3, "train", index) for kind in KINDS)
    image = drawn(bars)
    assert image.size == (CHART_SIDE_PIXELS, CHART_SIDE_PIXELS)
    for place, (item, value) in enumerate(bars.rows):
        column = [
            image.getpixel((COLUMN_PIXELS * place + COLUMN_PIXELS // 2, y))
            for y in range(CHART_SIDE_PIXELS)
        ]
        assert Counter(column) == {
            PAGE_COLOUR: CHART_SIDE_PIXELS - UNIT_HEIGHT_PIXELS * int(value),
            COLOURS[item]: UNIT_HEIGHT_PIXELS * int(value),
        }
    for place, (item, value) in enumerate(line.rows):
        middle = CHART_SIDE_PIXELS - UNIT_HEIGHT_PIXELS * int(value) + UNIT_HEIGHT_PIXELS // 2
        assert (
            drawn(line).getpixel((COLUMN_PIXELS * place + COLUMN_PIXELS // 2, middle))
            == COLOURS[item]
        )


def test_answers_follow_from_the_table() -> None:
    asked = Counter[str]()
    for index in range(60):
        made = small("bar", 5, "val", index)
        by_item = {item: int(value) for item, value in made.rows}
        word = made.question.rstrip("?").split()[-1]
        asked[word if word in ("highest", "lowest") else "value"] += 1
        wanted = {
            "highest": max(by_item, key=by_item.__getitem__),
            "lowest": min(by_item, key=by_item.__getitem__),
        }
        assert made.answer == wanted.get(word, str(by_item.get(word)))
        assert made.steps[0] == f"The question asks for {word}."
        assert made.answer in made.steps[1]
    assert set(asked) == {"highest", "lowest", "value"}
    assert small("line", 5, "val", 1) == small("line", 5, "val", 1) != small("line", 5, "train", 1)
    with pytest.raises(ValueError, match="not a kind of small chart"):
        small("pie", 0, "val", 0)


def reward() -> Any:
    return load(QUICKSTART, [], RunConfig).reward.source.build()


def paid(task: Task, text: str) -> Scored:
    found = asyncio.run(reward().score(EMPTY_TRAJECTORY, task, ScoreContext(0, [text])))
    assert isinstance(found, Scored)
    return found


def test_what_is_taught_without_slips_earns_everything(rows: list[Task]) -> None:
    answers = HastyAnswers(HastyAnswers.Settings())
    for task in rows[:20]:
        found = paid(task, answers.answer(task, random.Random(0)))
        assert found.value == pytest.approx(2 + 1 + 1.5 + 2 + 1 + 2.25 + 1)
        assert found.flags == ()


@pytest.mark.parametrize(
    ("slip", "spoiled"), [("misread", "table"), ("first", "accuracy"), ("skip", "format")]
)
def test_each_slip_costs_its_component_as_often_as_it_is_set(
    rows: list[Task], slip: str, spoiled: str
) -> None:
    answers = HastyAnswers(HastyAnswers.Settings(**{slip: 0.5}))
    rng = random.Random(0)
    outcomes = [paid(task, answers.answer(task, rng)) for task in rows]
    worst = {"table": 2.25, "accuracy": 1.0, "format": 2.0}
    for name, full in worst.items():
        short = sum(outcome.components[name] < full for outcome in outcomes) / len(rows)
        if name == spoiled:
            assert 0.25 < short < 0.95, name
        elif slip != "skip":
            assert short == 0, name


def test_the_tokens_of_the_tiny_model_are_in_what_it_is_taught(rows: list[Task]) -> None:
    answers = HastyAnswers(HastyAnswers.Settings())
    reported = "".join(
        answers.answer(task, random.Random(0)) + task.extra["query"] for task in rows
    )
    assert [token for token in answers.tokens if token not in reported] == []


def test_the_blind_prior_writes_what_pays_most_without_a_chart(rows: list[Task]) -> None:
    source = load(QUICKSTART, [], RunConfig).reward.source
    prior = BlindChart(BlindChart.Settings(reward=source, fewest=1))
    with pytest.raises(ValueError, match="fit the blind prior"):
        prior.score(rows[0])
    prior.fit(rows)
    found = [prior.score(task) for task in rows]
    assert all(outcome.components["format"] == 2.0 for outcome in found)
    accuracy = sum(outcome.components["accuracy"] for outcome in found) / len(found)
    assert 0.05 < accuracy < 0.7
    one = BlindChart(BlindChart.Settings(reward=source, fewest=1))
    one.fit(rows[:1])
    assert one.score(rows[0]).components["accuracy"] == 1.0, "the row's own answer is a candidate"
    assert one.score(rows[0]).components["table"] == 2.25


def test_the_shipped_configurations_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPE.parents[1])
    config = read(QUICKSTART, [])
    original = read(QUICKSTART.with_name("quickstart_original.yaml"), [])
    for one, variant in ((config, "corrected"), (original, "original")):
        assert one.evaluation.blind is not None
        assert one.evaluation.blind.with_["reward"] == one.reward.source.model_dump(by_alias=True)
        assert one.reward.source.with_["variant"] == variant
        check_components(one)
    assert (Path(config.model.path) / "model.safetensors").stat().st_size < 1_500_000
    stages = [
        load(RECIPE.parents[1] / f"tools/makers/chart_rvr/{name}.yaml", [], SftConfig)
        for name in ("warm", "loosen")
    ]
    for stage in stages:
        check_components(stage)
        assert stage.data.reader == config.data.reader
        assert (stage.model.min_pixels, stage.model.position_tint) == (
            config.model.min_pixels,
            config.model.position_tint,
        )


def test_a_group_is_paid_where_no_event_loop_runs(rows: list[Task]) -> None:
    """As the reward's actor calls it: in a thread, and what it returns is awaited elsewhere."""
    source: ChartReward = reward()
    text = HastyAnswers(HastyAnswers.Settings()).answer(rows[0], random.Random(0))
    found = source.score_group(
        [EMPTY_TRAJECTORY] * 2, rows[0], [ScoreContext(0, [text]), ScoreContext(0, ["nothing"])]
    )

    async def awaited() -> Any:
        return await found  # type: ignore[misc]

    first, second = asyncio.run(awaited())
    assert first.value > second.value


def test_rows_have_the_columns_of_the_recipe(tmp_path: Path) -> None:
    assert (
        main(["--out", str(tmp_path), "--train", "2", "--val", "0", "--test", "0", "--warm", "1"])
        == 0
    )
    first = json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
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
    assert (tmp_path / "warm.jsonl").exists()
    with Image.open(tmp_path / first["image"]) as image:
        assert image.size == (CHART_SIDE_PIXELS, CHART_SIDE_PIXELS)


def test_the_commands_for_gpus_are_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPE.parents[1])
    page = (RECIPE / "README.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(found)
        for found in re.findall(r"\| `python -m rayloop ((?:train|submit) [^`]+)` \|", page)
    ]
    assert len(commands) == 5
    for _, file, *words in commands:
        overrides = [word for word in words if "=" in word]
        config = read(Path(file), overrides)
        answers = 34_194 if "safe" in file else 10_000
        assert config.steps * config.algorithm.target >= answers * config.algorithm.group_size
