"""Rows that cannot be used are counted by their reasons, and images are found where paths of
another machine end.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloop.cli import main
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.data.published.prepare import reasons
from rayloop.recipes.arpo.osworld import tasks
from tests.unit.data.test_published import png, written

THERE = "/mnt/elsewhere/set/images/a.png"


def rows(folder: Path, *images: str) -> None:
    made = [
        {"id": str(i), "question": "Q?", "answer": "A", "image_path": image}
        for i, image in enumerate(images)
    ]
    written(
        folder / "map.yaml",
        b"files: {train: [rows.json]}\ncolumns: {image: image_path, prompt: question, answer:"
        b" answer}\n",
    )
    (folder / "rows.json").write_text(json.dumps(made), encoding="utf-8")


def prepared(folder: Path, *options: str) -> int:
    given = [
        "data",
        "prepare",
        "generic",
        "--map",
        str(folder / "map.yaml"),
        "--from",
        str(folder),
        "--out",
        str(folder / "out"),
    ]
    return main([*given, *options])


def test_a_preparation_that_keeps_no_row_fails_with_the_reasons_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, THERE, "/mnt/elsewhere/b.png", "/mnt/c.png")
    (tmp_path / "rows.json").write_text(
        (tmp_path / "rows.json").read_text()[:-1] + ', {"question": "Q?"}]', encoding="utf-8"
    )
    assert prepared(tmp_path) == 2
    said = capsys.readouterr().err
    assert (
        f"{tmp_path} has no row that can be used\n    3 rows, such as train-0: no file {THERE}"
        in said
    )
    assert "--images-root FOLDER" in said
    assert "\n    1 row, such as rows, row 3: no image_path for 'image'" in said
    assert not (tmp_path / "out/train.jsonl").exists()


def test_an_empty_list_of_osworld_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"none\.json names no task"):
        tasks(tmp_path, Path("none.json"))


@pytest.mark.parametrize("there", [THERE, "C:\\data\\set\\images\\a.png", "../set/images/a.png"])
@pytest.mark.parametrize("here", ["a.png", "images/a.png", "set/images/a.png"])
def test_an_image_is_found_by_the_end_of_its_path(tmp_path: Path, there: str, here: str) -> None:
    rows(tmp_path, there)
    written(tmp_path / "root" / here, png(1))
    assert prepared(tmp_path, "--images-root", str(tmp_path / "root")) == 0
    assert len((tmp_path / "out/train.jsonl").read_text().splitlines()) == 1


def test_the_longest_end_counts(tmp_path: Path) -> None:
    rows(tmp_path, THERE)
    written(tmp_path / "root/a.png", png(1))
    written(tmp_path / "root/images/a.png", png(2))
    assert prepared(tmp_path, "--images-root", str(tmp_path / "root")) == 0
    row = json.loads((tmp_path / "out/train.jsonl").read_text())
    assert (tmp_path / "out" / row["image"]).read_bytes() == png(2)


def test_a_root_that_is_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, THERE)
    assert prepared(tmp_path, "--images-root", str(tmp_path / "none")) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_reasons_are_named_by_frequency_and_the_rest_counted() -> None:
    failures = [
        DataFailure(f"row {i}", f"no file /a/{i}.png; looked for /b/{i}.png") for i in range(3)
    ]
    failures += [
        DataFailure("row", f"{word} is missing") for word in ("one", "two", "three", "four", "five")
    ]
    assert reasons(failures)[0] == "3 rows, such as row 0: no file /a/0.png; looked for /b/0.png"
    assert reasons(failures)[1] == "1 row, such as row: one is missing"
    assert reasons(failures)[-1] == "1 rows for 1 other reasons"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--fps", "-1"],
        ["--fps", "nan"],
        ["--fps", "inf"],
        ["--images-root", "/nowhere/at/all"],
        ["--splits", "none"],
    ],
)
def test_wrong_options_are_named_before_anything_is_fetched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: list[str],
) -> None:
    rows(tmp_path, THERE)
    monkeypatch.setattr(
        "rayloop.data.published.prepare.folder", lambda *_: pytest.fail("the data set is fetched")
    )
    assert prepared(tmp_path, *wrong) == 2
    assert wrong[0] in capsys.readouterr().err
