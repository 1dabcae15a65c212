"""Layouts of rows that other tools write, as ``ChatRows`` reads them without a map of columns."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from rayloop.data.dataset import ChatRows, Dataset

HEADER = """## Rows

Layouts that other tools write, as the default reader reads them, from JSONL or parquet.

| layout | the policy reads | answer |
|---|---|---|"""
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What?"}


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(file, "PNG")
    return file.getvalue()


PNG = _picture()
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
STORED = {"bytes": PNG, "path": None}
LINKED = {"type": "image_url", "image_url": {"url": URL}}
PART = {"type": "image", "text": None, "image": STORED}
LAYOUTS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "verl: `prompt`, `images`, `reward_model`",
        "parquet",
        {
            "prompt": [{"role": "user", "content": "<image>What?"}],
            "images": [STORED],
            "reward_model": {"ground_truth": "red"},
        },
    ),
    ("TRL: `prompt`, `solution`", "jsonl", {"prompt": [QUESTION], "solution": "red"}),
    (
        "TRL: `problem`, `image`, `solution`",
        "parquet",
        {"problem": "What?", "image": STORED, "solution": "red"},
    ),
    (
        "`messages` with the answer as its last turn",
        "jsonl",
        {"messages": [QUESTION, {"role": "assistant", "content": "red"}]},
    ),
    (
        "`datasets`: an Image within a message",
        "parquet",
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [PART, {"type": "text", "text": "What?", "image": None}],
                }
            ],
            "answer": "red",
        },
    ),
    (
        "OpenAI: `image_url` with a data URL",
        "jsonl",
        {
            "messages": [{"role": "user", "content": [LINKED, {"type": "text", "text": "What?"}]}],
            "answer": "red",
        },
    ),
    (
        "a system message without text",
        "jsonl",
        {"prompt": [{"role": "system", "content": ""}, QUESTION], "answer": "red"},
    ),
    (
        "a call of a tool in the history",
        "jsonl",
        {
            "prompt": [
                QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "20", "tool_call_id": "1"},
            ],
            "answer": "20",
        },
    ),
    (
        "the same from parquet, with its null keys",
        "parquet",
        {
            "prompt": [
                {**QUESTION, "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "20", "tool_calls": None},
            ],
            "answer": "20",
        },
    ),
    ("a column `tools`", "jsonl", {"prompt": [QUESTION], "tools": [TOOL], "answer": "x"}),
    (
        "the letters `<image>` in a typed part",
        "jsonl",
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "What is <image>?"}]}],
            "answer": "x",
        },
    ),
    (
        "`<video>` and a column `videos`",
        "jsonl",
        {"prompt": "<video>What?", "videos": ["a.mp4"], "answer": "x"},
    ),
    ("a prompt that is a number", "jsonl", {"prompt": 5, "answer": "x"}),
)


def section() -> Iterator[str]:
    """The section of the page."""
    yield HEADER
    for layout, kind, row in LAYOUTS:
        yield f"| {layout} | {' | '.join(shown(kind, row)).replace('<', '&lt;')} |"


def shown(kind: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """What the policy reads of a row, and the row's answer; of one that is refused, why."""
    with TemporaryDirectory() as folder:
        failures = list[DataFailure]()
        good = {"prompt": "another", "answer": "x", "id": "good"}
        path = Path(folder) / f"rows.{kind}"
        _write(path, row)
        other = Path(folder) / "good.jsonl"
        other.write_text(json.dumps(good) + "\n", encoding="utf-8")
        if kind == "jsonl":  # so that a refused row is not the only one
            path.write_text(
                path.read_text(encoding="utf-8") + other.read_text(encoding="utf-8"),
                encoding="utf-8",
            )
        tasks = [*Dataset(path, ChatRows(ChatRows.Settings()), False, failures.append)]
    task = next((task for task in tasks if task.id != "good"), None)
    return (
        (f"refused: {failures[0].reason}", "")
        if task is None
        else (_text(task), str(task.ground_truth))
    )


def _write(path: Path, row: Mapping[str, Any]) -> None:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)


def _text(task: Task) -> str:
    tools = (
        [f"tools: {', '.join(tool['function']['name'] for tool in task.tools)}"]
        if task.tools
        else []
    )
    return "; ".join([*tools, *map(_said, task.messages)])


def _said(message: Message) -> str:
    parts = [part if isinstance(part, str) else "[picture]" for part in message.parts]
    calls = [
        f"[calls {one['function']['name']} {one['function']['arguments']}]"
        for one in message.fields.get("tool_calls", ())
    ]
    return f"{message.role}: {' '.join([*parts, *calls]) or '(nothing)'}"
