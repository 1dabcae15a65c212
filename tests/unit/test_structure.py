"""``python -m rayloop.benchmarks structure``: what it counts, and what it says of folders, rooms and the drawing in the docs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rayloop.benchmarks.structure import KINDS, Checkout, cycles, drawing, public, reachable, report, siblings

ROOT = Path(__file__).parents[2]
MODULES = 20
"""In one folder, ``__init__.py`` aside: what one can overlook."""
EXAMPLE = {
    "app/__init__.py": "",
    "app/main.py": "import app.store\nfrom app.web import page\n\n\nclass Main:\n    def run(self): ...\n    def _own(self): ...\n",
    "app/store.py": "def load():\n    '''It loads.'''\n    from app.main import Main\n",
    "app/web/__init__.py": "",
    "app/web/page.py": "import typing\nif typing.TYPE_CHECKING:\n    from app.store import load\n    from app import main\n",
    "lib/__init__.py": "",
    "lib/tools.py": "def _hidden(): ...\n",
    "tests/__init__.py": "",
    "tests/test_app.py": "import app.main\n",
    "notes/text.py": "import lib.tools\n",
}


@pytest.fixture(scope="module")
def here() -> Checkout:
    return Checkout(ROOT)


@pytest.fixture
def example(tmp_path: Path) -> Checkout:
    for name, text in EXAMPLE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Checkout(tmp_path)


def test_imports_are_told_apart_by_where_they_stand(example: Checkout) -> None:
    assert example.tops == ["app", "lib"]
    top, lazy, typing = (example.graph(kind) for kind in KINDS)
    assert top["app.main"] == {"app.store", "app.web.page"}
    assert (lazy["app.store"], top["app.store"]) == ({"app.main"}, set())
    assert (typing["app.web.page"], top["app.web.page"]) == ({"app.store", "app.main"}, set())


def test_cycles_are_found_with_the_imports_that_make_them(example: Checkout) -> None:
    assert cycles(example.graph(KINDS[0])) == []
    assert cycles(example.graph(*KINDS[:2])) == [["app.main", "app.store"]]
    assert cycles(example.graph(*KINDS)) == [["app.main", "app.store", "app.web.page"]]
    assert siblings(example) == [["app.main", "app.store", "app.web"]]
    assert reachable({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}, "a") == {"b", "c"}


def test_the_tables_count_files_lines_and_names(example: Checkout) -> None:
    told = list(report(example))
    assert "| app/ | 5 | 14 |" in told
    assert "| app/web/ | 2 | 4 |" in told
    assert "| **all but tests** | 7 | 15 |" in told
    assert "| tests/ | 2 | 1 |" in told
    assert dict(public(example)) == {"app.main.Main": False, "app.main.Main.run": False, "app.store.load": True}
    assert "| public names without docstring | 2 | of 3 |" in told


def test_no_folder_has_more_modules_than_one_can_overlook(here: Checkout) -> None:
    folders = Counter(str(m.path.parent) for m in here.modules.values() if m.path.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > MODULES} == {}


@pytest.mark.parametrize(
    ("room", "needs"),
    [
        (
            "rayloop.serve_apps.console",
            ("rayloop.view.reader", "rayloop.view.page", "rayloop.run.records.events", "rayloop.run.records.metrics"),
        )
    ],
)
def test_what_an_empty_room_will_need_leads_nowhere_that_it_may_not_go(here: Checkout, room: str, needs: tuple[str, ...]) -> None:
    """The contract on serve_apps counts what is imported indirectly."""
    forbidden = tuple(f"rayloop.{name}" for name in ("envs", "recipes", "cluster", "actors", "benchmarks"))
    assert room in here.modules
    for need in needs:
        led = {need, *reachable(here.graph(*KINDS), need)}
        assert not [name for name in led if f"{name}.".startswith(tuple(f"{top}." for top in forbidden))], need


def test_the_drawing_in_the_docs_is_that_of_the_code(here: Checkout) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert drawing(here) in page, "put the output of `python -m rayloop.benchmarks structure --graph` into docs/architecture.md"
