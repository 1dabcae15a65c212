"""``env play --from``: a recorded episode is replayed up to a turn, and goes on by hand; where it
parts from the record is said.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from rayloop.cli import main
from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.run.folder import RunFolder
from tests.support.episodes import TINT, TINY, recorded
from tests.support.pictures import picture


class Counter:
    """Counts actions, and shows the last one; from action ``moody`` on in another way than a
    counter that is less moody.
    """

    class Settings(SettingsModel): ...

    moody: ClassVar[int] = 99

    def __init__(self, settings: Settings | None = None) -> None:
        self.actions = list[str]()

    def reset(self, task: Task) -> Observation:
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        self.actions.append(text)
        turn = len(self.actions)
        shown = f"{turn}: {text}" + ("!" if turn >= self.moody else "")
        return StepResult(
            Observation((Message("user", (shown, ImageSource(data=picture(28 * turn, 28)))),)),
            done=text == "end",
        )

    def evaluate(self) -> float:
        return float(len(self.actions))

    def close(self) -> None: ...


SAID = (("red", "green \x1b[2J", "blue", "end"), ("quit", "end"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "one", "id": "first"}\n{"prompt": "two", "id": "second"}\n', encoding="utf-8"
    )
    task = Dataset(str(rows), ChatRows(ChatRows.Settings()), False, lambda failure: None, {})[1]
    folder = recorded(tmp_path, "run", Counter, task, SAID)
    config = {
        "name": "run",
        "steps": 1,
        "model": {
            "path": str(TINY),
            "min_pixels": 37632,
            "max_pixels": 37632,
            "position_tint": TINT,
        },
        "data": {"train": str(rows)},
        "reward": {"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
        "environment": {
            "episode": {
                "environment": {"use": f"{__name__}:Counter"},
                "max_turns": 9,
                "max_tokens": 8000,
            }
        },
        "rollout": {"sampling": {"max_tokens": 400}},
    }
    folder.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def played(
    monkeypatch: pytest.MonkeyPatch, lines: str, run: RunFolder, origin: str, *words: str
) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setenv("HOME", str(run.path))
    return main(
        [
            "env",
            "play",
            str(run.path),
            "--from",
            origin,
            "--pictures",
            str(run.path / "pictures"),
            *words,
        ]
    )


@pytest.mark.parametrize(
    "origin", ["1/1/0:3", "http://127.0.0.1:4321/step/1/group/1/sample/0#turn-3"]
)
def test_an_episode_is_replayed_up_to_a_turn_and_goes_on_by_hand(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], origin: str
) -> None:
    assert played(monkeypatch, "yellow\nend\n", run, origin) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith(("on record> ", "> "))] == [
        "on record> red",
        "on record> green \\x1b[2J",
        "> yellow",
        "> end",
    ]
    assert "two" in said, "the task of the episode, not the first row"
    assert "3: yellow" in said
    assert "something else" not in said
    assert said.endswith("the episode is over: done\nresult: 4\n")
    assert len(list((run.path / "pictures").iterdir())) == 3


def test_a_recorded_turn_that_says_quit_is_replayed_and_a_typed_one_leaves(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(monkeypatch, "end\n", run, "1/1/1:2") == 0
    assert "on record> quit" in capsys.readouterr().out
    assert played(monkeypatch, "quit\n", run, "1/1/1:2") == 0
    assert capsys.readouterr().out.endswith("the episode was left\n")


@pytest.mark.parametrize(
    ("moody", "turn", "parted"), [(1, 3, 2), (2, 3, 3), (2, 2, None), (3, 3, None)]
)
def test_where_the_environment_parts_from_the_record_is_said_once(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moody: int,
    turn: int,
    parted: int | None,
) -> None:
    monkeypatch.setattr(Counter, "moody", moody)
    assert played(monkeypatch, "end\n", run, f"1/1/0:{turn}") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "something else" in line]
    assert lines == (
        []
        if parted is None
        else [f"turn {parted}: the environment shows something else than on record"]
    )


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        ("1/1/0:5", "this episode has the turns 1 to 4"),
        ("1/1/0:0", "turns 1 to 4"),
        ("1/1/7:1", "episode 7 of group 1 of step 1 is not"),
        ("2/1/0:1", "of step 2 is not on record"),
        ("0:1", "expected STEP/GROUP/SAMPLE:TURN"),
    ],
)
def test_what_is_not_on_record_is_refused(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    origin: str,
    why: str,
) -> None:
    assert played(monkeypatch, "", run, origin) == 2
    assert why in capsys.readouterr().err


def test_a_task_that_the_data_no_longer_has_is_named(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        json.loads(line) | {"task": "third"}
        for line in run.rollouts.file(1).read_text(encoding="utf-8").splitlines()
    ]
    run.rollouts.file(1).write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    assert played(monkeypatch, "", run, "1/1/0:2") == 2
    assert "third" in capsys.readouterr().err
