"""``data convert``: recorded episodes and rows in another action language, what is left out, and what
the supervised stage then trains.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rayloop.cli import main
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.data.images import png
from rayloop.envs.grammar import scanner
from rayloop.envs.grammar.actions import Actions
from rayloop.envs.grammar.language import action_format
from rayloop.envs.scripted import ScriptedTool
from rayloop.run.folder import RunFolder
from rayloop.sft.stage import Examples, SftConfig
from tests.support.episodes import TINT, TINY, recorded

SCREEN = png(Image.new("RGB", (224, 168), "white"))
MODEL = {"path": str(TINY), "min_pixels": 37632, "max_pixels": 37632, "position_tint": TINT}
CLICK = "Thought: There.\nAction: click(start_box='(503,119)')"
DRAG = "Action: drag(start_box='(1,2)', end_box='(300,400)')"
RELATIVE = "{language: ui_tars, pointing: {coordinates: relative}}"
DONE = "Action: finished(content='yes')"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_of(tmp_path, [(CLICK, DRAG, DONE), (DRAG, "Action: click(", DONE), ("what?",)])


def run_of(folder: Path, said: Sequence[Sequence[str]]) -> RunFolder:
    """A run with these turns of the policy on record."""
    step = {"text": "Error: no", "images": [{"width": 224, "height": 168}]}
    settings = ScriptedTool.Settings.model_validate({"steps": [step] * 3})
    question = Message("user", ("Do it.", ImageSource(data=SCREEN)))
    found = recorded(
        folder,
        "run",
        lambda: ScriptedTool(settings),
        Task("t", (question,), source="s"),
        said,
    )
    config = {
        "name": "run",
        "output": str(folder),
        "steps": 1,
        "model": MODEL,
        "data": {"train": "rows.jsonl"},
        "environment": {
            "episode": {
                "environment": {
                    "use": "rayloop.envs.browser.web:WebPage",
                    "with": {"folder": str(folder), "pointing": {"coordinates": "relative"}},
                }
            }
        },
        "reward": {"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
    }
    found.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    return found


def converted(source: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that the command writes."""
    assert main(["data", "convert", str(source), "--out", str(out), *options]) == 0
    return lines(out / "train.jsonl")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def answers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["answer"] for row in rows]


def test_recorded_episodes_come_back_with_equal_actions(run: RunFolder, tmp_path: Path) -> None:
    there = converted(run.path, tmp_path / "qwen", "--to", "qwen3_vl")
    assert [row["id"] for row in there] == ["1/1/0:1", "1/1/0:2", "1/1/0:3", "1/1/1:1"]
    assert '"coordinate": [503, 119]' in there[0]["answer"]
    assert [message["role"] for message in there[2]["prompt"]] == ["user", "assistant"] * 2 + [
        "user"
    ]
    assert there[2]["prompt"][1]["content"] == there[0]["answer"]
    back = converted(
        tmp_path / "qwen/train.jsonl",
        tmp_path / "back",
        *("--from", "qwen3_vl", "--to", RELATIVE),
    )
    assert list(map(actions, answers(back))) == list(map(actions, (CLICK, DRAG, DONE, DRAG)))
    assert actions(back[2]["prompt"][1]["content"]) == actions(CLICK)
    _, screen = back[0]["prompt"][0]["content"]
    # The record has the tinted screen, which the model saw.
    with Image.open(tmp_path / "back" / screen["image"]) as picture:
        assert min(low for low, _ in picture.getextrema()) >= 254


def actions(text: str) -> object:
    turn = scanner.read(text)
    assert isinstance(turn, Actions)
    return turn.actions


def test_the_prompt_of_the_language_goes_along(tmp_path: Path) -> None:
    (tmp_path / "screen.png").write_bytes(SCREEN)
    file = tmp_path / "rows.jsonl"
    prompt = (
        action_format("ui_tars").prompt("computer").user.replace("{instruction}", "Order a pizza.")
    )
    rows = {"prompt": prompt, "image": "screen.png", "answer": DONE}
    file.write_text(json.dumps(rows), encoding="utf-8")
    [found] = converted(file, tmp_path / "out", "--to", "qwen3_vl")
    assert [message["role"] for message in found["prompt"]] == ["system", "user"]
    assert "computer_use" in found["prompt"][0]["content"][0]["text"]
    assert {"type": "text", "text": "Task: Order a pizza."} in found["prompt"][1]["content"]


def test_what_is_left_out_is_named_and_counted(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(run.path, tmp_path / "qwen", "--to", "qwen3_vl")
    report = capsys.readouterr().out
    assert "train.jsonl: 4 turns in qwen3_vl" in report
    assert "left out, 3 turns: it is not written in ui_tars" in report
    cut, other = lines(tmp_path / "qwen/left_out.jsonl")
    assert (cut["where"], cut["turn"], cut["turns"]) == ("1/1/1", 2, 2)
    assert "the text ends within an action" in cut["details"]
    assert (other["where"], other["turn"], other["turns"]) == ("1/1/2", 1, 1)


@pytest.mark.parametrize("lost", ["said", "images"])
def test_records_without_their_messages_are_refused(
    run: RunFolder, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent's have none, and a history may show other screens."""
    [file] = run.rollouts.files().values()
    records = lines(file)
    records[0]["turns"][1][lost] = []
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    command = ["data", "convert", str(run.path), "--to", "qwen3_vl", "--out", str(tmp_path / "out")]
    assert main(command) != 0
    assert "1/1/0: the record lacks messages of the environment" in capsys.readouterr().err


def test_episodes_are_chosen_by_their_reward(run: RunFolder, tmp_path: Path) -> None:
    """The k-th member has the reward k."""
    rows = converted(run.path, tmp_path / "qwen", "--to", "qwen3_vl", "--least-reward", "1")
    assert [row["id"] for row in rows] == ["1/1/1:1"]


def test_the_supervised_stage_learns_every_turn(run: RunFolder, tmp_path: Path) -> None:
    rows = converted(run.path, tmp_path / "qwen", "--to", "qwen3_vl")
    file = str(tmp_path / "qwen/train.jsonl")
    stage = SftConfig.model_validate(
        {"output": "out", "steps": 1, "model": MODEL, "data": {"train": file}}
    )
    examples = Examples(stage)
    tasks = list(Dataset(file, ChatRows(ChatRows.Settings()), True, lambda failure: None))
    for task, row in zip(tasks, rows, strict=True):
        trajectory = examples.item(task, random.Random(0)).trajectory
        [learned] = trajectory.sampled_turns
        assert examples.renderer.decode(learned.token_ids) == row["answer"]
        assert len(trajectory.images) == sum(one["role"] == "user" for one in row["prompt"])


def row(answer: str, *earlier: str, screen: bool = True) -> dict[str, Any]:
    picture = [{"type": "image", "image": "screen.png"}] if screen else []
    question = {"role": "user", "content": [{"type": "text", "text": "Do it."}, *picture]}
    prompt = [question]
    for turn in earlier:
        prompt += [{"role": "assistant", "content": turn}, question]
    return {"prompt": prompt, "answer": answer}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row("Action: click(start_box='(1,2)'"), "it is not written in ui_tars: the text ends"),
        (row(DONE, screen=False), "it has no screenshot before it, whose size its points need"),
        (
            row(CLICK, "<action>\nclick(x=0.5, y=0.5)\n</action>"),
            "it is not written in ui_tars: no line begins with 'Action:'",
        ),
        (row("Action: keydown(key='shift')"), "qwen3_vl has no words for HoldKey"),
        ({"prompt": "Do it.", "image": "screen.png"}, "the answer is None, not a text"),
        ({"prompt": "Do it.", "image": "lost.png", "answer": DONE}, "lost.png"),
        ({"prompt": [], "answer": DONE}, "the field 'prompt' is missing or empty"),
    ],
)
def test_a_bad_row_is_one_sentence(
    bad: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "screen.png").write_bytes(SCREEN)
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row(DONE))}\n{json.dumps(bad)}\n", encoding="utf-8")
    [good] = converted(file, tmp_path / "out", "--to", "qwen3_vl")
    assert '"status": "success"' in good["answer"]
    [left] = lines(tmp_path / "out/left_out.jsonl")
    assert reason in left["details"]
    assert f"left out, 1 turns: {left['reason']}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--to", "klingon"], "--to klingon: 'klingon' is not a language; there are aguvis"),
        (["--to", "aguvis", "--from", "klingon"], "--from klingon: 'klingon' is not a language"),
        (["--to", "{pointing: {factor: 0}}"], "pointing.factor Input should be greater"),
        (["--to", "{colour: red}"], "colour Extra inputs are not permitted"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(DONE)), encoding="utf-8")
    assert main(["data", "convert", str(file), "--out", str(tmp_path / "out"), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_of_which_nothing_can_be_written_fails(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(DONE, screen=False)), encoding="utf-8")
    out = str(tmp_path / "out")
    assert main(["data", "convert", str(file), "--out", out, "--to", "aguvis"]) == 1
