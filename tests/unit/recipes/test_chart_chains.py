"""Chains of a teacher: a local server with the OpenAI interface answers, and what it wrote becomes
rows to train on.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from rayloop.core.failures import DataFailure
from rayloop.data.dataset import Dataset
from rayloop.recipes.chart_rvr import chains
from rayloop.recipes.chart_rvr.chains import _end_of_a_line
from rayloop.recipes.chart_rvr.data import ChartAnswers, ChartRows
from tests.support.storage import full
from tests.unit.data.test_published import png

GOOD = (
    '### Table\n```json\n{"columns": ["Year", "Sales"], "rows": [["2019", 10]]}\n```\n'
    "### Reasoning\n<step-1>: read 10\n### Type\nBar."
)


@contextmanager
def teacher(*replies: tuple[int, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers with each (status, text) in turn, with the last one from then on; yields its url and
    what was asked.
    """
    asked, left = list[dict[str, Any]](), list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, text = left.pop(0) if len(left) > 1 else left[0]
            body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chains.time, "sleep", lambda _: None)
    (tmp_path / "in/images").mkdir(parents=True)
    (tmp_path / "in/images/a.png").write_bytes(png())
    made = [
        {"id": f"r{i}", "image": "images/a.png", "query": f"Sales {i}?", "label": "10"}
        for i in range(3)
    ]
    (tmp_path / "in/rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in made), encoding="utf-8"
    )
    return tmp_path


def made(folder: Path, url: str, *options: str) -> int:
    given = [
        "--rows",
        str(folder / "in/rows.jsonl"),
        "--out",
        str(folder / "out"),
        "--url",
        url,
        "--model",
        "big",
        "--at-once",
        "1",
    ]
    return main(["data", "prepare", "chart_chains", *given, *options])


def test_chains_become_rows_with_a_supervised_answer(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with teacher((503, ""), (200, GOOD), (200, "### Type\nbar"), (200, GOOD)) as (url, asked):
        assert made(rows, url) == 0
        assert "left out: 1 x the teacher wrote no numbered steps" in capsys.readouterr().out
        assert asked[0]["model"] == "big"
        assert asked[0]["messages"][1]["content"][1]["text"] == "Question: Sales 0?\nAnswer: 10"
        assert made(rows, url) == 0, "what was left out is asked again, the rest is not"
        assert len(asked) == 5
    tasks = list(
        Dataset(
            rows / "out/train.jsonl", ChartRows(ChartRows.Settings()), True, lambda failure: None
        )
    )
    assert sorted(task.id for task in tasks) == ["r0", "r1", "r2"]
    assert Path(str(tasks[0].images[0].path)).read_bytes() == png()
    answer = ChartAnswers().answer(tasks[0], random.Random(0))
    assert (
        '<type>bar</type>\n<table>{"columns": ["Year", "Sales"], "rows": [["2019",'
        ' "10"]]}</table>\n<step-1>: read 10' in answer
    )


def test_rows_of_several_data_sets_become_one_file(rows: Path) -> None:
    """``data prepare`` numbers the rows of each set from 0."""
    file = rows / "in/rows.jsonl"
    text = file.read_text(encoding="utf-8")
    with teacher((200, GOOD)) as (url, asked):
        for source in ("chartqa", "plotqa", "plotqa"):
            file.write_text(
                text.replace('"label"', f'"data_source": "{source}", "label"'), encoding="utf-8"
            )
            assert made(rows, url) == 0
        assert len(asked) == 6
    tasks = list(
        Dataset(
            rows / "out/train.jsonl", ChartRows(ChartRows.Settings()), True, lambda failure: None
        )
    )
    assert sorted(task.id for task in tasks) == [
        f"{source}-r{n}" for source in ("chartqa", "plotqa") for n in range(3)
    ]


def test_a_teacher_that_is_gone_ends_the_command_and_keeps_what_there_is(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with teacher((200, GOOD), (500, "")) as (url, asked):
        assert made(rows, url) != 0
        assert "gave no answer (500" in capsys.readouterr().err
        assert len((rows / "out/train.jsonl").read_text().splitlines()) == 1
    with teacher((401, "")) as (url, asked):
        assert made(rows, url) != 0
        questions = [one["messages"][1]["content"][1]["text"] for one in asked]
        assert len(questions) == len(set(questions)), "a wrong key is not tried again"


def test_a_line_that_a_kill_left_is_asked_for_again(rows: Path) -> None:
    (rows / "out").mkdir()
    (rows / "out/train.jsonl").write_text('{"id": "r0", "ima', encoding="utf-8")
    with teacher((200, GOOD)) as (url, asked):
        assert made(rows, url) == 0
    assert len(asked) == 3
    lines = (rows / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == ["r0", "r1", "r2"]


def test_the_lines_that_a_teacher_was_paid_for_survive_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"id": "r0"}\n{"id": "r1", "ima', encoding="utf-8")
    before = file.read_bytes()
    with full(5), pytest.raises(OSError, match="File too large"):
        _end_of_a_line(file)
    assert file.read_bytes() == before
    _end_of_a_line(file)
    assert file.read_text(encoding="utf-8") == '{"id": "r0"}\n'


def test_no_row_at_all_fails_with_the_reasons(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with teacher((200, "no")) as (url, _):
        assert made(rows, url) == 2
    assert "has no row: the teacher wrote no numbered steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [("--url", "teacher:8000"), ("--api-key-env", "NOT_SET"), ("--rows", "none.jsonl")]
)
def test_mistakes_are_named(
    rows: Path, options: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(rows, "http://127.0.0.1:9/v1", *options) == 2
    assert f"{options[0]} {options[1]}" in capsys.readouterr().err


def test_what_cannot_be_read_is_left_out_and_a_chart_without_table_is_kept() -> None:
    assert chains.parsed("## Reasoning:\n<step-1> a\n## Type: Stacked Bar")["table"] is None
    for text in (
        "",
        "### Reasoning\nno steps\n### Type\nbar",
        "### Reasoning\n<step-1>: a\n### Type\nradar",
    ):
        with pytest.raises(DataFailure):
            chains.parsed(text)
