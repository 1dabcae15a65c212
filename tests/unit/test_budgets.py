"""How large the project may be: keys, tokens, modules and words.

A change that needs more takes something else away.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rayloop.run.config import RunConfig
from tests.support.runs import ROOT
from tools.pages.config import count_fields

KEYS = 121
TOKENS = 415_000
"""Names, operators, numbers and strings of the product: a budget that nobody meets by writing
denser lines.
"""
MODULES = 15
WORDS = 30_000
GLOSSARY_WORDS = 400
PRODUCT = ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps")
"""The folders that are installed."""
_MADE = (
    "config",
    "components",
    "events",
    "metrics",
    "doctor",
    "sft",
    "published_values",
    "compatibility",
    "idle_settings",
)
GENERATED = tuple(f"docs/{name}.md" for name in _MADE)
"""Pages that ``make docs`` writes."""


def tracked(*patterns: str) -> list[Path]:
    """Files that git has, relative to the root."""
    found = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode or not found.stdout:
        pytest.skip("this is no checkout of git")
    return [Path(line) for line in found.stdout.splitlines() if (ROOT / line).is_file()]


def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def product() -> list[Path]:
    return tracked(*(f"{folder}/**.py" for folder in PRODUCT))


def tokens(source: str) -> int:
    """Names, operators, numbers and strings, without comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    stream = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in counted and token.start[0] not in docstrings for token in stream)


def words(path: Path) -> int:
    """What has a letter or a digit; the bars of a table are no words."""
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text(path)))


def test_the_keys_of_a_run() -> None:
    assert count_fields(RunConfig) <= KEYS


def test_the_tokens_of_the_product() -> None:
    assert sum(tokens(text(path)) for path in product()) <= TOKENS


def test_comments_and_docstrings_cost_no_tokens() -> None:
    assert tokens('"""What it is."""\nfirst = 1  # why\n') == 3


def test_the_modules_of_a_folder() -> None:
    folders = Counter(path.parent for path in product() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > MODULES} == {}


def test_the_words_of_the_pages_that_people_write() -> None:
    pages = [
        path for path in tracked("*.md") if str(path) not in GENERATED and path.parts[0] != "tests"
    ]
    assert sum(map(words, pages)) <= WORDS


def test_the_words_of_the_glossary() -> None:
    assert words(Path("docs/glossary.md")) <= GLOSSARY_WORDS


def test_a_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for path in product():
        for node in ast.parse(text(path)).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
