"""ARPO's reward, its tasks, the hasty demonstrator, and what is shipped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from rayloop.cli import main as cli
from rayloop.config.settings import check_components, load
from rayloop.core.groups import Scored, Unscored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.language import action_format
from rayloop.envs.grammar.scanner import read
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.recipes.arpo.prepare import PAGES, ROWS, main, rows
from rayloop.recipes.arpo.reward import ArpoReward
from rayloop.run.config import RunConfig
from rayloop.sft.stage import SftConfig
from rayloop.sft.translation import Translation
from tools.makers import warm_starts
from tools.makers.browser_clicks import (
    COORDINATE_STEP,
    WARM_PAGES,
    DemonstratedClicks,
    beginnings,
    hasty,
)

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/arpo"
ACTION, NONE = "Action: click(start_box='(500,250)')", "I would rather not."


def played(result: float | None) -> Trajectory:
    return Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE, result)


@pytest.mark.parametrize(
    ("result", "texts", "value", "flags"),
    [
        (1.0, [NONE, ACTION], 1.0, ()),
        (0.0, [ACTION], 0.0, ()),
        (1.0, [ACTION, NONE], 0.5, ("unparsable",)),
        (0.0, [ACTION, NONE], -0.5, ("unparsable",)),
        (0.3, [ACTION], 0.3, ()),
    ],
)
def test_the_reward_is_the_result_and_half_a_point_for_the_last_turn(
    result: float, texts: list[str], value: float, flags: tuple[str, ...]
) -> None:
    scored = ArpoReward(ArpoReward.Settings()).score(
        played(result), Task("t", ()), ScoreContext(1, texts)
    )
    format_score = -1.0 if flags else 0.0
    assert scored == Scored(value, {"success": result, "format": format_score}, flags)


def test_an_episode_without_a_result_is_no_failure_of_the_policy() -> None:
    outcome = ArpoReward(ArpoReward.Settings()).score(
        played(None), Task("t", ()), ScoreContext(1, [ACTION])
    )
    assert isinstance(outcome, Unscored)


def test_the_weight_of_the_format_can_be_set() -> None:
    lenient = ArpoReward(ArpoReward.Settings(format_weight=0.0))
    outcome = lenient.score(played(1.0), Task("t", ()), ScoreContext(1, [NONE]))
    assert isinstance(outcome, Scored)
    assert outcome.value == 1.0


SHORT = [
    "--train",
    "160",
    "--val",
    "48",
    "--pages",
    "click-dialog-2",
    "click-tab",
    "focus-text",
    "focus-text-2",
]


@pytest.mark.parametrize(("folder", "asked"), [("tasks", []), ("tasks/short", SHORT)])
def test_the_shipped_tasks_are_those_that_prepare_writes(
    folder: str, asked: list[str], tmp_path: Path
) -> None:
    assert main(["--out", str(tmp_path), *asked]) == 0
    for split in ROWS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (
            RECIPE / folder / f"{split}.jsonl"
        ).read_bytes()


@pytest.mark.parametrize("recipe", ["quickstart.yaml", "short.yaml"])
def test_rows_whose_environment_gives_the_result_need_no_answer(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli(["data", "validate", str(RECIPE / recipe)]) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_short_run_says_how_its_rows_are_made() -> None:
    text = (RECIPE / "short.yaml").read_text(encoding="utf-8").replace(" \\\n#  ", "")
    assert " ".join(["data prepare arpo --out recipes/arpo/tasks/short", *SHORT]) in text


def test_splits_share_pages_and_no_seed() -> None:
    made = {
        split: [
            json.loads(line) for line in (RECIPE / f"tasks/{split}.jsonl").open(encoding="utf-8")
        ]
        for split in ROWS
    }
    assert (
        {row["page"] for row in made["train"]} == {row["page"] for row in made["val"]} == set(PAGES)
    )
    seeds = [row["seed"] for split in made.values() for row in split]
    assert len(set(seeds)) == len(seeds) == sum(ROWS.values())


@pytest.mark.parametrize("screen", ["computer", "infeasible", "phone"])
def test_the_prompt_for_ui_tars_shows_actions_that_can_be_read(screen: str) -> None:
    prompt = action_format("ui_tars").prompt(screen).user
    assert prompt.endswith("\n\n## User Instruction\n{instruction}")
    assert ("call_user()" in prompt) is (screen == "infeasible")
    space = prompt.split("## Action Space\n")[1].split("\n\n## ")[0]
    for line in space.splitlines():
        call = (
            line.split(" #")[0]
            .replace("x1,y1", "1,2")
            .replace("x3,y3", "3,4")
            .replace("down or up or right or left", "down")
        )
        assert isinstance(read(f"Action: {call}"), Actions), call


def test_a_hasty_click_is_around_its_target_and_can_be_written() -> None:
    rng = random.Random(0)
    clicks = [hasty((40, 100, 80, 142), (160, 210), 2.0, rng).at for _ in range(500)]
    inside = [at for at in clicks if 250 <= at.x <= 500 and 476 <= at.y <= 676]
    assert 0.2 < len(inside) / len(clicks) < 0.35  # a quarter of twice the sides
    assert all(at.x % COORDINATE_STEP == at.y % COORDINATE_STEP == 0 for at in clicks)
    assert hasty((300, 400, 320, 430), (160, 210), 1.0, rng) == Click(Point(1000, 1000))


def test_an_action_is_four_tokens_of_the_shipped_model() -> None:
    tokenizer = Tokenizer.from_file(str(RECIPE / "tiny/tokenizer.json"))
    assert len(tokenizer.encode(ACTION, add_special_tokens=False).ids) == 4
    assert all(tokenizer.token_to_id(token) is not None for token in DemonstratedClicks.tokens)
    assert beginnings()["(500,"] == beginnings()["500)"] == "0.50"


@pytest.mark.parametrize(("x", "y"), [(0, 0), (500, 250), (1000, 1000)])
def test_a_converted_click_is_four_of_the_tokens_of_its_language(x: int, y: int) -> None:
    ui_tars, qwen = (
        ScreenSettings.model_validate(json.loads(language))
        for language in (warm_starts.UI_TARS, warm_starts.QWEN)
    )
    said = f"Action: click(start_box='({x},{y})')"
    answer = Translation(ui_tars, qwen).turn(said, 160, 210)
    tokenizer = Tokenizer.from_file(str(ROOT / "recipes/arc_vision/tiny/tokenizer.json"))
    known = warm_starts.calls()
    assert all(tokenizer.token_to_id(token) is not None for token in known.values())
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in known])
    found = tokenizer.encode(answer, add_special_tokens=False).tokens
    assert len(found) == 4
    assert "".join(found) == answer
    assert known[found[1]] == f"{x / 1000:.2f}"
    assert known[found[2]] == f"{y / 1000:.2f}"


def test_every_page_of_the_demonstrations_has_a_rule() -> None:
    rules = (ROOT / "tools/makers/arpo/targets.js").read_text(encoding="utf-8")
    assert all(f"'{page}'" in rules for page in (*WARM_PAGES, *warm_starts.PAGES))
    assert [row["seed"] for row in rows("warm", 2)] == [
        "warm-click-button-0",
        "warm-click-button-sequence-0",
    ]


def test_the_configurations_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("quickstart", "short", "arpo"):
        config = load(RECIPE / f"{name}.yaml", [], RunConfig)
        check_components(config)
        pointing = config.environment.episode.environment.with_["pointing"]
        if pointing["coordinates"] == "absolute":
            assert (pointing["min_pixels"], pointing["max_pixels"]) == (
                config.model.min_pixels,
                config.model.max_pixels,
            )
    for recipe in ("arpo", "languages"):
        warm = load(ROOT / f"tools/makers/{recipe}/warm.yaml", [], SftConfig)
        check_components(warm)


def test_replay_is_one_switch() -> None:
    on, off = (
        load(RECIPE / "quickstart.yaml", o, RunConfig) for o in ([], ["algorithm.replay.kind=none"])
    )
    assert (on.algorithm.replay.kind, off.algorithm.replay.kind) == ("corrected", "none")
