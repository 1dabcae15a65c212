"""What ``eval --benchmark`` lays over a configuration: every file makes a valid run of any recipe,
and its measure counts right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop import recipes
from rayloop.chat.rendering import Renderer
from rayloop.cli import main
from rayloop.cluster.stages.evaluate import _more
from rayloop.commands.eval import evaluation_folder
from rayloop.config.settings import check_components
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.data.dataset import Dataset
from rayloop.data.resizing import smart_resize
from rayloop.measure.controls import RIGHT, Item
from rayloop.recipes.pyvision.verifiers import OptionReward
from rayloop.run.config import read
from tests.support.pictures import picture
from tests.support.runs import ROOT

EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)
QUICKSTART = ROOT / "recipes/arc_vision/quickstart.yaml"


def test_every_recipe_has_its_data_its_scores_and_its_quickstart() -> None:
    packages = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/__init__.py"))
    configurations_alone = {"screen_agents"}
    rows_are_shipped = {"arc_vision", "phone"}
    no_policy_has_learned = {"desktop", "phone"}
    folders = [name for name in packages if name not in configurations_alone]
    assert recipes.having("prepare") == [name for name in folders if name not in rows_are_shipped]
    trained = [name for name in folders if name not in no_policy_has_learned]
    assert recipes.having("score") == trained
    assert all(
        (ROOT / "recipes" / name / file).is_file()
        for name in trained
        for file in ("README.md", "quickstart.yaml")
    )
    assert recipes.having("nothing") == []


def test_the_benchmarks_of_the_recipes_are_there() -> None:
    assert {"screenspot", "vstar", "hr_bench_4k", "hr_bench_8k", "miniwob", "osworld"} <= set(
        recipes.benchmarks()
    )


@pytest.mark.parametrize("name", recipes.benchmarks())
def test_a_benchmark_is_laid_over_any_configuration(name: str) -> None:
    path = recipes.benchmarks()[name]
    config = read(QUICKSTART, ["evaluation.limit=3"], [path])
    check_components(config)
    assert config.model.path == read(QUICKSTART, []).model.path
    assert config.evaluation.limit == 3
    assert config.data.eval is not None
    assert config.data.eval != read(QUICKSTART, []).data.eval
    if config.data.eval.startswith("runs/"):
        # Two benchmarks may ask the same rows.
        rows = Path(config.data.eval).parent.name
        first = path.read_text(encoding="utf-8").splitlines()[:3]
        assert f"data prepare {rows}" in " ".join(first), "how its rows are made"
    else:
        assert (ROOT / config.data.eval).is_file()
    assert evaluation_folder(config, None, name).name == f"quickstart-{name}"


def test_screenspot_reads_qwens_own_boxes_and_has_a_cell_of_each_platform_and_element() -> None:
    config = read(
        ROOT / "recipes/arc_vision/arc_vision.yaml", [], [recipes.benchmarks()["screenspot"]]
    )
    kinds = {"platform": "web", "element": "icon", "image_size": [100, 100]}
    tasks = [
        Task("a", (), [0.2, 0.2, 0.4, 0.4], extra=kinds),
        Task("b", (), [0, 0, 1, 1], extra=kinds | {"element": "text"}),
    ]
    outcome = config.reward.source.build().score(
        EMPTY_TRAJECTORY, tasks[0], ScoreContext(0, ['{"bbox_2d": [20, 20, 40, 40], "label": "x"}'])
    )
    assert isinstance(outcome, Scored)
    assert (outcome.value, outcome.components["click"]) == (pytest.approx(1.0), 1.0)
    cells = _more(
        config.evaluation,
        tasks,
        [Item(RIGHT, task.id, "", 0, 1.0, {"click": 1.0}) for task in tasks],
    )["by"]
    assert set(cells["platform+element"]) == {"web icon", "web text"}


def test_a_question_of_vstar_fits_into_pyvisions_quickstart(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_bytes(picture(896, 672))
    choices = "(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather"
    asked = (
        f"What is the material of the glove?\n{choices}\nAnswer with the option's letter from the"
        " given choices directly."
    )
    row = {"id": "1", "image": "page.png", "question": asked, "answer": "B"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    given = [
        f"model.path={ROOT}/recipes/pyvision/tiny",
        "model.max_pixels=12544",
        "environment.episode.max_prompt_tokens=256",
    ]
    config = read(ROOT / "recipes/pyvision/quickstart.yaml", given, [recipes.benchmarks()["vstar"]])
    (task,) = Dataset(str(tmp_path / "test.jsonl"), config.data.reader.build(), True, print)
    length = len(Renderer(config.model).prompt(task.messages).token_ids)
    assert 96 < length < config.environment.episode.max_prompt_tokens - 32, (
        "room for what the environment puts around an image"
    )


OPTIONS = (
    "What is the material of the glove?\n(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather\nAnswer"
    " with the option's letter."
)
MADE: dict[str, dict[str, Any]] = {
    "arc_vision": {
        "instruction": "open the settings of the notifications",
        "bbox": [0.1, 0.2, 0.3, 0.4],
        "page": "windows",
    },
    "chart_rvr": {
        "query": (
            "In which year did the share of the largest of the three countries first exceed 12.5 %?"
        ),
        "label": "2010",
    },
    "pyvision": {"question": OPTIONS, "answer": "A", "kind": "direct_attributes"},
}
"""A row of each recipe's benchmarks, as ``data prepare`` writes it."""


@pytest.mark.parametrize("name", recipes.benchmarks())
def test_a_row_of_each_benchmark_fits_into_the_quickstart_of_its_recipe(
    name: str, tmp_path: Path
) -> None:
    path = recipes.benchmarks()[name]
    recipe = path.parent.parent
    written = yaml.safe_load((recipe / "quickstart.yaml").read_text(encoding="utf-8"))["model"][
        "path"
    ]
    config = read(
        recipe / "quickstart.yaml", [f"model.path={ROOT / written}"], [path]
    ).in_evaluation
    (tmp_path / "page.png").write_bytes(picture(896, 672))
    row = {"id": "1", "image": "page.png"} | MADE.get(recipe.name, {})
    if recipe.name == "arpo":
        row = json.loads(
            (ROOT / "recipes/arpo/tasks/val.jsonl").read_text(encoding="utf-8").splitlines()[0]
        )
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (task,) = Dataset(str(tmp_path / "test.jsonl"), config.data.reader.build(), True, print)
    rendered = Renderer(config.model).prompt(task.messages)
    episode = config.environment.episode
    assert bool(rendered.images) == (recipe.name != "arpo"), (
        "whose images are screenshots of the environment"
    )
    assert len(rendered.token_ids) <= episode.max_prompt_tokens - 64, (
        "room for what the environment puts around it"
    )
    assert episode.max_prompt_tokens + config.rollout.sampling.max_tokens <= episode.max_tokens


@pytest.mark.parametrize("name", ["vstar", "hr_bench_4k", "hr_bench_8k"])
@pytest.mark.parametrize("recipe", ["pyvision", "deepeyes", "presets/image"])
def test_large_images_are_shown_as_published_and_fit(name: str, recipe: str) -> None:
    config = read(ROOT / f"recipes/pyvision/{recipe}.yaml", [], [recipes.benchmarks()[name]])
    assert config.model.max_pixels == 16384 * 28 * 28
    height, width = smart_resize(5000, 8000, 28, config.model.min_pixels, config.model.max_pixels)
    tokens = height * width // 28**2
    assert 16_000 < tokens <= 16_384
    assert tokens + 8_192 <= config.environment.episode.max_prompt_tokens
    assert (
        config.environment.episode.max_prompt_tokens + 2 * config.rollout.sampling.max_tokens
        <= config.environment.episode.max_tokens
    )


def test_a_judge_decides_where_no_option_is_found() -> None:
    extra: dict[str, Any] = {"question": "Which colour?\nA. red\nB. blue"}
    judge = {"use": "tests.originals.test_pyvision:Always"}
    reward = OptionReward(OptionReward.Settings.model_validate({"judge": judge}))
    for said, accuracy in (
        ("<answer>navy</answer>", 1.0),
        ("<answer>A</answer>", 0.0),
        ("<answer>B</answer>", 1.0),
    ):
        outcome = reward.score(
            EMPTY_TRAJECTORY, Task("t", (), "B", extra=extra), ScoreContext(0, [said])
        )
        assert isinstance(outcome, Scored)
        assert (outcome.value, outcome.components["accuracy"]) == (accuracy, accuracy)


def test_a_mistake_in_a_benchmark_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "over.yaml"
    file.write_text("evaluation: {byy: [a]}\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"over\.yaml:1"):
        read(QUICKSTART, [], [file])


def test_rows_that_are_not_there_are_named_with_how_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(QUICKSTART), "--benchmark", "screenspot"]) == 2
    assert "runs/data/screenspot/test.jsonl is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "accuracy", "format"),
    [
        ("<answer>\n\\boxed{B}\n</answer>", 1.0, 1.0),
        ("<answer>(B) blue</answer>", 1.0, 1.0),
        ("I think so.\nB", 1.0, 0.0),
        ("<answer>A</answer>", 0.0, 1.0),
        ("B<answer>A</answer>", 0.0, 1.0),
        ("<answer>blue</answer>", 1.0, 1.0),
        ("", 0.0, 0.0),
        ("<answer>C</answer>", 0.0, 1.0),
        ("The correct option is (B) blue.", 1.0, 0.0),
        ("It is blue (B).", 1.0, 0.0),
        ("I think the car is blue, so B.", 1.0, 0.0),
        ("B\n\nThe car is blue as can be seen.", 1.0, 0.0),
        ("B blue", 1.0, 0.0),
        ("The car is blue.", 1.0, 0.0),
        ("A car that is blue", 1.0, 0.0),
        ("A blue car is the answer", 1.0, 0.0),
        ("The car is not blue.", 0.0, 0.0),
        ("A or B", 0.0, 0.0),
        ("It isn't red.", 0.0, 0.0),
        ("red or blue", 0.0, 0.0),
        ("The car is red, so B.", 0.0, 0.0),
        ("bluebird", 0.0, 0.0),
    ],
)
def test_the_right_option_is_found_by_letter_or_words(
    said: str, accuracy: float, format: float
) -> None:
    extra: dict[str, Any] = {
        "question": "Which colour?\nA. red\nB. blue\nC. green\nAnswer with the option's letter."
    }
    outcome = OptionReward().score(
        EMPTY_TRAJECTORY, Task("t", (), "B", extra=extra), ScoreContext(0, [said])
    )
    assert isinstance(outcome, Scored)
    assert (outcome.value, outcome.components) == (
        accuracy,
        {"accuracy": accuracy, "format": format},
    )
