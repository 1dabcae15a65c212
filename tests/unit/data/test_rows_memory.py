"""Pictures within rows are in the driver's memory once."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayloop.data.dataset import ChatRows, Dataset
from tests.support.pictures import picture
from tests.support.runs import ROOT

COUNT, EACH = 120, 500_000
ALLOWED = 1.4
"""Resident bytes for each byte of pictures; it was 3.4 when the pool of the parquet reader kept its
own.
"""
PROGRAM = f"""
import os, pyarrow, pyarrow.parquet
from rayloop.data.dataset import ChatRows, Dataset
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
made = Dataset("rows.parquet", ChatRows(ChatRows.Settings()), False, print)
print((resident() - before) / {COUNT * EACH})
"""
WRITE = f"""
import os, pyarrow, pyarrow.parquet
rows = [dict(prompt="q", answer="a", images=[dict(bytes=os.urandom({EACH}), path=None)]) for _ in range({COUNT})]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet", row_group_size=40, use_dictionary=False)
"""


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_parquet_file_with_pictures_takes_about_their_size(tmp_path: Path) -> None:
    run(WRITE, tmp_path)
    assert 0.9 < float(run(PROGRAM, tmp_path)) < ALLOWED


def text_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (lambda url: {"prompt": "q", "images": [url], "hint": "x"}, {"prompt", "hint"}),
        (lambda url: {"prompt": "q", "image": {"bytes": url}, "hint": "x"}, {"prompt", "hint"}),
        (
            lambda url: {
                "prompt": [{"role": "user", "content": [{"type": "image", "image": url}]}],
                "hint": "x",
            },
            {"hint"},
        ),
        (
            lambda url: {"prompt": "q", "images": ["a.png"], "hint": "x"},
            {"prompt", "images", "hint"},
        ),
        (lambda url: {"prompt": "q", "hint": "x"}, {"prompt", "hint"}),
    ],
)
def test_extra_has_no_second_copy_of_a_picture(row: Any, kept: set[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(row(text_of(picture(28, 28)))) + "\n", encoding="utf-8"
    )
    [task] = Dataset(tmp_path / "rows.jsonl", ChatRows(ChatRows.Settings()), True, print)
    assert task.extra.keys() == kept


def test_the_column_of_a_question_stays_for_the_reward(tmp_path: Path) -> None:
    row = {"question": "q", "images": [text_of(picture(28, 28))]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    [task] = Dataset(
        tmp_path / "rows.jsonl", ChatRows(ChatRows.Settings(prompt="question")), True, print
    )
    assert task.extra == {"question": "q", "prompt": "q"}
