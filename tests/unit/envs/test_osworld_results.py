"""The files of OSWorld's episodes, several of which may play one task at once."""

from __future__ import annotations

import json
from pathlib import Path

from rayloop.envs.osworld.environment import ResultFiles


def steps(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "chrome/7/traj.jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["step_num"], line["action"]) for line in map(json.loads, lines)]


def test_episodes_of_one_task_do_not_write_into_each_others_files(tmp_path: Path) -> None:
    first, second = (ResultFiles.of(str(tmp_path), "chrome/7") for _ in range(2))
    for action in ("a", "b"):
        first.step(action, False)
        second.step(action.upper(), False)
    assert not (tmp_path / "chrome/7/traj.jsonl").exists(), "no episode is over"
    first.end(1.0)
    assert steps(tmp_path) == [(1, "a"), (2, "b")]
    second.step("C", True)
    second.end(0.0)
    assert steps(tmp_path) == [(1, "A"), (2, "B"), (3, "C")], "the last one that ends"
    assert (tmp_path / "chrome/7/result.txt").read_text(encoding="utf-8") == "0.0\n"
    assert sorted(file.name for file in (tmp_path / "chrome/7").iterdir()) == [
        "result.txt",
        "traj.jsonl",
    ]


def test_an_episode_without_an_action_has_a_result(tmp_path: Path) -> None:
    ResultFiles.of(str(tmp_path), "chrome/7").end(0.5)
    assert [file.name for file in (tmp_path / "chrome/7").iterdir()] == ["result.txt"]
