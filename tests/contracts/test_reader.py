"""What every reader keeps to: the shipped ones and that of the documentation, on rows of JSONL and
of parquet.

A new reader: a line in ``tools/pages/config.py``, and two of its rows here.
"""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from rayloop.cli import main
from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Task
from rayloop.data.dataset import Dataset
from rayloop.run.sections import DataSettings
from tests.support.packages import package_marks
from tests.support.pages import write_snippets
from tests.support.pictures import picture
from tools.pages.config import COMPONENTS

Row = dict[str, Any]
CHAT: list[Row] = [
    {
        "id": f"c{i}",
        "data_source": "sums",
        "images": ["a.png"],
        "extra_info": {"level": i},
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"<image>{i} and 1?"},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
    }
    for i in range(2)
]
ARC: list[Row] = [
    {
        "images": ["a.png"],
        "ground_truth": [0.1, 0.2, 0.3, 0.4],
        "extra_info": {
            "index": i,
            "split": "train",
            "element_type": "form",
            "original_instruction": f"Click {i}.",
        },
    }
    for i in range(2)
]
INLINE = f"data:image/png;base64,{base64.b64encode(picture(56, 56)).decode()}"
FLAT: list[Row] = [
    {
        "id": f"g{i}",
        "image": "a.png",
        "instruction": f"Click {i}.",
        "bbox": [0.1, 0.2, 0.3, 0.4],
        "page": "p",
    }
    for i in range(2)
]
ROWS: dict[str, list[list[Row]]] = {
    "rayloop.data.dataset:ChatRows": [
        CHAT,
        [{"id": f"q{i}", "prompt": f"{i}?", "answer": str(i)} for i in range(2)],
    ],
    "rayloop.recipes.arc_vision.data:GroundingRows": [ARC, FLAT],
    "rayloop.recipes.arc_vision.data:ScreenRows": [[{**row, "image": INLINE} for row in FLAT]],
    "rayloop.recipes.chart_rvr.data:ChartRows": [
        [
            {
                "id": f"r{i}",
                "image": "a.png",
                "query": "How many?",
                "label": str(i),
                "chart_type": "bar",
                "reasoning": "",
                "table": {"columns": ["Year"], "rows": [["2019"]]},
            }
            for i in range(2)
        ]
    ],
    "rayloop.recipes.chart_rvr.data:ConversationRows": [
        [
            {
                "id": f"c{i}",
                "image": "a.png",
                "query": "And in 2010?",
                "label": str(i),
                "questions": ["In 2009?", "And in 2010?"],
                "answers": ["3", str(i)],
                "paragraph": "About sales.",
            }
            for i in range(2)
        ]
    ],
    "rayloop.recipes.pyvision.data:QuestionRows": [
        [
            {
                "id": f"v{i}",
                "image": "a.png",
                "question": "How many?",
                "answer": str(i),
                "kind": "count",
            }
            for i in range(2)
        ],
        [
            {
                "mm_hint": {"hint_type": "image", "hint_path": "a.png"},
                "data_source": "vstar",
                "extra_info": {"index": f"h{i}", "question": "How many?"},
                "reward_model": {"ground_truth": str(i)},
            }
            for i in range(2)
        ],
        [
            {"id": f"f{i}", "videos": [["a.png"]], "question": "Which?", "answer": str(i)}
            for i in range(2)
        ],
    ],
    "rayloop.recipes.digits.data:DigitRows": [
        [{"id": f"d{i}", "digits": [3, i, 1]} for i in range(2)]
    ],
    "rayloop.envs.adapters.nemo_gym:NemoGymRows": [
        [
            {
                "id": f"n{i}",
                "expected": str(i),
                "responses_create_params": {"input": [{"role": "user", "content": f"Say {i}."}]},
            }
            for i in range(2)
        ]
    ],
    "rayloop.envs.adapters.reasoning_gym:ReasoningGymRows": [
        [
            {"task": "leg_counting", "seed": 7, "index": i, "size": 3, "config": {"min_animals": 2}}
            for i in range(2)
        ]
    ],
}
"""By reader: for each kind of row that it reads, two of them, with ids of their own."""
KINDS = [(use, rows) for use, kinds in ROWS.items() for rows in kinds]
each = pytest.mark.parametrize(
    ("use", "rows"),
    [
        pytest.param(use, rows, id=f"{use.split(':')[1]}-{rows[0]!r:.20}", marks=package_marks(use))
        for use, rows in KINDS
    ],
)


def dataset(use: str, path: Path) -> tuple[dict[str, Task], list[DataFailure], Dataset]:
    """Tasks by id, and what was left out."""
    bad: list[DataFailure] = []
    read = Dataset(path, Component(use=use).build(), False, bad.append)
    return {task.id: task for task in read}, bad, read


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_every_shipped_reader_is_here() -> None:
    shipped = {use for (title, _), uses in COMPONENTS.items() if title == "Readers" for use in uses}
    assert shipped == ROWS.keys()


@each
def test_jsonl_and_parquet_hold_the_same_tasks(tmp_path: Path, use: str, rows: list[Row]) -> None:
    tasks, bad, _ = dataset(use, jsonl(tmp_path / "rows.jsonl", rows))
    assert (len(tasks), bad) == (2, [])
    for task in tasks.values():
        assert task.messages
        assert task.messages[-1].role != "assistant"
        assert task.ground_truth is not None
        shown = [
            part
            for message in task.messages
            for part in message.parts
            if isinstance(part, ImageSource)
        ]
        files = [image.path for image in shown if image.data is None]
        assert all(path == str(tmp_path / "a.png") for path in files), "relative to the file"
        assert pickle.loads(pickle.dumps(task)) == task, "it travels between processes"
    same, bad, _ = dataset(use, parquet(tmp_path / "rows.parquet", rows))
    assert not bad
    assert [(t.id, t.messages, t.ground_truth, t.source) for t in same.values()] == [
        (t.id, t.messages, t.ground_truth, t.source) for t in tasks.values()
    ]


@each
def test_a_row_is_the_same_task_wherever_it_stands(
    tmp_path: Path, use: str, rows: list[Row]
) -> None:
    """Seeds, replay and what an evaluation has on record go by the id."""
    first, _, _ = dataset(use, jsonl(tmp_path / "a.jsonl", rows))
    other, _, _ = dataset(use, jsonl(tmp_path / "b.jsonl", rows[::-1]))
    assert first == other
    assert list(first) == list(other)[::-1]
    assert all(isinstance(id, str) and id for id in first)


@each
def test_a_row_is_left_as_it_is(tmp_path: Path, use: str, rows: list[Row]) -> None:
    reader = Component(use=use).build()
    for row in rows:
        before = copy.deepcopy(row)
        task = reader.task(row, "rows.jsonl:1", tmp_path)
        assert row == before
        assert reader.task(row, "rows.jsonl:1", tmp_path) == task


@each
@pytest.mark.parametrize("value", [None, "", 3, [], {}, ["x", None], {"a": 1}, "absent"], ids=repr)
def test_a_bad_row_is_left_out_by_file_and_line(
    tmp_path: Path, use: str, rows: list[Row], value: Any
) -> None:
    """Whatever stands in one column, the other rows are read, and the message says where to look."""
    for column in rows[0]:
        spoilt = {name: kept for name, kept in rows[0].items() if name != column}
        if value != "absent":
            spoilt[column] = value
        path = jsonl(tmp_path / "rows.jsonl", [rows[1], spoilt])
        tasks, bad, _ = dataset(use, path)
        assert len(tasks) + len(bad) == 2
        assert [failure.path for failure in bad] in ([], [f"{path}:2"])
        assert all(failure.reason for failure in bad)


@each
def test_an_empty_row_is_no_task(tmp_path: Path, use: str, rows: list[Row]) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{}, rows[0]])
    tasks, bad, read = dataset(use, path)
    assert [failure.path for failure in bad] == [f"{path}:1"]
    assert [read.where(task) for task in tasks.values()] == [f"{path}:2"]
    with pytest.raises(DataFailure, match=r"rows\.jsonl:1"):
        Dataset(path, Component(use=use).build(), True, bad.append)


def test_the_reader_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_snippets("bring_your_own/reader.md", tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    for name in ("r1", "r2"):
        Image.new("RGB", (56, 56)).save(folder / f"{name}.png")
    data = DataSettings.model_validate(
        yaml.safe_load((folder / "data.yaml").read_text(encoding="utf-8"))["data"]
    )
    read = Dataset(data.train, data.reader.build(), True, lambda failure: None)
    assert [(task.id, task.ground_truth, task.source) for task in read] == [
        ("r1", 5, "reviews"),
        ("r2", 1, "reviews"),
    ]
    assert read[0].messages[0].parts[1] == "Lovely.\nStars, from 1 to 5?"
    assert main(["data", "validate", "reviews.jsonl", "--reader", data.reader.use]) == 0
    rows = [
        json.loads(line) for line in Path("reviews.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    jsonl(Path("reviews.jsonl"), [rows[0], {**rows[1], "stars": "many"}, {**rows[1], "key": None}])
    assert main(["data", "validate", "reviews.jsonl", "--reader", data.reader.use]) == 1
    out = capsys.readouterr().out
    assert "reviews.jsonl:2: Reviews cannot read the row" in out
    assert "reviews.jsonl:3: the field 'key' is missing or empty" in out
