"""Messages of rows: all keys that a chat template may read, the forms of other tools, what is
refused.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import Message, Task
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.data.validation import check

ASKED = {"role": "user", "content": "Weather in Rome?"}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "unit": None}},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "default": None}},
}


def one(path: Path, row: dict[str, Any]) -> Task:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return Dataset(path, ChatRows(ChatRows.Settings()), True, lambda failure: None)[0]


def test_all_keys_of_a_message_reach_the_template(tmp_path: Path) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "reasoning_content": "Look.",
    }
    result = {
        "role": "tool",
        "content": "",
        "tool_call_id": "1",
        "name": "weather",
        "tool_calls": None,
    }
    task = one(tmp_path / "t.jsonl", {"prompt": [ASKED, called, result], "answer": "20"})
    assert task.messages == (
        Message("user", ("Weather in Rome?",)),
        Message(
            "assistant", (), {"reasoning_content": "Look.", "tool_calls": [CALL], "content": None}
        ),
        Message("tool", (), {"tool_call_id": "1", "name": "weather"}),
    )


def test_the_null_keys_of_parquet_are_dropped_and_those_of_json_stay(tmp_path: Path) -> None:
    row = {
        "prompt": [
            ASKED,
            {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
            {"role": "tool", "content": "20"},
        ]
    }
    written, stored = (
        one(tmp_path / name, {**row, "tools": [TOOL], "answer": "20"})
        for name in ("t.jsonl", "t.parquet")
    )
    arguments = [
        task.messages[1].fields["tool_calls"][0]["function"]["arguments"]
        for task in (written, stored)
    ]
    assert arguments == [{"city": "Rome", "unit": None}, {"city": "Rome"}]
    assert [task.tools[0]["function"]["parameters"] for task in (written, stored)] == [
        {"type": "object", "default": None},
        {"type": "object"},
    ]
    assert "tool_calls" not in stored.messages[0].fields


def test_tools_may_be_json_text_and_other_columns_of_that_name_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one(
        tmp_path / "t.jsonl", {"prompt": "Weather?", "tools": json.dumps([TOOL]), "answer": "x"}
    ).tools == (TOOL,)
    reader = Component(use="rayloop.data.dataset:ChatRows")
    check(tmp_path / "t.jsonl", reader)
    assert "1 rows have tools, which the chat template shows" in capsys.readouterr().out
    assert (
        one(tmp_path / "t.jsonl", {"prompt": "Weather?", "tools": ["hammer"], "answer": "x"}).tools
        == ()
    )
    check(tmp_path / "t.jsonl", reader)
    assert "warning: the column 'tools'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "columns", "reason"),
    [
        ([{"role": "user", "content": ""}], {}, "neither text nor image"),
        ([ASKED, {"role": "assistant", "content": None}, ASKED], {}, "'content' is missing"),
        (
            [ASKED, {"role": "assistant", "content": "x", "tool_calls": "weather"}, ASKED],
            {},
            "tool_calls of a message must be",
        ),
        ("<audio>What is said?", {"audio": ["a.wav"]}, "shown no audio"),
        ("What does <image> do?", {}, "text and not a place into a part"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}],
                }
            ],
            {},
            "not downloaded",
        ),
    ],
)
def test_what_the_policy_could_not_be_shown_is_refused(
    tmp_path: Path, prompt: Any, columns: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataFailure, match=reason):
        one(tmp_path / "t.jsonl", {"prompt": prompt, "answer": "x", **columns})


def test_a_placeholder_in_a_typed_part_is_a_place_where_an_image_has_no_other(
    tmp_path: Path,
) -> None:
    text, image = {"type": "text", "text": "a <image> b"}, {"type": "image"}
    for content, expected in (([text], (str, "image", str)), ([image, text], ("image", str))):
        task = one(
            tmp_path / "t.jsonl",
            {
                "prompt": [{"role": "user", "content": [*content]}],
                "images": ["a.png"],
                "answer": "x",
            },
        )
        assert (
            tuple(str if isinstance(part, str) else "image" for part in task.messages[0].parts)
            == expected
        )
    films = one(tmp_path / "t.jsonl", {"prompt": "How is <video> written in HTML?", "answer": "x"})
    assert films.messages[0].parts == ("How is <video> written in HTML?",)


def test_a_conversation_gives_its_last_answer_unless_a_column_has_one(tmp_path: Path) -> None:
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "20 "}, {"type": "text", "text": "degrees"}],
    }
    assert one(tmp_path / "t.jsonl", {"messages": [ASKED, parts]}).ground_truth == "20 degrees"
    task = one(tmp_path / "t.jsonl", {"messages": [ASKED, parts], "answer": "21"})
    assert (task.ground_truth, len(task.messages)) == ("21", 1)


def test_a_map_of_arrow_is_an_object(tmp_path: Path) -> None:
    schema = pyarrow.schema(
        [
            ("prompt", pyarrow.string()),
            ("extra_info", pyarrow.map_(pyarrow.string(), pyarrow.string())),
        ]
    )
    table = pyarrow.Table.from_pylist([{"prompt": "hi", "extra_info": [("k", "v")]}], schema=schema)
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    task = Dataset(
        tmp_path / "t.parquet", ChatRows(ChatRows.Settings()), True, lambda failure: None
    )[0]
    assert task.extra["k"] == "v"


def test_shards_and_archives_are_refused_with_what_to_do(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        Dataset(path, ChatRows(ChatRows.Settings()), True, lambda failure: None)

    for shards in (tmp_path, tmp_path / "train-*-of-00012.parquet"):
        with pytest.raises(ConfigError, match=r"from one file. Join the shards: .*read_table"):
            read(shards)
    (tmp_path / "a.json").write_text('{"prompt": "hi"}\n', encoding="utf-8")
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "a.json", "a.json")
    with pytest.raises(ConfigError, match="is a tar archive"):
        read(tmp_path / "t.tar")
