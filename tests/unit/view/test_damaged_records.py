"""Lines of a run's records that a power loss, a network file system or another program has damaged:
every reader leaves them out and says how many they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from rayloop.cli import main
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items
from rayloop.run.records import jsonl
from rayloop.run.records.jsonl import JsonLines
from rayloop.serve_apps.console.app import web
from rayloop.view.index import EpisodeIndex
from rayloop.view.reader import Tail
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

OTHER_JSON = (
    "[]",
    "42",
    "null",
    '"text"',
    "{}",
    '{"a": 1}',
    '{"time": 1.0, "step": "x", "event": "begin"}',
    '{"step": NaN}',
    '{"step": 1e999, "time": 1.0}',
    "[" * 100_000,
    "9" * 5_000,
)
"""Lines that are JSON, or look like it, and no record of any of the files."""


def zeros(content: bytes) -> bytes:
    """A block that was not yet on the disk: within a line, and over the border to the next one."""
    middle = content.index(b"\n", len(content) // 2)
    return content[: middle - 20] + bytes(40) + content[middle + 20 :]


def half(content: bytes) -> bytes:
    """The second line lacks its beginning: two writers, or a hole that was cut out."""
    first, second, *rest = content.splitlines(keepends=True)
    return b"".join([first, second[len(second) // 2 :], *rest])


def joined(content: bytes) -> bytes:
    """The end of the first line and the beginning of the second are gone."""
    end = content.index(b"\n")
    return content[: end - 5] + content[end + 6 :]


def other(line: str) -> Callable[[bytes], bytes]:
    def insert(content: bytes) -> bytes:
        first, *rest = content.splitlines(keepends=True)
        return b"".join([first, line.encode() + b"\n", *rest])

    return insert


DAMAGES = {
    "zeros": zeros,
    "half": half,
    "joined": joined,
    "latin-1": other("\xe9\xff"),
    **{line[:40]: other(line) for line in OTHER_JSON},
}
FILES = (
    "metrics.jsonl",
    "events.jsonl",
    "rollouts/step_000001.jsonl",
    "evaluations/step_000003.jsonl",
)
PAGES = ("/", "/curves", "/step/1", "/rollouts", "/evaluations", "/events", "/judge")


@contextmanager
def damaged(folder: RunFolder, file: str, damage: str) -> Iterator[None]:
    path = folder.path / file
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert path.read_bytes() != whole
    yield
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_left_is_read_whole_and_in_parts(tmp_path: Path, damage: str) -> None:
    file = JsonLines(tmp_path / "x.jsonl", lambda record: isinstance(record.get("step"), int))
    for step in range(6):
        file.append({"step": step, "text": "t" * 50})
    file.close()
    content = DAMAGES[damage](file.path.read_bytes())
    file.path.write_bytes(content)
    found = list(file)
    lost = file.damaged
    assert lost
    assert len(found) + lost == content.count(b"\n")
    assert 4 <= len(found) <= 6
    records, end = file.since(0)
    assert (records, end, file.damaged) == (found, len(content), lost)
    file.append({"step": 6})
    later, _ = file.since(end)
    assert [record["step"] for record in later] == [6]
    assert file.damaged == lost


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["zeros", "half", "joined", "[]", "{}", '{"a": 1}'])
def test_every_command_and_page_shows_the_rest(
    evaluated: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: str
) -> None:
    run, name = str(evaluated.path), file.partition("/")[0]
    with damaged(evaluated, file, damage):
        for words in (
            ["status", run],
            ["report", run, "--out", str(tmp_path / "x.html"), "--files"],
            ["compare", run],
        ):
            assert main(words) == 0, words
        told = capsys.readouterr().out + (tmp_path / "x.html").read_text(encoding="utf-8")
        assert f" of {name}" in told
        assert "damaged lines are left out" in told
        with TestClient(web(evaluated, ""), "http://127.0.0.1:8000") as client:
            for page in PAGES:
                assert client.get(page).status_code == 200, page
        assert Tail(evaluated.metrics).records()
        assert evaluated.last_step() >= 1
        index = EpisodeIndex(evaluated)
        index.update()
        assert (1 in index.state()["broken"]) == (name == "rollouts")
        if name == "evaluations":
            assert 8 <= len(read_items(evaluated.path / file)) < 13


def test_status_names_the_file_and_the_number(
    evaluated: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with damaged(evaluated, "events.jsonl", "null"):
        main(["status", str(evaluated.path)])
        assert "damaged lines are left out: 1 of events.jsonl" in capsys.readouterr().out
    main(["status", str(evaluated.path)])
    assert "damaged" not in capsys.readouterr().out


def test_an_event_of_another_version_is_shown_with_its_fields(
    evaluated: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with evaluated.events.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "silent", "time": 5.0, "who": "rollout 1"}) + "\n")
    assert main(["status", str(evaluated.path)]) == 0
    assert "who rollout 1" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["zeros", "half", "[]"])
def test_a_run_that_continues_moves_damaged_lines_aside(evaluated: RunFolder, damage: str) -> None:
    metrics = evaluated.metrics
    with damaged(evaluated, "metrics.jsonl", damage):
        before, lost = [record["step"] for record in metrics], metrics.damaged
        lines = metrics.path.read_bytes().splitlines(keepends=True)
        moved = evaluated.truncate_after(2)
        assert metrics.damaged == lost > 0
        assert [record["step"] for record in metrics] == [step for step in before if step <= 2]
        assert metrics.damaged == 0
        aside = evaluated.path / "metrics.jsonl.attempt-1"
        assert len(aside.read_bytes().splitlines()) == moved + lost
        assert set(aside.read_bytes().splitlines(keepends=True)) <= set(lines), "as they were"


class FewBytes(FileIO):
    """Takes five bytes at a time, as some network file systems do when they are nearly full."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[:5])


def test_a_line_that_the_storage_takes_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "FileIO", FewBytes)
    records = JsonLines(tmp_path / "events.jsonl")
    for step in range(3):
        records.append({"event": "begin", "step": step})
    records.close()
    assert [record["step"] for record in JsonLines(records.path)] == [0, 1, 2]
    assert not records.damaged
