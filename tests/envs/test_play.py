"""``env play`` with a real page: what a person sees and types."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rayloop.cli import main
from rayloop.data.dataset import ChatRows, Dataset
from tests.envs.programs import needs
from tests.support.episodes import TINT, TINY, recorded

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.miniwob import MiniWob

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


def test_a_page_is_played_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = (
        "push it\nclick(start_box='(10,200)')\nAction: click(start_box='(10,200)')\nfinished()\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert (
        main(["env", "play", "miniwob:click-test", "--seed", "3", "--pictures", str(tmp_path)]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("user: Click the button.\npicture of 160x210 pixels")
    assert "not carried out: " in said
    assert said.endswith("the episode is over\nresult: 0\n")
    assert [Image.open(file).size for file in sorted(tmp_path.iterdir())] == [(160, 210)] * 4


def test_a_page_is_played_in_the_language_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points are thousandths of the screen, as Qwen3-VL writes them; another language is wrong."""
    call = (
        '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [62, 950]}}'
    )
    typed = f"click(start_box='(10,200)')\n<tool_call>{call}</tool_call>\nquit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    command = ["env", "play", "miniwob:click-test", "--language", "qwen3_vl"]
    assert main([*command, "--pictures", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert 'one turn a line, such as <tool_call>\n{"name": "computer_use"' in said
    assert said.count("not carried out: ") == 1
    assert "no line begins with '<tool_call>' or '{'" in said


def test_the_last_picture_is_of_what_the_last_turn_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("click(start_box='(80,160)')\n"))
    assert (
        main(["env", "play", "miniwob:click-test", "--seed", "3", "--pictures", str(tmp_path)]) == 0
    )
    before, after = (Image.open(file).convert("L") for file in sorted(tmp_path.iterdir()))
    assert before.getpixel((80, 20)) == after.getpixel((80, 20)), (
        "MiniWoB++'s dark START cover is over it"
    )


@pytest.mark.parametrize(("seed", "parted"), [(3, None), (4, 1)])
def test_a_recorded_episode_of_a_page_is_replayed_and_goes_on_by_hand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seed: int,
    parted: int | None,
) -> None:
    """The page of the recorded seed shows the same; that of another seed parts at once."""
    settings, rows = {"pointing": {"factor": 1}}, tmp_path / "rows.jsonl"

    def row(seed: int) -> Any:
        found = {
            "prompt": "{instruction}",
            "id": "push",
            "extra_info": {"page": "click-test-2", "seed": seed},
        }
        rows.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return Dataset(str(rows), ChatRows(ChatRows.Settings()), False, lambda failure: None, {})[0]

    beside = "Action: click(start_box='(10,200)')"
    said = [[beside, beside, "Action: finished()"]]
    run = recorded(
        tmp_path, "run", lambda: MiniWob(MiniWob.Settings.model_validate(settings)), row(3), said
    )
    row(seed)
    config = {
        "name": "run",
        "steps": 1,
        "data": {"train": str(rows)},
        "model": {
            "path": str(TINY),
            "min_pixels": 37632,
            "max_pixels": 37632,
            "position_tint": TINT,
        },
        "environment": {
            "language": "ui_tars",
            "episode": {
                "environment": {"use": "rayloop.envs.browser.miniwob:MiniWob", "with": settings},
                "max_turns": 6,
                "max_tokens": 8000,
            },
        },
        "reward": {"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
        "rollout": {"sampling": {"max_tokens": 400}},
    }
    run.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Action: finished()\n"))
    assert (
        main(
            [
                "env",
                "play",
                str(run.path),
                "--from",
                "1/1/0:3",
                "--pictures",
                str(tmp_path / "shown"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith(("on record> ", "> "))] == [
        f"on record> {beside}",
        f"on record> {beside}",
        "> Action: finished()",
    ]
    differs = [line for line in out.splitlines() if "something else" in line]
    assert differs == (
        []
        if parted is None
        else [f"turn {parted}: the environment shows something else than on record"]
    )
    assert out.endswith("the episode is over: done\nresult: 0\n")
    assert len(list((tmp_path / "shown").iterdir())) == 3
