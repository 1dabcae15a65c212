"""``python -m rayloop try``: what a person sees of one row, of two answers and of the reward,
without a Ray cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import ray
import yaml
from PIL import Image

from rayloop.cli import main
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import RewardLost
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import Observation, ScoreContext, StepResult
from rayloop.core.types import ImageSource, Message, Task, Trajectory
from rayloop.envs.grammar.actions import Action, Actions, Click, Point, Sleep
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from rayloop.view.screen_turns import MARK_COLOUR
from tests.support.pictures import picture
from tests.support.runs import ROOT, settings

PAGES = Path(__file__).parents[1] / "data" / "grounding"
Try = Callable[..., tuple[int, str]]


class Broken:
    """A grader with a typo."""

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Broken.Settings) -> None:
        del settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        return Scored(task.extra["anwser"])


class Unmade(Broken):
    def __init__(self, settings: Broken.Settings) -> None:
        raise KeyError("no such word list")


class Echo:
    """An environment of two turns."""

    class Settings(SettingsModel):
        fails: bool = False

    def __init__(self, settings: Echo.Settings) -> None:
        self._fails = settings.fails

    def reset(self, task: Task) -> Observation:
        task.extra.pop("level", None)  # type: ignore[attr-defined]
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        if self._fails:
            raise TypeError("a step that fails")
        return StepResult(Observation((Message("user", ("go on",)),)))

    def evaluate(self) -> float | None:
        return None

    def close(self) -> None: ...


class Unclosable(Echo):
    """Its ``close`` needs what ``reset`` makes."""

    def close(self) -> None:
        raise AttributeError("no server")


@pytest.fixture
def try_it(tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]) -> Try:
    def run(*options: str, **changes: Any) -> tuple[int, str]:
        usual = {
            "reward__source": {"use": "rayloop.recipes.digits.data:SortReward"},
            "environment__episode": {"environment": {"use": "rayloop.envs.single_turn:SingleTurn"}},
        }
        changes = usual | changes
        path = tmp_path / "run.yaml"
        path.write_text(
            yaml.safe_dump(settings(tmp_path, digits_model, **changes)), encoding="utf-8"
        )
        code = main(["try", str(path), *options])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_prompt_truth_answers_and_what_the_reward_said(try_it: Try, tmp_path: Path) -> None:
    code, text = try_it()
    row = json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert code == 0, text
    assert f"train.jsonl:1: task {row['id']}, one of 24 usable rows" in text
    assert (
        f"<|im_start|>user\n    Sort: {' '.join(map(str, row['digits']))}<|im_end|>\n   "
        " <|im_start|>assistant" in text
    )
    assert f"truth: {sorted(row['digits'])}" in text
    assert "answer 1: " in text
    assert "answer 2: " in text
    assert text.count("reward: 0; components: exact 0, format 0; flags: unparsable") == 2
    assert "2 of 2 answers have a reward" in text
    assert not ray.is_initialized()


def test_the_answers_are_those_of_the_first_step(try_it: Try) -> None:
    """They follow from the run's seed, like those of a group in training."""
    once, again, other = (
        try_it(*options)[1].partition("answer 1")[2] for options in ((), (), ("seed=1",))
    )
    assert once == again != other


def test_an_image_is_shown_with_its_sizes_and_tokens(try_it: Try, grounding_model: Path) -> None:
    reader = {"use": "rayloop.recipes.arc_vision.data:GroundingRows"}
    code, text = try_it(
        model__path=str(grounding_model),
        data={"train": str(PAGES / "train.jsonl"), "reader": reader},
        reward__source={"use": "rayloop.recipes.arc_vision.reward:IoUReward"},
    )
    assert code == 0, text
    assert "<|vision_start|><|image_pad|>×48<|vision_end|>" in text
    assert (
        "image 1: 160x210 pixels, resized to 168x224; grid (t, h, w) (1, 16, 12), 48 tokens" in text
    )


def test_a_reward_that_raises_is_shown_with_its_traceback(try_it: Try) -> None:
    code, text = try_it(reward__source={"use": f"{__name__}:Broken"})
    assert code == 1, text
    assert text.count(f"no reward: grader_error: {__name__}:Broken: KeyError: 'anwser'") == 2
    assert text.count('return Scored(task.extra["anwser"])') == 1, (
        "once, though both answers met it"
    )
    assert "KeyError: 'anwser'" in text
    assert "threads.py" not in text, "the traceback begins with the person's own code"
    assert "0 of 2 answers have a reward" in text


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"reward__source": {"use": f"{__name__}:Unmade"}}, "Unmade could not be made:"),
        ({"reward__source": {"use": "math:pi"}}, "math:pi"),
    ],
)
def test_a_reward_that_cannot_be_made_is_reported_before_the_model_is_loaded(
    try_it: Try, changes: dict[str, Any], reported: str
) -> None:
    code, text = try_it(**changes)
    assert code in (1, 2), text
    assert reported in text
    assert "loaded in" not in text


def test_an_environment_of_two_turns_is_shown_turn_by_turn(try_it: Try) -> None:
    code, text = try_it(
        environment__episode={"environment": {"use": f"{__name__}:Echo"}, "max_turns": 2}
    )
    assert code == 0, text
    assert text.count("go on<|im_end|>") == 2
    assert text.count("assistant: ") == 4
    assert "ended as max_turns" in text


def test_an_environment_that_cannot_be_closed_is_named_before_the_model_is_loaded(
    try_it: Try,
) -> None:
    code, text = try_it(environment__episode={"environment": {"use": f"{__name__}:Unclosable"}})
    assert code == 1, text
    assert "close() raised on an environment that was made and not reset" in text
    assert "AttributeError: no server" in text
    assert text.count("Traceback") <= 1
    assert "loaded in" not in text


def test_rows_of_which_none_can_be_used_are_reported_with_the_first_reason(
    try_it: Try, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"inquiry": "b"}\n', encoding="utf-8")
    code, text = try_it(data={"train": str(tmp_path / "rows.jsonl")})
    assert code == 2, text
    assert "holds no usable row among 1. The first: " in text
    assert "rows.jsonl:1" in text


def test_an_environment_that_raises_is_shown_with_its_traceback(try_it: Try) -> None:
    code, text = try_it(
        environment__episode={
            "environment": {"use": f"{__name__}:Echo", "with": {"fails": True}},
            "max_turns": 2,
        }
    )
    assert code == 1, text
    assert "answer 1 could not be played" in text
    assert text.count('raise TypeError("a step that fails")') == 1
    assert "<|im_start|>user" in text, "what the model saw is shown nevertheless"


@pytest.mark.parametrize("held_out", ["/nowhere/val.jsonl", "null"])
def test_held_out_rows_are_not_asked_for(try_it: Try, held_out: str) -> None:
    code, text = try_it(f"data.eval={held_out}", "evaluation.every=5")
    assert code == 0, text


def test_a_row_without_truth_and_a_row_by_number(try_it: Try, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "ground_truth": "1"}, {"question": "b"}, {"prompt": "c"}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    mine = {
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "reward__source": {"use": "tests.support.rewards:TokenReward"},
    }
    code, text = try_it("--row", "3", **mine)
    assert (code, "truth: NONE" in text, "rows.jsonl:3: task" in text) == (0, True, True), text
    assert "left out: " in text
    assert 'truth: "1"' in try_it("--row", "1", **mine)[1]
    code, text = try_it("--row", "2", **mine)
    assert code == 2
    assert "--row 2: " in text
    assert "no column 'prompt'" in text
    assert "there is no such row" in try_it("--row", "9", **mine)[1]


def test_a_judge_that_is_absent_is_named_in_seconds_with_what_needs_none(
    try_it: Try, tmp_path: Path
) -> None:
    row = {"prompt": "Which?", "answer": "red"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    found = {
        "use": "rayloop.judge.discovery:FileDiscovery",
        "with": {"path": str(tmp_path / "judge.json")},
    }
    judge = {"use": "rayloop.judge.reward:JudgeReward", "with": {"judge": {"discovery": found}}}
    source = {
        "use": "rayloop.recipes.pyvision.deepeyes:DeepEyesReward",
        "with": {"variant": "original", "mathematics": []},
    }
    source["with"] |= {"accuracy": judge}  # type: ignore[operator]
    began = time.monotonic()
    code, text = try_it(data={"train": str(tmp_path / "rows.jsonl")}, reward__source=source)
    assert time.monotonic() - began < 30
    assert code == 69, text
    before, _, after = text.partition(
        f"no judge answers (no judge has written its address to {tmp_path / 'judge.json'}"
    )
    assert "Which?<|im_end|>" in before
    assert "answer 1: " in before
    assert "python -m rayloop judge serve serve_apps/judge/configs/judge_openai.yaml" in after
    assert "components: format 0, looked 0, calls 0" in after
    assert "0 of 2 answers have a reward" in after


class Lost(Broken):
    """A grader that ends the run."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        raise RewardLost("gone")


def test_prompt_and_answer_are_shown_before_the_reward_is_asked(try_it: Try) -> None:
    code, text = try_it(reward__source={"use": f"{__name__}:Lost"})
    assert code == 69, text
    assert "what the model sees" in text
    assert "answer 1: " in text


def test_a_row_of_osworld_is_shown_and_its_python_asked_for_before_the_model_is_loaded(
    try_it: Try, tmp_path: Path
) -> None:
    task = {"id": "t", "instruction": "Open it.", "evaluator": {"func": "f"}}
    row = {"prompt": "Do: {instruction}", "osworld": task}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    kind = {
        "use": "rayloop.envs.osworld.environment:OSWorld",
        "with": {"python": "/no/python", "cache": str(tmp_path / "cache")},
    }
    mine = {
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "environment__episode": {"environment": kind},
        "environment__language": "ui_tars",
    }
    code, text = try_it(**mine)
    assert code == 2, text
    shown, _, refused = text.partition("OSWorldMissing: /no/python ")
    assert "what the model sees first, but for the screen" in shown
    assert "<|im_start|>user\n    Do: Open it.<|im_end|>\n" in shown
    assert "pip install desktop-env" in refused
    assert "environment.with.python" in refused
    assert "loaded in" not in text


def popping(task: Task) -> float:
    return float(task.extra.pop("level"))  # type: ignore[attr-defined]


def test_what_one_answer_does_to_its_row_the_other_does_not_see(
    try_it: Try, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "a", "level": 1}) + "\n", encoding="utf-8"
    )
    code, text = try_it(
        data={"train": str(tmp_path / "rows.jsonl")},
        reward__source={"use": f"{__name__}:popping"},
        environment__episode={"environment": {"use": f"{__name__}:Echo"}},
    )
    assert (code, text.count("reward: 1")) == (0, 2), text


def test_an_answer_that_was_cut_says_so_and_no_text_steers_the_terminal(
    try_it: Try, tmp_path: Path
) -> None:
    row = {"prompt": "a\x1b]0;title\x07", "answer": "\x1b[31m", "id": "\x9b2J"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    rows = {
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "reward__source": {"use": "tests.support.rewards:TokenReward"},
    }
    _, text = try_it("rollout.sampling.max_tokens=1", **rows)
    assert "the episode ended as done; CUT at rollout.sampling.max_tokens=1" in text
    assert {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} == {"\n"}


def test_a_broken_image_is_named_and_passed_over(
    try_it: Try, tmp_path: Path, grounding_model: Path
) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    good = next(PAGES.rglob("*.png"))
    rows = [
        {"prompt": "<image>a", "answer": "1", "images": [str(image)]}
        for image in (tmp_path / "bad.png", good)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    mine = {
        "model__path": str(grounding_model),
        "data": {"train": str(tmp_path / "rows.jsonl"), "anywhere": True},
        "reward__source": {"use": "tests.support.rewards:TokenReward"},
    }
    code, text = try_it("--row", "1", **mine)
    assert (code, "Traceback" in text) == (1, False), text
    assert "bad.png: not a readable" in text
    code, text = try_it(**mine)
    assert code == 0, text
    assert "rows.jsonl:1: " in text.partition("rows.jsonl:2: task")[0], (
        "the row that was passed over is named"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    assert "the images of none of its 1 rows can be shown" in try_it(**mine)[1]


PARTS: dict[str, Any] = {
    "data_source": "vstar",
    "reward_model": {"ground_truth": "A", "style": "model"},
    "prompt": [{"role": "user", "content": "<image>\nWhich?"}],
    "extra_info": {"index": "0", "question": "Which?"},
}


@pytest.mark.parametrize(
    ("preset", "file"), [("faithful", "rows.json"), ("deepeyes_faithful", "rows.parquet")]
)
def test_one_command_plays_a_row_as_its_authors_publish_it(
    preset: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    if file == "rows.json":
        hint = {"hint_path": "a.png", "hint_type": "image"}
        row = {**PARTS, "mm_hint": hint, "env_name": "pyvision_gym_w_image_hint"}
        (tmp_path / file).write_text(json.dumps([row], indent=1), encoding="utf-8")
    else:
        shown = {
            **PARTS,
            "images": [{"bytes": picture(96, 64), "path": None}],
            "env_name": "visual_toolbox_v2",
        }
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([shown]), tmp_path / file)
    given = [
        f"data.train={tmp_path / file}",
        f"model.path={ROOT}/recipes/pyvision/tiny",
        "rollout.sampling.max_tokens=8",
    ]
    given.append(f"output={tmp_path}")
    given.append(
        "reward.source={use: 'rayloop.recipes.pyvision.verifiers:OptionReward'}"
    )  # no judge is served here
    code = main(["try", f"{ROOT}/recipes/pyvision/presets/{preset}.yaml", *given])
    shown_text = "".join(capsys.readouterr())
    assert "Which?" in shown_text
    assert "image 1: 96x64 pixels" in shown_text
    assert 'truth: "A"' in shown_text
    assert "2 of 2 answers have a reward" in shown_text
    assert code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [("try", "interrupted"), ("train", "interrupted before anything could be saved")],
)
def test_an_interruption_speaks_of_saving_where_something_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    said: str,
) -> None:
    def read(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rayloop.commands.train.read", read)
    assert main([command, str(tmp_path / "run.yaml")]) == 1
    assert capsys.readouterr().err == f"rayloop: {said}\n"


class Canvas(ScreenEnvironment):
    """A screen of 80 x 60 pixels on which nothing happens."""

    class Settings(ScreenSettings):
        """Those of a screen."""

    def reset(self, task: Task) -> Observation:
        return self._first(task, "Click the middle.", ImageSource(data=picture(80, 60)))

    def screen_size(self) -> tuple[int, int]:
        return 80, 60

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        return StepResult(done=True)

    def evaluate(self) -> float:
        return 1.0

    def close(self) -> None: ...


class AlwaysTheMiddle:
    """A language in which every text is a click in the middle, or a wait."""

    class Settings(SettingsModel):
        waits: bool = False

    def __init__(self, settings: AlwaysTheMiddle.Settings) -> None:
        self._waits = settings.waits

    def read(self, text: str, screen: Extent) -> Actions:
        click = Click(Point(screen.columns / 2, screen.rows / 2))
        return Actions("", (Sleep() if self._waits else click,))

    def write(self, actions: Actions, screen: Extent) -> str:
        return "middle"


def canvas(tmp_path: Path, language: object) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": {"task": "{instruction}"}}) + "\n", encoding="utf-8")
    return {
        "model__path": str(ROOT / "recipes/arpo/tiny"),
        "data": {"train": str(rows)},
        "environment__language": language,
        "environment__episode": {"environment": {"use": f"{__name__}:Canvas"}},
        "reward__source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"},
    }


def test_a_click_is_drawn_on_the_screen(try_it: Try, tmp_path: Path) -> None:
    language = {"use": f"{__name__}:AlwaysTheMiddle"}
    code, text = try_it(**canvas(tmp_path, language))
    assert code == 0, text
    assert "Click the middle." in text
    assert "its first turn is read as Click(at=Point(x=40, y=30)" in text
    file = tmp_path / "run-try/answer_1.png"
    assert f"where it acts: {file}" in text
    drawn = Image.open(file)
    assert drawn.size == (80, 60)
    assert drawn.getpixel((40 + 8, 30)) == MARK_COLOUR
    assert drawn.getpixel((40, 30)) != MARK_COLOUR


def test_where_no_click_can_be_drawn_it_says_why(try_it: Try, tmp_path: Path) -> None:
    waits = {"use": f"{__name__}:AlwaysTheMiddle", "with": {"waits": True}}
    _, text = try_it(**canvas(tmp_path, waits))
    assert "read as Sleep(seconds=None)\nno picture: none of these has a place" in text
    _, text = try_it(**canvas(tmp_path, "ui_tars"))
    assert "the language is ui_tars\nno picture: its first turn is not one of ui_tars: no line" in (
        text
    )
    assert "You are a GUI agent." in text
    assert not (tmp_path / "run-try").exists()


def test_a_wrong_language_is_refused_before_the_model_is_loaded(
    try_it: Try, tmp_path: Path
) -> None:
    code, text = try_it(**canvas(tmp_path, "qwen3_vl"))
    assert code == 2
    assert "environment.language is qwen3_vl, but" in text
    assert "is a qwen2_5_vl that was trained on qwen2_5_vl" in text
    assert "loaded in" not in text
