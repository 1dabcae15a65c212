"""Texts with half a surrogate pair, as JSON, rewards and environments may have them, end nothing
that writes or sends them.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from rayloop.cli import main
from rayloop.core.files import utf8
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.run.records.jsonl import JsonLines, encode

HALF, OTHER_HALF, EMOJI = "\ud83d", "\ude00", "\U0001f600"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3", "3"),
        (f"3 {HALF}", "3 \ufffd"),
        (f"{OTHER_HALF}{HALF} x", "\ufffd\ufffd x"),
        (HALF + OTHER_HALF, EMOJI),
        (EMOJI + HALF, EMOJI + "\ufffd"),
        ("a\x00b\u2028\x85", "a\x00b\u2028\x85"),
    ],
)
def test_half_a_pair_becomes_a_mark_and_two_halves_their_character(text: str, shown: str) -> None:
    assert utf8(text) == shown
    assert utf8(text).encode().decode() == shown


def test_a_record_is_written_whatever_its_texts_are(tmp_path: Path) -> None:
    record = {f"key {HALF}": [f"3 {HALF}", {"deep": HALF + OTHER_HALF}], "score": float("nan")}
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append(record)
    assert lines.trouble is None
    [found] = [
        {k: v for k, v in one.items() if k not in ("time", "schema_version")} for one in lines
    ]
    assert found == {"key \ufffd": ["3 \ufffd", {"deep": EMOJI}], "score": None}
    assert json.loads(encode(record).encode())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_the_texts_of_a_row_have_a_form_in_utf_8(name: str, tmp_path: Path) -> None:
    row = (
        '{"prompt": "Add: 1 2 \\ud83d", "answer": "3 \\uD83D", "id": "a\\ude00", "more":'
        ' {"x\\ud83d": ["\\ud83d\\ude00"]}}'
    )
    (tmp_path / name).write_text(
        f"[{row}]" if name.endswith(".json") else f"{row}\n", encoding="utf-8"
    )
    [task] = Dataset(tmp_path / name, ChatRows(ChatRows.Settings()), True, print)
    assert (task.id, task.ground_truth, task.messages[0].parts) == (
        "a\ufffd",
        "3 \ufffd",
        ("Add: 1 2 \ufffd",),
    )
    assert task.extra["more"] == {"x\ufffd": [EMOJI]}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_command_prints_what_its_terminal_cannot_show(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "q", "answer": HALF}) + "\n", encoding="utf-8"
    )
    assert main(["data", "validate", str(tmp_path / "rows.jsonl")]) == 0
    print(f"truth: {HALF} {EMOJI}")
    out.flush()
    assert b"truth: ?" in out.buffer.getvalue()  # type: ignore[attr-defined]
