"""What the pages say of the two audits: every row is there, and each test that a row names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROW = re.compile(r"^\| ([DL\d, ]+) \|(.*)$", re.MULTILINE)
PAGES = {
    "docs/reliability.md": {f"D{number}" for number in range(1, 22)},
    "docs/gpu.md": {*map(str, range(1, 12)), *(f"L{number}" for number in range(1, 14))},
}


@cache
def functions(file: str) -> set[str]:
    """The tests of a file; empty when it is not there."""
    path = ROOT / file
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def absent(text: str) -> list[str]:
    """Tests that a page names and that nobody wrote."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in functions(file)]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_row_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 15, "the pattern finds nothing any more"
    assert not absent(text)


def test_one_that_does_not_exist_is_found() -> None:
    here = "tests/unit/test_audit_rows.py"
    text = f"`{here}::test_one_that_does_not_exist_is_found`, `{here}::test_gone`, `tests/unit/test_gone.py::test_it`"
    assert absent(text) == [f"{here}::test_gone", "tests/unit/test_gone.py::test_it"]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_of_the_audit_is_there_and_names_a_test_or_what_is_open(page: str) -> None:
    rows = ROW.findall((ROOT / page).read_text(encoding="utf-8"))
    assert {number for numbers, _ in rows for number in numbers.split(", ")} >= PAGES[page]
    silent = [numbers for numbers, row in rows if "tests/" not in row and "Open: " not in row and page != "docs/gpu.md"]
    assert not {number for numbers in silent for number in numbers.split(", ")} & PAGES[page]
