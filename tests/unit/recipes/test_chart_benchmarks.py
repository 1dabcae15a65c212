"""The six chart benchmarks: each file laid over a run's configuration reads prepared rows, and its
rule says what is right.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from rayloop.cli import main
from rayloop.config.settings import check_components
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset
from rayloop.recipes.chart_rvr.measure import (
    EMPTY_TRAJECTORY,
    accuracy_plus,
    anls,
    chartqapro,
    distance,
)
from rayloop.recipes.chart_rvr.score import notes
from rayloop.rewards.saved import Saved
from rayloop.run.config import RunConfig, read

RECIPE = Path(__file__).parents[3] / "recipes/chart_rvr"
NAMES = ("chartbench", "chartfc", "chartqa", "chartqapro", "evochart", "plotqa")
ROWS: dict[str, dict[str, Any]] = {
    "chartqa": {"query": "How many?", "label": "10", "origin": "human", "data_source": "chartqa"},
    "plotqa": {
        "query": "What is the value?",
        "label": "10",
        "chart_type": "dot_line",
        "data_source": "plotqa",
    },
    "chartfc": {"query": "Chile has most", "label": "Yes", "data_source": "chartfc"},
    "evochart": {"query": "Which?", "label": "10", "chart_type": "pie", "data_source": "evochart"},
    "chartqapro": {
        "query": "And in 2010?",
        "label": "2010",
        "kind": "Conversational",
        "year": ["NO", "YES"],
        "paragraph": "About sales.",
        "questions": ["How many?", "And in 2010?"],
        "answers": ["5", "2010"],
        "data_source": "chartqapro",
    },
    "chartbench": {
        "query": "Is it so?",
        "label": "Yes",
        "chart_type": "radar",
        "data_source": "chartbench",
    },
}
"""As ``data prepare NAME`` writes them."""


PRO = {
    "Question": ["How many?", "And in 2010?"],
    "Answer": ["5", "2010"],
    "Question Type": "Conversational",
    "Year": ["NO", "YES"],
}
BENCH = {
    "id": 1000,
    "image": "./data/a.png",
    "type": {"chart": "radar", "task": "CR", "QA": "Acc+"},
    "conversation": [
        {"query": "Is it so?", "label": "Yes"},
        {"query": "Is it not?", "label": "No"},
    ],
}
LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[str, str, str]]]] = {
    "chartqa": (
        {
            "test/test_human.json": [{"imgname": "a.png", "query": "How many?", "label": "10"}],
            "test/test_augmented.json": [{"imgname": "a.png", "query": "How much?", "label": "1"}],
            "test/png/a.png": None,
        },
        [("How much?", "1", "augmented"), ("How many?", "10", "human")],
    ),
    "plotqa": (
        {
            "test/qa_pairs_V2.json": {
                "qa_pairs": [
                    {"image_index": 5, "question_string": "How many?", "answer": 10, "type": "line"}
                ]
            },
            "test/png/5.png": None,
        },
        [("How many?", "10", "line")],
    ),
    "chartfc": (
        {
            "dataset_files/test_barplot_seaborn_diverse_charts.json": [
                {"image_filename": "a.png", "question": "Up", "answer": 1}
            ],
            "charts_seaborn_v5/a.png": None,
        },
        [("Up. Answer yes/no.", "Yes", "chartfc")],
    ),
    "evochart": (
        {
            "EvoChart-QA.json": [{"imgname": "a.png", "query": "How many?", "label": "10"}],
            "png/a.png": None,
        },
        [("How many?", "10", "")],
    ),
    "chartqapro": (
        {"test-0.parquet": [PRO]},
        [("How many?\n5\nAnd in 2010?", "2010", "Conversational")],
    ),
    "chartbench": (
        {"test.jsonl": [BENCH], "data/a.png": None},
        [
            (f"{asked} For binary questions, answer in yes/no.", said, "radar")
            for asked, said in (("Is it so?", "Yes"), ("Is it not?", "No"))
        ],
    ),
}
"""As the benchmarks are published, or as Chart-RVR's own scripts read them (dataset_process.py);
None: an image.
"""


def over(name: str, folder: Path) -> RunConfig:
    """The quickstart with the benchmark's file laid over it."""
    benchmark = yaml.safe_load((RECIPE / f"benchmarks/{name}.yaml").read_text(encoding="utf-8"))
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump({"extends": str(RECIPE / "quickstart.yaml"), **benchmark}), encoding="utf-8"
    )
    config = read(file, [])
    check_components(config)
    return config


def test_there_are_six() -> None:
    assert sorted(path.stem for path in (RECIPE / "benchmarks").glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_prepared_rows_are_read_and_paid_by_the_rule(name: str, tmp_path: Path) -> None:
    config = over(name, tmp_path)
    assert config.data.eval == f"runs/data/{name}/test.jsonl"
    Image.new("RGB", (84, 84)).save(tmp_path / "chart.png")
    row = {"id": "1", "image": "chart.png"} | ROWS[name]
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (task,) = Dataset(
        tmp_path / "test.jsonl", config.data.reader.build(), True, lambda failure: None
    )
    source = {
        "chartqa": "human",
        "plotqa": "dot_line",
        "evochart": "pie",
        "chartqapro": "Conversational",
        "chartbench": "radar",
    }
    assert task.source == source.get(name, name)
    question = str(task.messages[-1].parts[-1])
    assert row["query"] in question
    assert ("yes/no" in question) == (name in ("chartfc", "chartbench"))
    measure = config.reward.source.build()
    right, wrong = (
        measure.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [f"<answer>\n{said}\n</answer>"]))
        for said in (row["label"], "other")
    )
    assert isinstance(right, Scored)
    assert right.components == {"accuracy": 1.0, "relaxed": 1.0, "exact": 1.0}
    assert (right.value, wrong.value) == (1.0, 0.0)
    near = measure.score(EMPTY_TRAJECTORY, task, ScoreContext(0, ["2011"])).value
    assert near == 0.0, (
        "2011 is near 2010 for the relaxed rule only, and ChartQAPro's flag says that it is a year"
    )


def test_rows_with_a_teachers_chain_show_how_the_type_and_the_table_are_read(
    tmp_path: Path,
) -> None:
    """As ``data prepare chart_chains --rows`` writes a benchmark's rows."""
    table = {"columns": ["Year", "Sales"], "rows": [["2019", "10"], ["2020", "20"]]}
    chain = {"chart_type": "bar", "table": table, "reasoning": "<step-1>: the last row says 20"}
    Image.new("RGB", (84, 84)).save(tmp_path / "chart.png")
    rows = [
        {"id": "full", **chain},
        {"id": "no table", **chain, "table": None},
        {"id": "bare", "chart_type": "dot_line"},
    ]
    lines = [json.dumps({"image": "chart.png", **ROWS["chartqa"], **row}) + "\n" for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    config = over("chartqa", tmp_path)
    full, without, bare = Dataset(tmp_path / "train.jsonl", config.data.reader.build(), True, print)
    measure = config.reward.source.build()

    def said(task: Task, kind: str, shown: str) -> dict[str, float]:
        text = (
            f"<think>\n<type>{kind}</type>\n<table>{shown}</table>\n<step-1>:"
            " so\n</think>\n<answer>\n10\n</answer>"
        )
        scored = measure.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [text]))
        assert isinstance(scored, Scored)
        assert scored.value == scored.components["accuracy"] == 1.0, "they are shown and not paid"
        return {
            name: value for name, value in scored.components.items() if name in ("type", "table")
        }

    assert said(full, "Bar", json.dumps(table)) == {"type": 1.0, "table": 1.0}
    wrong = {**table, "rows": [["2019", "10"], ["2020", "21"]]}
    assert said(full, "pie", json.dumps(wrong)) == {"type": 0.0, "table": 0.75}
    assert said(full, "bar", "10 and 20") == {"type": 1.0, "table": 0.0}
    assert said(without, "bar", "{}") == {"type": 1.0}
    assert said(bare, "dot_line", "{}") == {}, (
        "a benchmark's own names of types are not those that the prompt lists"
    )


def published(folder: Path, files: dict[str, Any]) -> None:
    image = io.BytesIO()
    Image.new("RGB", (84, 84)).save(image, "PNG")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.write_bytes(image.getvalue())
        elif path.suffix == ".parquet":
            rows = [{**row, "image": image.getvalue()} for row in content]
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        else:
            path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_published_layout_becomes_questions(name: str, tmp_path: Path) -> None:
    files, expected = LAYOUTS[name]
    published(tmp_path / "from", files)
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
    config = over(name, tmp_path)
    tasks = list(
        Dataset(tmp_path / "out/test.jsonl", config.data.reader.build(), True, lambda failure: None)
    )
    found = [(str(task.messages[-1].parts[-1]), task.ground_truth, task.source) for task in tasks]
    assert sorted(found) == sorted(
        (asked, said, source or name) for asked, said, source in expected
    )
    if name == "chartbench":
        assert sorted(task.id for task in tasks) == ["1000-No", "1000-Yes"]
    measure = config.reward.source.build()
    for task in tasks:
        assert (
            measure.score(
                EMPTY_TRAJECTORY, task, ScoreContext(0, [f"<answer>{task.ground_truth}</answer>"])
            ).value
            == 1.0
        )
        assert (
            measure.score(EMPTY_TRAJECTORY, task, ScoreContext(0, ["<answer>2011</answer>"])).value
            == 0.0
        )


def test_a_conversation_is_asked_with_what_was_said_before(tmp_path: Path) -> None:
    reader = over("chartqapro", tmp_path).data.reader.build()
    task = reader.task({"id": "1", "image": "a.png"} | ROWS["chartqapro"], "rows:1", tmp_path)
    assert task.messages[-1].parts[-1] == "About sales.\nHow many?\n5\nAnd in 2010?"
    alone = {"id": "2", "image": "a.png", "query": "How many?", "label": "3", "kind": "Factoid"}
    assert reader.task(alone, "rows:2", tmp_path).messages[-1].parts[-1] == "How many?"


@pytest.mark.parametrize(
    ("said", "true", "kind", "year", "score"),
    [
        ("10.4", "10", "Factoid", ["NO"], 1.0),
        ("10.6", "10", "Factoid", ["NO"], 0.0),
        ("-9.6", "-10", "Factoid", None, 1.0),
        ("9.6", "-10", "Factoid", None, 0.0),
        ("0", "0", "Factoid", ["NO"], 1.0),
        ("0.01", "0", "Factoid", ["NO"], 0.0),
        ("10%", "10", "Factoid", ["NO"], 1.0),
        ("2011", "2010", "Factoid", ["NO"], 1.0),
        ("2011", "2010", "Factoid", ["YES"], 0.0),
        ("2010.", "2010", "Factoid", ["YES"], 1.0),
        ("b", "B", "Multi Choice", ["NO"], 1.0),
        ("10.1", "10", "Multi Choice", ["NO"], 0.0),
        ("Support", "Supports", "Fact Checking", ["NO"], 0.0),
        ("Support", "Supports", "Factoid", ["NO"], 1 - 1 / 8),
        ("United States", "Germany", "Factoid", ["NO"], 0.0),
        ("[10, 21]", "['10', '20']", "Factoid", ["NO"], 1.0),
        ("['10', '21']", "[10, 20]", "Factoid", ["NO", "YES"], 0.5),
        ("[10]", "[10, 20]", "Factoid", ["NO"], 0.5),
        ("[10, 20, 30, 40]", "[10, 20]", "Factoid", ["NO"], 0.5),
        ("[North, South]", "[North, South]", "Factoid", None, 1.0),
        ("2011", "2010", "Conversational", ["YES", "NO"], 1.0),
        ("2011", "2010", "Conversational", ["NO", "YES"], 0.0),
        ("Unanswerable", "unanswerable", "Hypothetical", ["NO"], 1.0),
        ("", "10", "Factoid", ["NO"], 0.0),
    ],
)
def test_the_rule_of_chartqapro(said: str, true: str, kind: str, year: Any, score: float) -> None:
    assert chartqapro(said, true, kind, year) == pytest.approx(score)


@pytest.mark.parametrize(
    ("said", "true", "right"),
    [
        ("30", "30.0%", True),
        ("30%", "30.0%", True),
        ("30%.", "30.0%", True),
        ("0.3", "30.0%", True),
        ("31.5", "30.0%", True),
        ("31.6", "30.0%", False),
        ("3", "30.0%", False),
        ("30%", "30", True),
        ("-30", "30.0%", False),
        ("0", "0.0%", True),
        ("0.1", "0.0%", False),
        ("-1", "0", False),
        ("yes", "Yes", True),
        ("no", "Yes", False),
        ("nan", "30.0%", False),
        ("", "30.0%", False),
        ("%", "30.0%", False),
        ("inf", "30.0%", False),
    ],
)
def test_the_rule_of_chartbench(said: str, true: str, right: bool, tmp_path: Path) -> None:
    config = over("chartbench", tmp_path)
    row = {"id": "1", "image": "a.png"} | ROWS["chartbench"] | {"label": true}
    task = config.data.reader.build().task(row, "rows:1", tmp_path)
    scored = config.reward.source.build().score(
        EMPTY_TRAJECTORY, task, ScoreContext(0, [f"<answer>{said}</answer>"])
    )
    assert scored.components["accuracy"] == float(right)


@pytest.mark.parametrize(
    ("answers", "both_right"),
    [
        ({"7-Yes": "Yes", "7-No": "no"}, [True]),
        ({"7-Yes": "yes.", "7-No": "Yes"}, [False]),
        ({"7-Yes": "no", "7-No": "no"}, [False]),
        ({"7-Yes": "no", "7-No": "yes"}, [False]),
        ({"7-Yes": "It is: Yes", "7-No": "unknown"}, [True]),
        ({"7-Yes": "yes", "8-No": "no", "9-30.0%": "30"}, []),
        ({"7-Yes": "yes", "8-Yes": "yes", "7-No": "no", "8-No": "yes"}, [True, False]),
        ({"val-1": "yes", "val-2": "no"}, []),
    ],
)
def test_a_pair_of_assertions_counts_when_both_are_judged_right(
    answers: dict[str, str], both_right: list[bool]
) -> None:
    saved = [
        Saved((f"<answer>{said}</answer>",), Task(name, (), ""), {})
        for name, said in answers.items()
    ]
    assert accuracy_plus(saved) == both_right
    line = f"Acc+ {sum(both_right) / max(1, len(both_right)):.4f} over {len(both_right)} pairs"
    assert notes(saved, "corrected") == ([line] if both_right else [])


def test_its_rule_as_chart_rvr_has_it_counts_all_within_a_hundred_per_cent(tmp_path: Path) -> None:
    config = over("chartqapro", tmp_path)
    task = config.data.reader.build().task(
        {"id": "1", "image": "a.png"} | ROWS["chartqapro"], "rows:1", tmp_path
    )
    published = config.reward.source.model_copy(
        update={"with_": {"rule": "chartqapro_published"}}
    ).build()
    paid = [
        published.score(EMPTY_TRAJECTORY, task, ScoreContext(0, [said])).value
        for said in ("4000", "4021")
    ]
    assert paid == [1.0, 0.0]


def test_anls_is_the_share_that_is_alike_down_to_half() -> None:
    assert [distance(a, b) for a, b in (("", "abc"), ("kitten", "sitting"), ("ab", "ab"))] == [
        3,
        3,
        0,
    ]
    assert anls("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert anls("ab", "ac") == 0.0
    assert anls("", "") == 1.0


def test_rows_of_one_kind_alone_are_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path / "in", LAYOUTS["chartqa"][0])
    command = [
        "data",
        "prepare",
        "chartqa",
        "--from",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
        "--splits",
        "test",
    ]
    assert main([*command, "--where", "origin=human"]) == 0
    (row,) = map(json.loads, (tmp_path / "out/test.jsonl").read_text(encoding="utf-8").splitlines())
    assert (row["query"], row["origin"]) == ("How many?", "human")
    assert main([*command, "--where", "origin=people"]) == 2
    assert "has no row that can be used: none has origin=people" in capsys.readouterr().err
    assert main([*command, "--where", "human"]) == 2
    assert "--where human: expected COLUMN=VALUE" in capsys.readouterr().err


def test_a_label_of_chartfc_that_is_no_known_word_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["SUPPORTS", 0, "Yes", "NOT ENOUGH INFO", "maybe"]
    rows = [{"image": "a.png", "claim": "Up", "label": label} for label in labels]
    published(tmp_path / "in", {"data/test_barplot_seg.json": rows, "images/a.png": None})
    command = [
        "data",
        "prepare",
        "chartfc",
        "--from",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
        "--splits",
        "test",
    ]
    assert main(command) == 0
    written = [
        json.loads(line)["label"]
        for line in (tmp_path / "out/test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert written == ["Yes", "No", "Yes"]
    said = capsys.readouterr().out
    assert (
        "left out: 1 row, such as test_barplot_seg, row 3: label 'NOT ENOUGH INFO' is not one of"
        " SUPPORTS, " in said
    )
    assert "label 'maybe' is not one of" in said
