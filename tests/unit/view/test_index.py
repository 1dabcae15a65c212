"""The index of episodes: files are read once, what a restore set aside is forgotten, and a folder
may be read-only.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines
from rayloop.view.index import EpisodeIndex
from rayloop.view.reader import Tail
from tests.unit.view.test_filmstrip import hostile as hostile
from tests.unit.view.test_trajectory_page import folder as folder


def found(index: EpisodeIndex, **filters: str) -> list[tuple[int, int, int]]:
    _, rows = index.search(filters, "newest", False, 0, 100)
    return [(row["step"], row["grp"], row["sample"]) for row in rows]


def test_only_new_files_are_read(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = EpisodeIndex(folder), list[str]()
    index.update()
    assert index.path == folder.path / "index.sqlite"
    assert len(found(index)) == 10
    whole = JsonLines.__iter__

    def counted(lines: JsonLines) -> object:
        read.append(lines.path.name)
        return whole(lines)

    monkeypatch.setattr(JsonLines, "__iter__", counted)
    folder.rollouts.file(4).write_bytes(folder.rollouts.file(2).read_bytes())
    again = EpisodeIndex(folder)
    again.update()
    assert read == ["step_000004.jsonl"]
    assert {step for step, _, _ in found(again)} == {1, 2, 4}


def test_a_file_that_is_replaced_or_set_aside_is_forgotten(folder: RunFolder) -> None:
    index = EpisodeIndex(folder)
    index.update()
    before = found(index, text="bbox")
    folder.rollouts.set_aside_after(1)
    index.update()
    assert (
        {step for step, _, _ in found(index, text="bbox")} == {1} < {step for step, _, _ in before}
    )
    lines = folder.rollouts.file(1).read_bytes().splitlines(keepends=True)
    folder.rollouts.file(1).write_bytes(lines[0])
    index.update()
    assert found(index) == [(1, 1, 0)]


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_found(folder: RunFolder) -> None:
    folder.rollouts.file(7).write_text('{"group": 1}\n', encoding="utf-8")
    folder.rollouts.file(8).write_text("no JSON\n", encoding="utf-8")
    index = EpisodeIndex(folder)
    index.update()
    assert index.state()["broken"] == {
        7: "damaged lines are left out: 1",
        8: "damaged lines are left out: 1",
    }
    assert len(found(index)) == 10


def test_a_time_limit_leaves_the_rest_for_the_next_call(folder: RunFolder) -> None:
    index = EpisodeIndex(folder)
    index.update(seconds=0)
    assert (index.state()["read"], index.state()["files"]) == (1, 2)
    assert {step for step, _, _ in found(index)} == {2}, "the newest first"
    index.update(seconds=0)
    assert index.state()["read"] == 2


def test_a_damaged_index_or_one_of_another_version_is_made_anew(folder: RunFolder) -> None:
    index = EpisodeIndex(folder)
    index.update()
    index.path.write_bytes(b"no database" * 1000)
    again = EpisodeIndex(folder)
    assert again.state()["episodes"] == 0
    again.update()
    assert len(found(again)) == 10


def test_a_read_only_folder_has_its_index_in_the_cache(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = EpisodeIndex(folder)
    index.update()
    assert index.path.parent == tmp_path / "cache/rayloop"
    assert len(found(index)) == 10
    assert not (folder.path / "index.sqlite").exists()


def test_hostile_texts_are_found(hostile: RunFolder) -> None:
    index = EpisodeIndex(hostile)
    index.update()
    for words in ("broken", "half", "שלום", "onerror document.title", "long", "bell"):
        assert found(index, text=words) == [(1, 1, 0)], words
    assert found(index, text="nowhere") == []


def test_a_growing_file_is_parsed_once_and_a_replaced_one_anew(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    tail = Tail(lines)
    assert tail.records() == []
    lines.append({"step": 1})
    first = tail.records()
    with lines.path.open("ab") as file:
        file.write(b'{"step": 2, "text": "\xff')
    assert tail.records() is first, "a line that is not whole yet"
    with lines.path.open("ab") as file:
        file.write(b'"}\n')
    assert [(record["step"], record.get("text")) for record in tail.records()] == [
        (1, None),
        (2, "\ufffd"),
    ]
    lines.split(lambda record: record["step"] <= 1, tmp_path / "aside")
    assert [record["step"] for record in tail.records()] == [1]
