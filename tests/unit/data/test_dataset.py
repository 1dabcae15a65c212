"""Datasets: what is read, what is quarantined with file, line and reason, and in which order tasks
come.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.failures import CheckpointError, ConfigError, DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import ChatRows, Dataset

READER = ChatRows(ChatRows.Settings())


def row(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": f"question {index}"}],
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"index": index, "split": "train"},
        **fields,
    }


def write(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(
        b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts)
    )
    return path


def read(path: Path, *, strict: bool = False) -> tuple[Dataset, list[tuple[str, str]]]:
    bad: list[tuple[str, str]] = []
    return (
        Dataset(path, READER, strict, lambda failure: bad.append((failure.path, failure.reason))),
        bad,
    )


def test_verl_rows_become_tasks(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>Which of\n<image>?"},
    ]
    images = [{"image": "a.png"}, str(tmp_path / "b.png")]
    dataset, bad = read(write(tmp_path / "train.jsonl", row(3, prompt=prompt, images=images)))
    first, second = (
        ImageSource(path=str(tmp_path / "a.png")),
        ImageSource(path=str(tmp_path / "b.png")),
    )
    messages = (
        Message("system", ("Be brief.",)),
        Message("user", (first, "Which of\n", second, "?")),
    )
    columns = {name: value for name, value in row(3, images=images).items() if name != "prompt"}
    assert list(dataset) == [
        Task("geo/train/3", messages, "3", "geo", {**columns, "index": 3, "split": "train"})
    ]
    assert (len(dataset), dataset[0].id, bad) == (1, "geo/train/3", [])


@pytest.mark.parametrize(
    ("fields", "task_id"),
    [
        ({"id": 7}, "7"),
        ({"extra_info": {"id": "x"}}, "x"),
        ({"extra_info": {"index": 0}}, "geo/0"),
        ({"extra_info": None}, "train.jsonl:1"),
    ],
)
def test_the_id_of_a_row(tmp_path: Path, fields: dict[str, Any], task_id: str) -> None:
    assert read(write(tmp_path / "train.jsonl", row(**fields)))[0][0].id == task_id


class Numbered:
    """A reader whose ids are numbers."""

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        return Task(row["n"], (Message("user", ("hi",)),))


def test_an_id_that_is_no_text_becomes_one(tmp_path: Path) -> None:
    """Checkpoints, records and metrics know tasks by it."""
    path = write(tmp_path / "t.jsonl", {"n": 7})
    assert Dataset(path, Numbered(), True, lambda _: None)[0].id == "7"


def test_a_prompt_may_be_a_json_string_or_a_text(tmp_path: Path) -> None:
    texts = [json.dumps([{"role": "user", "content": "hi"}]), "hi"]
    dataset, _ = read(
        write(tmp_path / "t.jsonl", *(row(i, prompt=text) for i, text in enumerate(texts)))
    )
    assert [task.messages for task in dataset] == [(Message("user", ("hi",)),)] * 2


@pytest.mark.parametrize(
    "text",
    ["[INST] hi", "[1, 2, 3] sorted is?", "[1,2,3]", "[1", "[]", '[{"a": 1}]', "[" * 100_000],
)
def test_a_text_in_brackets_is_a_text(tmp_path: Path, text: str) -> None:
    dataset, bad = read(write(tmp_path / "t.jsonl", {"prompt": text, "answer": "x"}))
    assert not bad
    assert dataset[0].messages == (Message("user", (text,)),)
    assert dataset[0].extra["prompt"] == text


A = {"path": "a.png"}
TEXT, IMAGE = {"type": "text", "text": "What?"}, {"type": "image"}


@pytest.mark.parametrize(
    ("content", "columns", "shown"),
    [
        ("What?", {"image": "a.png"}, "aW"),
        ("What? <image>", {"image": "a.png"}, "W a"),
        ("What?", {"image": {"bytes": None, "path": "a.png"}}, "aW"),
        ("What?", {"images": "a.png"}, "aW"),
        ("What?", {"images": A}, "aW"),
        ("What?", {"images": [A, "b.png"], "image": "c.png"}, "abW"),
        ("What?", {"images": [], "image": "c.png"}, "cW"),
        ("What?", {"images": None, "image": None}, "W"),
        ([TEXT], {}, "W"),
        ([TEXT, IMAGE, TEXT], {"images": ["a.png"]}, "WaW"),
        ([IMAGE, TEXT], {"image": "a.png"}, "aW"),
        (
            [{"type": "image", "text": None}, {"type": "text", "text": "What?"}],
            {"image": "a.png"},
            "aW",
        ),
        ([{"type": "image", "image": "b.png"}, TEXT, IMAGE], {"image": "a.png"}, "bWa"),
        ([TEXT], {"image": "a.png"}, "aW"),
    ],
)
def test_where_images_may_stand(
    tmp_path: Path, content: Any, columns: dict[str, Any], shown: str
) -> None:
    known: dict[str, str | ImageSource] = {
        name: ImageSource(path=str(tmp_path / f"{name}.png")) for name in "abc"
    }
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    dataset, bad = read(write(tmp_path / "t.jsonl", {"prompt": prompt, **columns}))
    assert not bad
    parts = [
        known.get(letter) or {"W": "What?"}.get(letter, letter) for letter in shown if letter != " "
    ]
    found = [
        part.strip() if isinstance(part, str) else part for part in dataset[0].messages[1].parts
    ]
    assert (dataset[0].messages[0].parts, found) == (("Be brief.",), parts)


def test_a_named_column_may_hold_one_image(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for cell, source in [
        ({"bytes": b"png", "path": "a.png"}, ImageSource(data=b"png")),
        (b"png", ImageSource(data=b"png")),
        ("a.png", ImageSource(path=str(tmp_path / "a.png"))),
    ]:
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{"prompt": "What?", "screen": cell}]), path
        )
        dataset = Dataset(path, ChatRows(ChatRows.Settings(images="screen")), True, lambda _: None)
        assert dataset[0].messages[0].parts == (source, "What?")


def test_a_dataset_whose_images_nobody_sees_says_so(tmp_path: Path) -> None:
    for value in (
        "a.PNG",
        [f"data:image/png;base64,{ENCODED}"],
        {"bytes": ENCODED},
        [{"path": "a.jpg"}],
    ):
        dataset, _ = read(
            path := write(tmp_path / "t.jsonl", {"prompt": "hi", "answer": "a", "shot": value})
        )
        assert dataset.warning().startswith(
            f"none of the 1 rows of {path} shows the policy an image"
        )
        assert (
            "look like images: shot. Name the right one with data.reader.with.images"
            in dataset.warning()
        )
    seen = {"prompt": "hi", "answer": "a", "image": "a.png", "shot": "b.png"}
    assert read(write(tmp_path / "t.jsonl", seen))[0].warning() == ""


GOOD = json.dumps({"prompt": "hi"}).encode()
SHAPES = [
    ("a.jsonl", b"", "is empty; one JSON object per line is needed"),
    ("a.jsonl", b"\n \n", "is empty"),
    ("a.jsonl", b"[" + GOOD + b"]", "is a JSON array; name it .json"),
    (
        "a.json",
        b"[\n" + GOOD + b",\n" + GOOD,
        "begins like a JSON array but is not valid: Expecting",
    ),
    ("a.json", b"[]", "holds no rows"),
    ("a.json", b'{\n  "prompt": "hi"\n}', "holds JSON objects over several lines"),
    ("a.csv", b"prompt,answer\nhi,ho\n", "is a table; one JSON object per line is needed: pandas"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
    ("a.jsonl", GOOD.decode().encode("utf-16"), "is UTF-16 text"),
    ("a.jsonl", b"PAR1", "is a parquet file; name it .parquet"),
]


@pytest.mark.parametrize(
    ("name", "data", "message"), SHAPES, ids=[message[:20] for _, _, message in SHAPES]
)
def test_a_file_of_another_shape_is_named_as_a_whole(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_a_first_row_that_is_broken_does_not_make_it_another_shape(tmp_path: Path) -> None:
    for line in ('{"prompt": "hi"', "[1, 2]", "null", "oh"):
        dataset, bad = read(write(tmp_path / "t.jsonl", line, row(1)))
        assert (len(dataset), len(bad)) == (1, 1)


BAD = [
    ("{", "UTF-8 JSON"),
    (b'{"prompt": "\xff"}', "UTF-8 JSON"),
    ("[" * 100_000, "UTF-8 JSON"),
    ("[1, 2]", "expected an object, found list"),
    (row(prompt=None), "'prompt' is missing"),
    (row(prompt=[]), "'prompt' is missing"),
    (row(prompt=[{"role": "user"}]), "'content' is missing"),
    (row(prompt=[{"role": "user", "content": 5}]), "must be a text, or a list of"),
    (row(prompt=["hello"]), "cannot read the row"),
    (row(prompt=5), "cannot read the row"),
    (
        row(prompt="[{'role': 'user', 'content': 'hi'}]"),
        "begins like a list of messages, but it is not JSON",
    ),
    (row(prompt=3), "its prompt is 3, neither a text nor a list of messages"),
    (row(prompt={"text": "hi"}), "neither a text nor a list of messages"),
    (row(prompt=" \n"), "'prompt' is missing or empty"),
    (
        row(prompt=[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]),
        "ends with the assistant's turn",
    ),
    (
        row(prompt=[{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]),
        "must be a text, or a list of",
    ),
    (
        {"question": "hi", "level": 3},
        (
            "no column 'prompt'; the row's: question, level. Name the right one with"
            " data.reader.with.p"
        ),
    ),
    (row(prompt=[{"role": "user", "content": "<image>"}]), "1 <image> placeholders for 0 images"),
    (row(images=["a.png", "b.png"], prompt="<image>"), "1 <image> placeholders for 2 images"),
    (row(images=[{"url": "x"}]), "an image must be"),
    (row(reward_model="rule"), "the column 'reward_model' must be an object, found 'rule'"),
    (row(extra_info="easy"), "the column 'extra_info' must be an object, found 'easy'"),
]


@pytest.mark.parametrize(
    ("line", "reason"), BAD, ids=[reason + str(i) for i, (_, reason) in enumerate(BAD)]
)
def test_a_bad_row_is_quarantined_with_its_line_and_reason(
    tmp_path: Path, line: Any, reason: str
) -> None:
    path = write(tmp_path / "t.jsonl", row(1), "", line, row(2))
    dataset, bad = read(path)
    assert [task.ground_truth for task in dataset] == ["1", "2"]
    assert [where for where, _ in bad] == [f"{path}:3"]
    assert reason in bad[0][1]
    with pytest.raises(DataFailure, match=r"t\.jsonl:3"):
        read(path, strict=True)


@pytest.mark.parametrize("indent", [None, 1])
def test_the_rows_of_a_json_array_are_read_like_lines(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([row(1), [1, 2], row(2)], indent=indent), encoding="utf-8-sig")
    dataset, bad = read(path)
    assert [(task.ground_truth, dataset.where(task)) for task in dataset] == [
        ("1", f"{path}:1"),
        ("2", f"{path}:3"),
    ]
    assert bad == [(f"{path}:2", "expected an object, found list")]
    assert len(read(write(tmp_path / "lines.json", row(1), row(2)))[0]) == 2


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert (
        len(read(write(tmp_path / "t.jsonl", b"\xef\xbb\xbf" + json.dumps(row()).encode()))[0]) == 1
    )


def test_parquet_rows_are_read_like_lines(tmp_path: Path) -> None:
    image = [{"bytes": b"png", "path": None}]
    rows = [
        row(i, prompt=[{"role": "user", "content": "<image>hi"}], images=image) for i in range(600)
    ]
    rows[400]["prompt"] = None
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    dataset, bad = read(path)
    assert (len(dataset), dataset[599 - 1].ground_truth) == (599, "599")
    assert dataset[0].messages[0].parts == (ImageSource(data=b"png"), "hi")
    assert bad == [(f"{path}:401", "the field 'prompt' is missing or empty")]


def test_what_is_no_dataset_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="no usable row"):
        read(write(tmp_path / "bad.jsonl", "{"))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row()]).slice(0, 0), tmp_path / "zero.parquet"
    )
    with pytest.raises(ConfigError, match="holds no rows"):
        read(tmp_path / "zero.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="parquet"):
        read(tmp_path / "x.parquet")


def test_two_rows_of_one_id_are_refused_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(1), row(2), row(1))
    with pytest.raises(
        ConfigError, match=r"t\.jsonl:3: the id 'geo/train/1' is that of .*t\.jsonl:1 too"
    ):
        read(path)


@given(
    count=st.integers(1, 30),
    seed=st.integers(0, 5),
    steps=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_each_epoch_visits_every_task_once(
    count: int, seed: int, steps: int, shuffle: bool
) -> None:
    cursor = TaskCursor(count, seed, shuffle)
    drawn = [cursor.next() for _ in range(steps)]
    for start in range(0, steps - steps % count, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    seen = Counter(drawn)
    assert [cursor.visits(index) for index in range(count)] == [
        seen[index] for index in range(count)
    ]
    restored = TaskCursor(count, seed, shuffle)
    restored.restore(json.loads(json.dumps(cursor.state())))
    assert [restored.next() for _ in range(2 * count)] == [cursor.next() for _ in range(2 * count)]


def test_the_order_follows_from_seed_and_epoch() -> None:
    def epochs(seed: int, shuffle: bool = True) -> list[list[int]]:
        cursor = TaskCursor(50, seed, shuffle)
        return [[cursor.next() for _ in range(50)] for _ in range(2)]

    first, second = epochs(0)
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first
    assert epochs(0, shuffle=False) == [list(range(50))] * 2


@pytest.mark.parametrize(
    ("count", "seed", "shuffle"), [(9, 0, True), (10, 1, True), (10, 0, False)]
)
def test_a_checkpoint_of_other_tasks_is_refused(count: int, seed: int, shuffle: bool) -> None:
    state: Mapping[str, int | bool] = TaskCursor(10, 0, True).state()
    with pytest.raises(CheckpointError, match=r"then, .* now"):
        TaskCursor(count, seed, shuffle).restore(state)


def test_a_cursor_needs_a_task() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TaskCursor(0, 0)


ANSWERS = [
    ({"ground_truth": "a", "answer": "b"}, "a"),
    ({"reward_model": {"ground_truth": "a"}, "solution": "b"}, "a"),
    ({"answer": "a", "label": "b"}, "a"),
    ({"answers": ["a", "b"], "solution": "c"}, ["a", "b"]),
    ({"solution": "a"}, "a"),
    ({"label": 0, "target": "b"}, 0),
    ({"target": "a"}, "a"),
    ({"ground_truth": None, "answer": "a"}, "a"),
    ({"reward_model": {"style": "rule"}, "answer": False}, False),
    ({"correct": "a"}, None),
]


@pytest.mark.parametrize(
    ("fields", "truth"), ANSWERS, ids=[str(sorted(fields)) for fields, _ in ANSWERS]
)
def test_the_answer_is_found_under_its_usual_names(
    tmp_path: Path, fields: dict[str, Any], truth: Any
) -> None:
    dataset, _ = read(write(tmp_path / "t.jsonl", {"prompt": "hi", **fields}))
    assert dataset[0].ground_truth == truth


def test_the_answers_column_can_be_named(tmp_path: Path) -> None:
    reader = ChatRows(ChatRows.Settings(truth="meta.correct"))
    path = write(
        tmp_path / "t.jsonl",
        {"prompt": "hi", "answer": "b", "meta": {"correct": "a"}},
        {"prompt": "hi", "answer": "b"},
    )
    bad: list[str] = []
    dataset = Dataset(path, reader, False, lambda failure: bad.append(str(failure)))
    assert [task.ground_truth for task in dataset] == ["a"]
    assert bad == [f"{path}:2: the field 'meta.correct' is missing or empty"]


def test_other_columns_are_kept(tmp_path: Path) -> None:
    line = {**row(3), "difficulty": 5, "answer": "x", "index": "overridden by extra_info"}
    dataset, _ = read(write(tmp_path / "t.jsonl", line))
    whole = {name: value for name, value in line.items() if name != "prompt"}
    assert dataset[0].extra == {**whole, "index": 3, "split": "train"}


def test_a_dataset_without_any_answer_says_so(tmp_path: Path) -> None:
    dataset, _ = read(
        write(
            tmp_path / "t.jsonl", {"prompt": "hi", "correct": "a"}, {"prompt": "ho", "correct": "b"}
        )
    )
    assert "none of the 2 rows of" in dataset.warning()
    assert "columns: correct" in dataset.warning()
    assert "data.reader.with.truth" in dataset.warning()
    assert dataset.warning(compares=False) == ""
    assert read(write(tmp_path / "u.jsonl", {"prompt": "hi", "answer": "a"}))[0].warning() == ""


@pytest.mark.parametrize("answer", ['""', '" "', "NaN", "null"])
def test_an_answer_that_is_there_only_in_form_is_none(tmp_path: Path, answer: str) -> None:
    line = f'{{"prompt": "hi", "answer": {answer}}}'
    dataset, _ = read(path := write(tmp_path / "t.jsonl", {"prompt": "ho", "answer": "b"}, line))
    assert dataset[1].ground_truth is None
    assert dataset.warning() == f"1 of the 2 rows of {path} have no answer, the first at {path}:2"


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
ENCODED = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "entry",
    [
        f"data:image/png;base64,{ENCODED}",
        {"image": f"data:image/png;base64,{ENCODED}"},
        {"bytes": ENCODED},
        {"bytes": f"data:image/png;base64,{ENCODED}", "path": None},
        {"bytes": ENCODED[:80] + "\n" + ENCODED[80:]},
        ENCODED,
    ],
    ids=["data url", "in image", "bytes", "data url in bytes", "wrapped", "bare"],
)
def test_an_image_may_be_base64(tmp_path: Path, entry: Any) -> None:
    dataset, bad = read(write(tmp_path / "t.jsonl", {"prompt": "<image>", "images": [entry]}))
    assert not bad
    assert dataset[0].messages[0].parts == (ImageSource(data=PNG),)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("https://example.org/x.png", "images are not downloaded"),
        ({"image": "http://example.org/x.png"}, "images are not downloaded"),
        ("data:image/png;base64,@@@", "is not base64"),
        ("data:image/png,plain", "is not base64"),
        ({"bytes": "not base64!"}, "is not base64"),
        ({"bytes": 5}, "found {'bytes': 5}"),
        ({"url": "x" * 9000}, "found {'url': 'xxx"),
        ("x" * 9000, "a path of 9000 characters"),
    ],
)
def test_an_image_that_cannot_be_had_is_refused_in_few_words(
    tmp_path: Path, entry: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match="no usable row"):
        Dataset(
            write(tmp_path / "t.jsonl", {"prompt": "<image>", "images": [entry]}),
            READER,
            False,
            (bad := []).append,
        )
    assert reason in bad[0].reason
    assert len(bad[0].reason) < 300


def test_messages_shorten_what_they_quote(tmp_path: Path) -> None:
    lines = (
        {"prompt": [{"role": "user", "content": ["x" * 9000]}]},
        {"prompt": [{"role": ["y" * 9000], "content": "x"}]},
    )
    with pytest.raises(ConfigError, match="no usable row"):
        Dataset(write(tmp_path / "t.jsonl", *lines), READER, False, (bad := []).append)
    assert all(len(failure.reason) < 400 for failure in bad)


def test_a_row_names_its_kind_of_environment(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        row(0, environment="web"),
        row(1),
        row(2, environment={"image": "debian"}),
    )
    dataset = Dataset(path, READER, True, lambda failure: None, {"web": 1, "desk": 2})
    assert [task.environment for task in dataset] == ["web", "", ""]


def test_an_unknown_kind_of_environment_is_refused_with_its_line(tmp_path: Path) -> None:
    """Not quarantined: the configuration and the rows do not fit.

    Without kinds the column means nothing.
    """
    path = write(tmp_path / "rows.jsonl", row(0, environment="web"), row(1, environment="destop"))
    refused = (
        r"rows\.jsonl:2: the row names the environment 'destop', and environment\.kinds has web,"
        r" desktop\. Add it there"
    )
    with pytest.raises(ConfigError, match=refused):
        Dataset(path, READER, False, lambda failure: None, ["web", "desktop"])
    assert len(read(path)[0]) == 2


def test_a_readers_own_kind_counts_before_the_column(tmp_path: Path) -> None:
    class Pages:
        def task(self, line: Mapping[str, Any], where: str, root: Path) -> Task:
            return Task(where, (), environment="web" if "page" in line else "")

    path = write(
        tmp_path / "rows.jsonl", {"page": "a", "environment": "desk"}, {"environment": "desk"}
    )
    dataset = Dataset(path, Pages(), True, lambda failure: None, ["web", "desk"])
    assert [task.environment for task in dataset] == ["web", "desk"]
