"""The demonstrator and the random player of ARPO's tiny model, in live pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.grammar.actions import Actions
from rayloop.envs.grammar.scanner import read
from rayloop.recipes.arpo.prepare import PAGES, rows
from rayloop.run.folder import RunFolder
from tests.support.runs import ledger_closes
from tools.makers.browser_clicks import TURNS, WARM_PAGES, demonstrated, record
from tools.makers.random_clicks import ARM, play

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


@pytest.mark.parametrize("page", [*WARM_PAGES, "click-collapsible"])
def test_a_demonstrator_that_is_not_hasty_solves_the_page(page: str) -> None:
    played = [demonstrated(row, 0.2) for row in rows("calm", 3, pages=(page,))]
    turns, result = next((turns, result) for turns, result in played if turns)
    assert result == 1.0
    assert isinstance(read(turns[-1]["answer"]), Actions)
    for number, turn in enumerate(turns):
        assert [said["role"] for said in turn["prompt"]] == ["user", "assistant"] * number + [
            "user"
        ]
        assert len(turn["images"]) == number + 1


def test_a_hasty_one_misses_and_tries_again(tmp_path: Path) -> None:
    solved, turns = record(tmp_path / "warm.parquet", list(rows("hasty", 9)), 1.6)
    assert (tmp_path / "warm.parquet").stat().st_size > 0
    assert 9 < turns <= 9 * TURNS
    assert 0 < solved <= 1


def test_chance_wins_now_and_then() -> None:
    items = play(list(rows("chance", len(PAGES))), turns=4, samples=2)
    assert len(items) == 2 * len(PAGES)
    assert {item.arm for item in items} == {ARM}
    assert 0 < sum(item.reward or 0.0 for item in items) < len(items)


@pytest.mark.timeout(300)
def test_three_steps_of_the_quickstart_keep_successes_for_replay(tmp_path: Path) -> None:
    """As it is shipped, but on two tasks that come again each step."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows("ci", 2, pages=("click-test",))),
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "rayloop",
        "train",
        "recipes/arpo/quickstart.yaml",
        f"output={tmp_path / 'runs'}",
        f"data.train={tmp_path / 'rows.jsonl'}",
        "steps=3",
        "evaluation.every=0",
        "checkpoint.every=3",
        "algorithm.groups_per_step=2",
        "algorithm.group_size=6",
        "weight_sync.logprob_check=warn",
    ]
    assert subprocess.run(command, timeout=280).returncode == 0
    folder = RunFolder(tmp_path / "runs", "arpo-quickstart")
    assert [step["step"] for step in folder.metrics] == [1, 2, 3]
    saved = json.loads(
        (folder.path / "checkpoints/step_000003/driver.json").read_text(encoding="utf-8")
    )
    assert any(saved["rollouts"]["finished"]["replay"].values()), "most clicks on this page succeed"
    ledger_closes(next(event["ledger"] for event in folder.events if event["event"] == "finished"))
    played = [
        json.loads(line)
        for file in folder.rollouts.files().values()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert {record["components"]["success"] for record in played} <= {0.0, 1.0}
    assert all(record["turns"] for record in played)
