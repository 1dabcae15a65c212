"""The shipped MiniWoB++ pages, and the command that makes and checks such sets."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.data.dataset import Dataset
from rayloop.data.images import decode
from rayloop.recipes.arc_vision.data import GroundingRows
from tools.makers import rendered_pages as miniwob
from tools.makers.rendered_pages import (
    OOD_PAGES,
    PAGES,
    ROWS,
    SHIPPED,
    PageRow,
    compared,
    differences,
    digest,
    read_parquet,
)

MANIFEST = json.loads((SHIPPED / "manifest.json").read_text(encoding="utf-8"))
READER = "rayloop.recipes.arc_vision.data:GroundingRows"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[PageRow]]:
    return {split: read_parquet(SHIPPED / f"{split}.parquet") for split in ROWS}


def test_the_shipped_rows_are_those_of_the_manifest(splits: dict[str, list[PageRow]]) -> None:
    for split, rows in splits.items():
        described = MANIFEST["splits"][split]
        assert len(rows) == described["rows"] == ROWS[split]
        assert digest(rows) == described["sha256"]
        assert Counter(row.page for row in rows) == described["pages"]


def test_the_shipped_set_is_small_and_has_a_licence() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 15_000_000
    assert "MIT License" in (SHIPPED / "LICENSE").read_text(encoding="utf-8")


def test_no_row_occurs_twice(splits: dict[str, list[PageRow]]) -> None:
    rows = [row for members in splits.values() for row in members]
    assert len({row.id for row in rows}) == len(rows)
    assert len({(row.screenshot, row.instruction) for row in rows}) == len(rows)


def test_splits_share_page_types_and_ood_has_its_own(splits: dict[str, list[PageRow]]) -> None:
    pages = {split: {row.page for row in rows} for split, rows in splits.items()}
    assert pages["train"] == pages["val"] == pages["test"] == set(PAGES)
    assert pages["ood"] == set(OOD_PAGES)


def test_the_instruction_alone_does_not_give_the_box(splits: dict[str, list[PageRow]]) -> None:
    for page in PAGES:
        boxes: dict[str, set[tuple[float, ...]]] = {}
        for row in (row for row in splits["train"] if row.page == page):
            boxes.setdefault(row.instruction, set()).add(row.box)
        assert max(map(len, boxes.values())) >= 4, page


def test_every_shipped_row_becomes_a_task() -> None:
    dataset = Dataset(
        SHIPPED / "val.parquet", GroundingRows(GroundingRows.Settings()), True, lambda failure: None
    )
    image = dataset[0].messages[0].parts[1]
    assert len(dataset) == ROWS["val"]
    assert {task.source for task in dataset} == set(PAGES)
    assert decode(image.data).size == (miniwob.WIDTH, miniwob.HEIGHT)  # type: ignore[union-attr, arg-type]


def test_validate_accepts_the_shipped_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "validate", str(SHIPPED / "ood.parquet"), "--reader", READER]) == 0
    assert "150 rows" in capsys.readouterr().out


def test_validate_names_bad_rows_by_file_and_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    good = {"id": "a", "image": "broken.png", "instruction": "Click.", "bbox": [0.1, 0.1, 0.2, 0.2]}
    rows = [
        good,
        {**good, "id": "b", "bbox": [10, 10, 20, 20]},
        {**good, "id": "c", "image": "absent.png"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["data", "validate", str(file), "--reader", READER]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"{file}:1: ") and "broken.png" in line]
    assert [line for line in lines if line.startswith(f"{file}:2: ") and "bbox" in line]
    assert [line for line in lines if line.startswith(f"{file}:3: ") and "absent.png" in line]


def test_differences_name_row_and_field(splits: dict[str, list[PageRow]]) -> None:
    shipped = splits["val"][:3]
    ours = [
        dataclasses.replace(shipped[0], png=shipped[1].png),
        dataclasses.replace(shipped[1], box=(0.0, 0.0, 0.5, 0.5)),
    ]
    found = sorted(differences(ours, shipped))
    assert len(found) == 3
    assert any(shipped[0].id in line and "pixels differ" in line for line in found)
    assert any(shipped[1].id in line and "the box is" in line for line in found)
    assert any(shipped[2].id in line and "only in the shipped set" in line for line in found)
    assert list(differences(shipped, shipped)) == []


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no split is called training"):
        miniwob.main(["--out", str(tmp_path), "--rows", "training=5"])


@pytest.mark.browser
def test_pages_render_as_they_were_shipped(tmp_path: Path) -> None:
    pytest.importorskip(
        "playwright", reason="playwright is not installed: pip install -e .[browser]"
    )
    pytest.importorskip("miniwob", reason="miniwob is not installed: pip install -e .[browser]")
    try:
        browser = miniwob.find_browser(None)
    except ConfigError as error:
        pytest.skip(str(error))
    rendered = miniwob.render("click-dialog-2", {"val": 5}, browser).rows["val"]
    shipped = {row.id: row for row in read_parquet(SHIPPED / "val.parquet")}
    assert len(rendered) == 5
    for row in rendered:
        assert (row.instruction, row.box) == (shipped[row.id].instruction, shipped[row.id].box)
    if miniwob.browser_version(browser) == MANIFEST["made_with"]["chromium"]:
        miniwob.write_parquet(tmp_path / "val.parquet", "val", rendered)
        assert "pixels" not in compared(tmp_path, "val")


def test_validate_reads_a_configuration_with_its_own_reader_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {
        "name": "run",
        "steps": 1,
        "model": {"path": "nowhere"},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "eval": str(tmp_path / "eval.jsonl"),
            "reader": {"use": "rayloop.data.dataset:ChatRows", "with": {"prompt": "question"}},
        },
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n', encoding="utf-8")
    (tmp_path / "eval.jsonl").write_text('{"question": "a"}\n{"prompt": "a"}\n', encoding="utf-8")
    assert main(["data", "validate", str(tmp_path / "run.yaml")]) == 1
    out = capsys.readouterr().out
    assert "train.jsonl: 1 row read by rayloop.data.dataset:ChatRows, 0 problems" in out
    assert "eval.jsonl:2: no column 'question'" in out
    assert "warning: none of the 1 rows of" in out
    assert (
        main(["data", "validate", str(tmp_path / "run.yaml"), "data.reader.with.prompt=prompt"])
        == 2
    )
    assert (
        "train.jsonl:1: no column 'prompt'; the row's: question, answer" in capsys.readouterr().out
    )
