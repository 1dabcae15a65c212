"""Published data sets: each map reads small files in its real layout, written here, and what is
written becomes tasks.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rayloop import recipes
from rayloop.cli import main
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset, Reader
from rayloop.data.images import probe
from rayloop.data.published import source
from rayloop.data.published.pictures import Pictures
from rayloop.data.published.source import ColumnMap, NewSplit, first, fractions
from rayloop.data.published.splits import in_order, sizes, stratified
from rayloop.recipes.arc_vision.data import GroundingRows
from rayloop.recipes.chart_rvr.data import ChartRows
from rayloop.recipes.pyvision.data import QuestionRows
from rayloop.run.config import read
from rayloop.run.held_out import answer_requests
from tests.support.pages import write_snippets
from tests.support.runs import ROOT

Rows = list[dict[str, Any]]
CHARTS = ChartRows(ChartRows.Settings(template="direct"))
QUESTIONS = QuestionRows(QuestionRows.Settings())


def png(shade: int = 0, size: tuple[int, int] = (56, 28)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade % 256, shade // 256, 9)).save(file, "PNG")
    return file.getvalue()


def written(path: Path, content: bytes | Rows | dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    else:
        path.write_text(json.dumps(content), encoding="utf-8")


def hub_image(shade: int = 0) -> dict[str, Any]:
    return {"bytes": png(shade), "path": None}


VERL = {
    "prompt": [{"role": "user", "content": "<image>Which colour?"}],
    "images": [hub_image()],
    "ability": "vl_agent",
    "env_name": "visual_toolbox_v2",
    "data_source": "vstar",
    "reward_model": {"ground_truth": "red", "style": "model"},
    "extra_info": {"answer": "red", "index": "7", "question": "Which colour?", "split": "train"},
}
PYVISION = {
    "prompt": [{"role": "user", "content": "?"}],
    "data_source": "de_visual_search_filtered",
    "ability": "visual_search",
    "env_name": "pyvision_gym_w_image_hint",
    "reward_model": {"ground_truth": "red", "style": "model"},
    "extra_info": {"answer": "red", "index": 3, "question": "Which colour?", "split": "train"},
    "mm_hint": {"hint_path": "deepeyes/a.png", "hint_type": "image"},
}
PLOTQA = {
    "question_string": "How many?",
    "answer": 7,
    "image_index": 5,
    "type": "vbar_categorical",
    "template": "structural",
}
CHARTBENCH = {
    "id": 1,
    "image": "./data/test/bar/a.png",
    "type": {"chart": "bar", "image": "bar_chart", "task": "CR", "QA": "Acc+"},
    "conversation": [
        {"query": "Is it a bar chart?", "label": "Yes"},
        {"query": "Is it a pie chart?", "label": "No"},
    ],
}
PRO = {
    "Question": ["How many?", "And then?"],
    "Answer": ["1", "2"],
    "Question Type": "Conversational",
    "image": png(),
    "Year": ["NO", "NO"],
}
HR_BENCH = {
    "index": 4,
    "question": "Which?",
    "A": "red",
    "B": "blue",
    "C": "green",
    "D": "grey",
    "answer": "B",
    "category": "single",
    "cycle_category": "x",
    "image": base64.b64encode(png(3, (60, 60))).decode(),
}
LAYOUTS: dict[str, tuple[dict[str, Any], str, Reader, list[tuple[str, Any]]]] = {
    "chartqa": (
        {
            "data/test-00000-of-00001.parquet": [
                {"image": hub_image(), "query": "How many?", "label": ["7"], "human_or_machine": 0}
            ]
        },
        "test",
        CHARTS,
        [("How many?", "7")],
    ),
    "chart_rvr_train": (
        {
            "data/train-0.parquet": [
                {
                    "image": hub_image(),
                    "query": "How many?",
                    "label": "7",
                    "chart_type": "bar",
                    "reasoning": "<step-1>: count",
                    "table": {"columns": ["a"], "rows": [["7"]]},
                }
            ]
        },
        "train",
        CHARTS,
        [("How many?", "7")],
    ),
    "plotqa": (
        {
            f"{split}/{file}": content
            for split in ("train", "val", "test")
            for file, content in (
                ("qa_pairs_V2.json", {"qa_pairs": [PLOTQA]}),
                ("png/5.png", png()),
            )
        },
        "test",
        CHARTS,
        [("How many?", "7")],
    ),
    "chartfc": (
        {
            f"data/{split}_barplot_seg.json": [
                {"claim": "It rose.", "label": "REFUTES", "image_filename": "a.png"}
            ]
            for split in ("train", "valid", "test")
        }
        | {"images/a.png": png()},
        "test",
        CHARTS,
        [("It rose.", "No")],
    ),
    "evochart": (
        {"data/train.parquet": [{"image": hub_image(), "question": "How many?", "answer": "7"}]},
        "test",
        CHARTS,
        [("How many?", "7")],
    ),
    "chartqapro": ({"data/test-0.parquet": [PRO]}, "test", CHARTS, [("And then?", "2")]),
    "chartbench": (
        {"test.jsonl": [CHARTBENCH], "data/test/bar/a.png": png()},
        "test",
        CHARTS,
        [("Is it a bar chart?", "Yes"), ("Is it a pie chart?", "No")],
    ),
    "deepeyes": (
        {"data_0.1.2_visual_toolbox_v2.parquet": [VERL]},
        "train",
        QUESTIONS,
        [("Which colour?", "red")],
    ),
    "pyvision": (
        {
            "pyvision_image_rl_data_processed.json": [PYVISION],
            "pyvision_image_rl_data/deepeyes/a.png": png(),
        },
        "train",
        QUESTIONS,
        [("Which colour?", "red")],
    ),
    "pyvision_video": (
        {
            "pyvision_video_rl_data.json": [
                {"id": 1, "question": "Which?", "answer": "B", "video_path": "films/a.mp4"}
            ],
            "pyvision_video_rl_data/films/a.mp4": b"film",
            "pyvision_video_rl_data/films/a/00001.png": png(),
        },
        "train",
        QUESTIONS,
        [("Which?", "B")],
    ),
    "vstar": (
        {
            "test_questions.jsonl": [
                {
                    "image": "direct_attributes/a.png",
                    "text": "Which? (A) red",
                    "label": "A",
                    "category": "direct_attributes",
                    "question_id": 0,
                }
            ],
            "direct_attributes/a.png": png(),
        },
        "test",
        QUESTIONS,
        [("Which? (A) red", "A")],
    ),
    "vstar_deepeyes": (
        {
            "direct_attributes/a.json": {
                "target_object": ["cup"],
                "bbox": [[1, 2, 3, 4]],
                "question": "Which?",
                "options": ["red", "blue", "green", "grey"],
            },
            "direct_attributes/a.jpg": png(),
            "relative_position/a.json": {"question": "Left?", "options": ["yes", "no"]},
            "relative_position/a.jpg": png(1),
        },
        "direct_attributes",
        QUESTIONS,
        [("Question: Which?\nOptions: \nA. red\nB. blue\nC. green\nD. grey\n\n", "A")],
    ),
    "hr_bench_4k": (
        {"hr_bench_4k.parquet": [HR_BENCH]},
        "test",
        QUESTIONS,
        [("Which?\nA. red\nB. blue\nC. green\nD. grey\nAnswer with the option's letter.", "B")],
    ),
    "hr_bench_8k": (
        {"hr_bench_8k.parquet": [HR_BENCH]},
        "test",
        QUESTIONS,
        [("Which?\nA. red\nB. blue\nC. green\nD. grey\nAnswer with the option's letter.", "B")],
    ),
}


def test_every_map_has_a_layout_here_and_can_be_read() -> None:
    assert set(recipes.datasets()) == {*LAYOUTS, "screenspot", "screenspot_v2", "screenspot_pro"}
    for path in recipes.datasets().values():
        assert "No real file has\n# been read" in path.read_text(
            encoding="utf-8"
        ) or "o real file has" in path.read_text(encoding="utf-8"), path
        load(path, (), ColumnMap)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_published_layout_becomes_tasks(name: str, tmp_path: Path) -> None:
    files, split, reader, expected = LAYOUTS[name]
    for path, content in files.items():
        written(tmp_path / "from" / path, content)
    assert (
        main(
            [
                "data",
                "prepare",
                name,
                "--out",
                str(tmp_path / "out"),
                "--from",
                str(tmp_path / "from"),
            ]
        )
        == 0
    )
    tasks = list(Dataset(tmp_path / "out" / f"{split}.jsonl", reader, True, lambda failure: None))
    assert [(task.messages[-1].parts[-1], task.ground_truth) for task in tasks] == expected
    for task in tasks:
        if name == "pyvision_video":
            assert [Path(frame).is_file() for frame in task.extra["videos"][0]] == [True]
        else:
            assert probe(task.images[0])[1] in (56, 60)


def test_vstar_is_asked_as_deepeyes_asks_it(tmp_path: Path) -> None:
    """Both of its folders in one file, with its prompts, of which the reader has the end."""
    for path, content in LAYOUTS["vstar_deepeyes"][0].items():
        written(tmp_path / "from" / path, content)
    options = (
        "--splits",
        "test=2",
        "--out",
        str(tmp_path / "out"),
        "--from",
        str(tmp_path / "from"),
    )
    assert main(["data", "prepare", "vstar_deepeyes", *options]) == 0
    config = read(
        ROOT / "recipes/pyvision/presets/deepeyes_faithful.yaml",
        [],
        [recipes.benchmarks()["vstar_deepeyes"]],
    )
    tasks = {
        task.source: task
        for task in Dataset(tmp_path / "out/test.jsonl", config.data.reader.build(), True, print)
    }
    assert set(tasks) == {"direct_attributes", "relative_position"}
    assert [message.role for message in tasks["relative_position"].messages] == ["system", "user"]
    _, text = tasks["relative_position"].messages[1].parts
    assert isinstance(text, str)
    assert text.startswith(
        "Question: Left?\nOptions: \nA. yes\nB. no\n\n\nThink first, call **image_zoom_in_tool** if"
        " needed, then"
    )
    assert (
        config.environment.episode.max_turns,
        config.environment.episode.environment.use.rpartition(":")[2],
    ) == (11, "VisualToolBoxV2")


SCREEN = {"instruction": "Open it.", "bbox": [0.1, 0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def screenspot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 screenshots with two instructions each, of which the second is an icon."""
    folder = tmp_path_factory.mktemp("screenspot")
    systems = ("ios", "android", "macos", "windows", "shop", "tool")
    rows = [
        {
            **SCREEN,
            "file_name": f"{shot}.png",
            "data_source": systems[shot % 6],
            "data_type": kind,
            "image": hub_image(shot),
        }
        for shot in range(120)
        for kind in ("text", "icon")
    ]
    written(folder / "data/test-00000-of-00002.parquet", rows[:100])
    written(folder / "data/test-00001-of-00002.parquet", rows[100:])
    return folder


def prepared(source: Path, out: Path, *options: str) -> dict[str, Rows]:
    assert (
        main(["data", "prepare", "screenspot", "--out", str(out), "--from", str(source), *options])
        == 0
    )
    return {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in out.glob("*.jsonl")
    }


def test_splits_share_no_screenshot_and_have_each_platform_and_type(
    screenspot: Path, tmp_path: Path
) -> None:
    splits = prepared(screenspot, tmp_path, "--max-samples", "200")
    assert {name: len(rows) for name, rows in splits.items()} == pytest.approx(
        {"train": 120, "val": 40, "test": 40}, abs=2
    )
    screens = [{row["screen"] for row in rows} for rows in splits.values()]
    assert not set.intersection(*screens)
    assert len(set.union(*screens)) == sum(map(len, screens))
    for rows in splits.values():
        assert set(Counter((row["platform"], row["element"]) for row in rows).values()) <= {
            *range(len(rows) // 6 - 3, len(rows) // 6 + 4)
        }
    again = prepared(screenspot, tmp_path / "again", "--max-samples", "200")
    assert again == splits
    assert prepared(screenspot, tmp_path / "other", "--max-samples", "200", "--seed", "1") != splits
    task = Dataset(
        tmp_path / "test.jsonl", GroundingRows(GroundingRows.Settings()), True, lambda failure: None
    )[0]
    assert task.ground_truth == (0.1, 0.2, 0.3, 0.4)
    assert task.extra["platform"] in ("mobile", "desktop", "web")
    assert probe(task.images[0])[1:] == (56, 28)


def test_screenspot_is_read_as_its_authors_publish_it(tmp_path: Path) -> None:
    source = tmp_path / "from"
    for platform, system in (("mobile", "ios"), ("desktop", "macos"), ("web", "shop")):
        rows = [
            {
                "img_filename": f"{platform}{shot}.png",
                "bbox": [7, 14, 14, 7],
                "instruction": "go",
                "data_type": "icon",
                "data_source": system,
            }
            for shot in range(10)
        ]
        written(source / f"screenspot_{platform}.json", rows)
        for row in rows:
            written(source / "screenspot_imgs" / row["img_filename"], png(0))
    written(source / "screenspot_web_v2.json", [{"img_filename": "gone.png"}])
    splits = prepared(source, tmp_path / "out")
    rows = [row for split in splits.values() for row in split]
    assert (
        sorted(row["platform"] for row in rows) == ["desktop"] * 10 + ["mobile"] * 10 + ["web"] * 10
    )
    assert all(row["bbox"] == pytest.approx([7 / 56, 14 / 28, 21 / 56, 21 / 28]) for row in rows)


def test_the_original_split_is_in_order(screenspot: Path, tmp_path: Path) -> None:
    splits = prepared(screenspot, tmp_path, "--max-samples", "200", "--original-split")
    assert {name: [row["id"] for row in rows] for name, rows in splits.items()} == {
        "train": [f"test-{n}" for n in range(120)],
        "val": [f"test-{n}" for n in range(120, 160)],
        "test": [f"test-{n}" for n in range(160, 200)],
    }
    assert sizes(1200, load(recipes.datasets()["screenspot"], (), ColumnMap).make) == {
        "train": 900,
        "val": 60,
        "test": 240,
    }


def test_splits_of_other_sizes_can_be_asked_for(screenspot: Path, tmp_path: Path) -> None:
    splits = prepared(screenspot, tmp_path, "--splits", "train=10", "dev=4")
    assert {name: len(rows) for name, rows in splits.items()} == pytest.approx(
        {"train": 10, "dev": 4}, abs=2
    )
    out = ("--out", str(tmp_path), "--from", str(screenspot))
    assert main(["data", "prepare", "screenspot", *out, "--splits", "trian"]) == 2
    assert main(["data", "prepare", "screenspot", *out, "--splits", "train=9999"]) == 2


def test_rows_that_cannot_be_used_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {
        **SCREEN,
        "file_name": "a.png",
        "data_source": "ios",
        "data_type": "icon",
        "image": hub_image(),
    }
    bad = [
        {**good, "bbox": [10.0, 20.0, 30.0, 40.0]},
        {**good, "instruction": " "},
        {**good, "image": {"bytes": b"no", "path": None}},
    ]
    written(tmp_path / "data/test-0.parquet", [good, *bad])
    prepared(tmp_path, tmp_path / "out", "--splits", "test")
    said = capsys.readouterr().out
    assert "test.jsonl: 1 rows" in said
    assert "no instruction for 'instruction'" in said
    assert "has values above one, so it is in pixels" in said
    assert "no readable image" in said


def test_a_data_set_without_a_usable_row_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The images, at which rows are looked last, are what is wrong."""
    bad = {
        **SCREEN,
        "file_name": "a.png",
        "data_source": "ios",
        "data_type": "icon",
        "image": {"bytes": b"no", "path": None},
    }
    written(tmp_path / "data/test-0.parquet", [bad])
    options = ["--from", str(tmp_path), "--out", str(tmp_path / "out"), "--splits", "test"]
    assert main(["data", "prepare", "screenspot", *options]) == 2
    assert "has no row that can be used\n    1 row, such as " in capsys.readouterr().err
    assert not (tmp_path / "out/test.jsonl").exists()


def test_the_map_of_the_page_and_a_mistake_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "from/rows.csv", b"name,q,a\nx.png,How many?,7\nabsent.png,?,1\n")
    written(tmp_path / "from/shots/x.png", png())
    write_snippets("bring_your_own/data.md", tmp_path)
    options = (
        "--map",
        str(tmp_path / "map.yaml"),
        "--from",
        str(tmp_path / "from"),
        "--out",
        str(tmp_path / "out"),
    )
    assert main(["data", "prepare", "generic", *options]) == 0
    assert "no file absent.png; looked for" in capsys.readouterr().out
    assert main(["data", "validate", str(tmp_path / "out/test.jsonl")]) == 0
    (tmp_path / "map.yaml").write_text("files: {test: [rows.csv]}\ncolums: {}\n", encoding="utf-8")
    assert main(["data", "prepare", "generic", *options]) == 2
    assert "colums" in capsys.readouterr().err


def test_without_the_hub_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        if name == "down/down":
            raise OSError("no route to host")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    how = load(recipes.datasets()["vstar"], (), ColumnMap)
    assert source.folder(how, None, "") == tmp_path
    assert (asked["name"], asked["repo_type"]) == ("craigwu/vstar_bench", "dataset")
    assert "test_questions.jsonl" in asked["allow_patterns"]
    assert "direct_attributes/*" in asked["allow_patterns"]
    with pytest.raises(
        ConfigError, match=r"no route to host[\s\S]*hf download down/down[\s\S]*--from FOLDER"
    ):
        source.folder(how, None, "down/down")
    with pytest.raises(ConfigError, match="no known name on the Hub"):
        source.folder(load(recipes.datasets()["plotqa"], (), ColumnMap), None, "")
    with pytest.raises(ConfigError, match="none of the data set's files"):
        source.present(how, tmp_path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("a", 1),
        ("b.c", 2),
        ("d.0", 3),
        ("d.-1", 4),
        ("e.f", 5),
        ("g.h", 6),
        ("nothing", None),
        ("{a}/{b.c}.png", "1/2.png"),
        ("{a}{nothing}", None),
        (("nothing", "blank", "a"), 1),
        ("d.9", None),
    ],
)
def test_a_column_is_found(where: Any, value: Any) -> None:
    row = {"a": 1, "b": {"c": 2}, "d": [3, 4], "e": '{"f": 5}', "g.h": 6, "blank": " "}
    assert first(row, where) == value


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=80),
    st.integers(0, 5),
)
def test_every_row_is_in_one_split_and_groups_stay_together(
    rows: list[tuple[int, int]], seed: int
) -> None:
    wanted = sizes(len(rows), {"val": NewSplit(share=0.25, most=10), "test": NewSplit(share=0.25)})
    assert sum(wanted.values()) == len(rows)
    made = stratified([stratum for stratum, _ in rows], [group for _, group in rows], wanted, seed)
    assert None not in made
    assert all(
        len({split for split, (_, g) in zip(made, rows, strict=True) if g == group}) <= 1
        for group in range(10)
    )
    alone = stratified([stratum for stratum, _ in rows], list(range(len(rows))), wanted, seed)
    assert {split: alone.count(split) for split in wanted} == dict(wanted)
    assert in_order(3, {"a": 1, "b": 1}) == ["a", "b", None]


@pytest.mark.parametrize(
    ("box", "kind", "made"),
    [
        ([14, 7, 28, 14], "pixels", [0.25, 0.25, 0.5, 0.5]),
        ([14, 7, 14, 7], "pixels_and_size", [0.25, 0.25, 0.5, 0.5]),
        ((0.1, 0.2, 0.3, 0.4), "fractions", [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_boxes_become_fractions(box: Any, kind: str, made: list[float]) -> None:
    assert fractions(box, kind, 56, 28, "row") == pytest.approx(made)
    for wrong in ([1, 2, 3], "1,2,3,4", None, [0, 0, 60, 9], [9, 9, 9, 20]):
        with pytest.raises(DataFailure, match="row: "):
            fractions(wrong, "pixels", 56, 28, "row")


@pytest.mark.parametrize(
    ("box", "kind", "why"),
    [
        (
            [10, 20, 30, 40],
            "fractions",
            "has values above one, so it is in pixels: say so in the map (boxes)",
        ),
        ([0.4, 0.1, 0.2, 0.3], "fractions", "has its corners reversed"),
        ([20, 1, 10, 9], "pixels", "has its corners reversed"),
        ([0.1, 0.1, 0.1, 0.3], "fractions", "has no width or no height"),
        ([4, 4, 0, 0], "pixels_and_size", "has no width or no height"),
        ([-0.1, 0.1, 0.2, 0.3], "fractions", "lies outside the image of 56 x 28 pixels"),
        ([0, 0, 60, 9], "pixels", "lies outside the image of 56 x 28 pixels"),
    ],
)
def test_what_is_wrong_with_a_box_is_named(box: Any, kind: str, why: str) -> None:
    with pytest.raises(DataFailure) as caught:
        fractions(box, kind, 56, 28, "row")
    assert caught.value.reason == f"the box {box} ({kind}) {why}"


def drawn(kind: str) -> bytes:
    """A picture as this format has it."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, kind)
    return file.getvalue()


def test_a_film_needs_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.mp4", b"film")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        ConfigError, match=r'is a video, which PyAV takes apart: pip install "rayloop\[video\]"'
    ):
        Pictures(tmp_path / "out", tmp_path, (".",)).frames("a.mp4", str(tmp_path), "row")
    written(tmp_path / "b.gif", drawn("GIF"))
    assert Pictures(tmp_path, tmp_path, (".",)).frames(["b.gif"], str(tmp_path), "row") == (
        ["b.gif"],
        [0.0],
    )
    (copied,), _ = Pictures(tmp_path / "out", tmp_path, (".",)).frames(
        ["b.gif"], str(tmp_path), "row"
    )
    assert (tmp_path / "out" / str(copied)).read_bytes() == drawn("GIF")
    written(tmp_path / "shots/0.png", drawn("PNG"))
    (shots,), _ = Pictures(tmp_path / "out", tmp_path, (".",)).frames("shots", str(tmp_path), "row")
    assert [(tmp_path / "out" / shot).read_bytes() for shot in shots] == [drawn("PNG")]


def film(file: Path, rate: int) -> Path:
    """16 frames of 64 x 48 pixels, each redder than the one before."""
    av = pytest.importorskip("av")
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as opened:
        stream = opened.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(16):
            opened.mux(
                stream.encode(
                    av.VideoFrame.from_image(Image.new("RGB", (64, 48), (index * 16, 0, 0)))
                )
            )
        opened.mux(stream.encode())
    return file


@pytest.mark.parametrize(
    ("per_second", "kept", "rate"), [(2.0, 4, 2.0), (0.0, 16, 8.0), (30.0, 16, 8.0)]
)
def test_a_film_is_taken_apart(per_second: float, kept: int, rate: float, tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 8)
    (frames,), found = Pictures(tmp_path / "out", tmp_path, (".",), fps=per_second).frames(
        "a.mp4", str(tmp_path), "row"
    )
    assert (len(frames), found) == (kept, [rate])
    reds = [
        Image.open(tmp_path / "out" / frame).convert("RGB").getpixel((30, 20))[0]
        for frame in frames
    ]  # type: ignore[index]
    assert reds == sorted(reds)
    assert reds[-1] == pytest.approx(240 if kept == 16 else 192, abs=12)
    written(tmp_path / "b.mp4", b"no film")
    with pytest.raises(DataFailure, match="cannot be read as a video"):
        Pictures(tmp_path / "out", tmp_path, (".",)).frames("b.mp4", str(tmp_path), "row")


@pytest.mark.parametrize(
    ("videos", "fps", "rates"),
    [
        (["slow.mp4", "fast.mp4"], "0", [4.0, 8.0]),
        (["slow.mp4", "a.gif"], "0", [4.0, 0.0]),
        (["slow.mp4", "fast.mp4"], "2", 2.0),
        (["a.gif"], "2", None),
    ],
)
def test_each_film_of_a_row_keeps_its_rate(
    videos: list[str], fps: str, rates: Any, tmp_path: Path
) -> None:
    film(tmp_path / "hub/slow.mp4", 4)
    film(tmp_path / "hub/fast.mp4", 8)
    written(tmp_path / "hub/a.gif", drawn("GIF"))
    asked = {"video_path": videos, "question": "Which?", "answer": "A"}
    written(tmp_path / "hub/pyvision_video_rl_data.json", [asked])
    command = [
        "data",
        "prepare",
        "pyvision_video",
        "--out",
        str(tmp_path / "out"),
        "--from",
        str(tmp_path / "hub"),
        "--fps",
        fps,
    ]
    assert main(command) == 0
    (row,) = [
        json.loads(line)
        for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (len(row["videos"]), row.get("fps")) == (len(videos), rates)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(tmp_path / "hub")
    for video in row["videos"]:
        assert all(
            (tmp_path / "moved" / shot).is_file()
            for shot in ([video] if isinstance(video, str) else video)
        )


def osworld(folder: Path, listed: str) -> list[str]:
    """The words of ``data prepare osworld``, from ``folder`` to its ``out``."""
    return [
        "data",
        "prepare",
        "osworld",
        "--out",
        str(folder / "out"),
        "--from",
        str(folder),
        "--list",
        listed,
    ]


def test_lists_of_osworld_become_rows(tmp_path: Path) -> None:
    listed = {"chrome": ["1", "2"], "os": ["3"]}
    for domain, ids in listed.items():
        for name in ids:
            task = {
                "id": name,
                "instruction": f"Do {name}.",
                "evaluator": {"func": "exact"},
                "config": [],
            }
            written(tmp_path / f"examples/{domain}/{name}.json", task)
    written(tmp_path / "some.json", listed)
    command = osworld(tmp_path, "some.json")
    assert main(command) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["osworld"], row["data_source"]) for row in rows] == [
        ("chrome/1", "chrome"),
        ("chrome/2", "chrome"),
        ("os/3", "os"),
    ]
    assert rows[0]["prompt"] == {"task": "{instruction}"}
    assert main([*command, "--max-samples", "2"]) == 0
    assert len((tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    (tmp_path / "examples/os/3.json").unlink()
    assert main(command) == 2


@pytest.mark.parametrize("name", ["osworld", "screenspot"])
def test_help_names_the_option_of_all_data_sets(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["data", "prepare", name, "--help"])
    assert "--solvable-by" in capsys.readouterr().out


def test_rows_that_were_never_solved_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"os": ["1", "2", "3", "4"]}
    for name in tasks["os"]:
        written(
            tmp_path / f"examples/os/{name}.json",
            {"id": name, "instruction": "Do.", "evaluator": {}},
        )
    written(tmp_path / "list.json", tasks)
    results = {"os/1": [0.0, 1.0], "os/2": [0.0, 0.4], "os/3": [1.0]}
    items = [
        {
            "arm": "sampled",
            "task": task,
            "source": "os",
            "sample": n,
            "reward": 0.0,
            "components": {"success": result},
        }
        for task, each in results.items()
        for n, result in enumerate(each)
    ]
    written(tmp_path / "played/items.jsonl", items)
    command = osworld(tmp_path, "list.json")
    assert main([*command, "--solvable-by", str(tmp_path / "played")]) == 0
    rows = [
        json.loads(line)["id"]
        for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert rows == ["os/1", "os/3", "os/4"]
    kept = [
        json.loads(line)
        for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row.get("solved"), row.get("played")) for row in kept] == [
        (1, 2),
        (1, 1),
        (None, None),
    ]
    assert "3 of 4 rows are kept: 2 solved at least once, 1 unknown" in capsys.readouterr().out
    asked: list[list[str]] = []

    def eval_of(words: list[str]) -> Any:
        asked.append(words)
        written(Path(words[words.index("--out") + 1]) / "items.jsonl", items[:2])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("rayloop.commands.data.subprocess.run", eval_of)
    (model := tmp_path / "model").mkdir()
    assert main([*command, "--solvable-by", str(model)]) == 2
    assert "--config" in capsys.readouterr().err
    config = str(Path(recipes.__path__[0]) / "arpo/quickstart.yaml")
    assert (
        main(
            [
                *command,
                "--solvable-by",
                str(model),
                "--config",
                config,
                "--attempts",
                "2",
                "--max-samples",
                "4",
            ]
        )
        == 0
    )
    assert asked[0][3:] == [
        "eval",
        config,
        "--checkpoint",
        str(model),
        "--data",
        str(tmp_path / "out/train.jsonl"),
        "--samples",
        "2",
        "--out",
        str(tmp_path / "out/solvable"),
        *asked[0][13:],
    ]
    played = read(Path(config), asked[0][13:])
    assert [
        (play.arm, play.sample)
        for play in answer_requests(played, [Task("os/1", (), None)], controls=False, samples=2)
    ] == [("right", 0), ("right", 1)], "as many answers as were asked for"
