"""docs/parity.md: its table is made of rows of the command, and its words are the command's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayloop.core.model_families import FAMILIES
from rayloop.measure.parity import LIMITS, Axis
from rayloop.parity.report import HEADINGS
from tests.support.runs import ROOT
from tools.pages.parity import ROWS, page

PAGE = (ROOT / "docs/parity.md").read_text(encoding="utf-8")
MADE = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def test_the_page_is_made_of_the_rows() -> None:
    assert page() == PAGE, "make docs"


def test_seven_families_ran_and_agreed() -> None:
    families = {row["family"] for row in MADE if row["origin"]["engine"] == "transformers"}
    assert len(families) >= 7
    assert families <= FAMILIES.keys()
    assert all(row["agreement"]["agrees"] for row in MADE)
    assert {row["origin"]["dtype"] for row in MADE} == set(LIMITS)


@pytest.mark.parametrize("row", MADE, ids=lambda row: f"{row['family']}-{row['origin']['engine']}")
def test_a_row_says_on_what_it_ran(row: dict[str, Any]) -> None:
    (line,) = (
        line
        for line in PAGE.splitlines()
        if line.startswith(f"| `{row['family']}` | {row['origin']['engine']} ")
        and f" | {row['origin']['dtype']}, " in line
    )
    assert f" {row['device']}, torch " in line
    assert row["limit"] == LIMITS[row["origin"]["dtype"]]
    total = row["total"]
    assert total["gap"]["mean"] <= row["limit"]
    assert (total["wrong_images"] is None) == (not FAMILIES[str(row["family"])].images)


@pytest.mark.parametrize("word", [*Axis, *HEADINGS[4:]])
def test_the_parts_and_columns_of_the_table_are_explained(word: str) -> None:
    assert f"`{word}`" in PAGE
