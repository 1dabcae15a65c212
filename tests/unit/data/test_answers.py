"""The answers of the supervised stage: a class, a function, or the rows' column; what is wrong is
said before anything starts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from rayloop.cli import main
from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from rayloop.sft.answers import AnswerColumn, built, checked

TASK = Task("t", (Message("user", ("How many?",)),), "3")
MINE = """
import random

def spoken(task, rng):
    return f"{task.ground_truth} {rng.randint(1, 1)}"

def plain(task):
    return task.ground_truth

def other(foo):
    return ""

async def later(task):
    return ""

def number(task):
    return 3

def raises(task):
    raise KeyError("mine")

class Without:
    pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_answers.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "How many?", "answer": "3"}) + "\n", encoding="utf-8"
    )
    (tmp_path / "warm.yaml").write_text(
        "output: out\nsteps: 1\nmodel: {path: tiny}\ndata: {train: rows.jsonl}\ntiny: {vision:"
        " false}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("use", "said"), [("spoken", "3 1"), ("plain", "3")])
def test_a_function_is_accepted_as_rewards_accept_one(project: Path, use: str, said: str) -> None:
    answers = built(Component(use=f"{project}/mine_answers.py:{use}"))
    assert answers.answer(TASK, random.Random(0)) == said


def test_the_column_of_answers_is_the_default() -> None:
    assert AnswerColumn().answer(TASK, random.Random(0)) == "3"
    assert AnswerColumn().answer(Task("t", (), 4), random.Random(0)) == "4"
    for truth in (None, {"box": [1]}):
        with pytest.raises(DataFailure, match=r"Name the column with data\.reader\.with\.truth"):
            AnswerColumn().answer(Task("t", (), truth), random.Random(0))


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("other", "Expected a function of (task) or (task, rng)"),
        ("later", "is a coroutine function"),
        ("number", "the answer is 3, neither a text nor a list of Message"),
        ("raises", "in raises"),
        ("Without", "has no method answer"),
    ],
)
def test_wrong_answers_are_refused_before_anything_starts(
    project: Path, use: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "warm.yaml", f"answers.use=mine_answers.py:{use}"]) == 2
    assert why in capsys.readouterr().err
    assert not (project / "out").exists()


def test_a_row_whose_image_lies_elsewhere_is_tried_too(
    project: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data.anywhere, as the stage itself reads the rows."""
    image = tmp_path_factory.mktemp("elsewhere") / "a.png"
    Image.new("RGB", (28, 28)).save(image)
    row = {"prompt": "How many?", "answer": "3", "images": [str(image)]}
    (project / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    stage = ["sft", "warm.yaml", "answers.use=mine_answers.py:raises", "data.anywhere=true"]
    assert main(stage) == 2
    assert "in raises" in capsys.readouterr().err


def test_an_answer_is_a_text_or_messages() -> None:
    messages = [Message("assistant", ("Yes.",))]
    assert checked(messages, TASK) == messages
    assert checked("Yes.", TASK) == messages
    for wrong in (None, [], ["Yes."], b"Yes."):
        with pytest.raises(DataFailure, match="neither a text nor a list of Message"):
            checked(wrong, TASK)
