"""``python -m benchmarks structure``: what it counts, and what it says of folders, rooms and the
drawing in the docs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.structure import (
    KINDS,
    Checkout,
    cycles,
    drawing,
    public,
    reachable,
    report,
    siblings,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = {
    "app/__init__.py": "",
    "app/main.py": (
        "import app.store\nfrom app.web import page\n\n\nclass Main:\n    def run(self): ...\n   "
        " def _own(self): ...\n"
    ),
    "app/store.py": "def load():\n    '''It loads.'''\n    from app.main import Main\n",
    "app/web/__init__.py": "",
    "app/web/page.py": (
        "import typing\nif typing.TYPE_CHECKING:\n    from app.store import load\n    from app"
        " import main\n"
    ),
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


def test_imports_are_distinguished_by_where_they_stand(example: Checkout) -> None:
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
    reported = list(report(example))
    assert "| app/ | 5 | 14 |" in reported
    assert "| app/web/ | 2 | 4 |" in reported
    assert "| **all but tests** | 7 | 15 |" in reported
    assert "| tests/ | 2 | 1 |" in reported
    assert dict(public(example)) == {
        "app.main.Main": False,
        "app.main.Main.run": False,
        "app.store.load": True,
    }
    assert "| public names without docstring | 2 | of 3 |" in reported


def test_the_drawing_leaves_out_an_arrow_that_a_longer_way_replaces(here: Checkout) -> None:
    lines = [line.strip() for line in drawing(here).splitlines()]
    assert "rayloop.core" in here.packages["rayloop.cluster"], "the cluster imports it, too"
    assert "config --> core" in lines
    assert "cluster --> core" not in lines


def test_every_module_is_used(here: Checkout) -> None:
    """Imported, named in a configuration or a table (``module:Class``), or run by its name."""
    imported = set().union(*here.graph(*KINDS).values())
    kinds, tops = (
        (".py", ".yaml", ".toml", ".md", ".sbatch", ".sh"),
        [*here.tops, "tests", "docs", "deploy"],
    )
    found = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in kinds]
    text = "\n".join(path.read_text(encoding="utf-8") for path in found)
    named = set(
        re.findall(
            r"\brayloop(?:\.\w+)+(?=[:\"'])|(?<=from )rayloop[.\w]+|(?<=-m )[.\w]+|(?<=-m\","
            r" \")[.\w]+",
            text,
        )
    )
    named |= {
        path.replace("/", ".") for path in re.findall(r"\b(rayloop/[\w/]+)\.py:", text)
    }  # what another Python runs by its path
    for module in here.modules.values():  # a program beside a module, which the module runs
        programs = re.findall(
            r"with_name\(\"(\w+)\.py\"\)", module.path.read_text(encoding="utf-8")
        )
        named |= {f"{module.name.rpartition('.')[0]}.{program}" for program in programs}
    of_recipes = re.compile(r"rayloop\.recipes\.\w+\.(prepare|score)")  # found by the recipe's name
    product = [
        m.name
        for m in here.modules.values()
        if m.name.startswith("rayloop.") and m.path.stem not in ("__init__", "__main__")
    ]
    assert len(product) > 200
    assert [
        name for name in product if name not in imported | named and not of_recipes.fullmatch(name)
    ] == []
