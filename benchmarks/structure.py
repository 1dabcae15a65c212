"""``structure [FOLDER]``: the structure of a checkout in numbers, from its syntax trees alone;
nothing of it is imported.

``--graph`` prints the packages and who imports whom, as drawn in docs/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FILE_LINES, FUNCTION_LINES = 400, 60
KINDS = ("top level", "lazy", "type only")
"""Of imports: of the module itself; within a function; under ``TYPE_CHECKING``."""
ROOTS = ("rayloop", "rayloop.__main__")
"""In no room."""
Graph = Mapping[str, set[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), help="a checkout (default: here)"
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="the packages and their imports, for docs/architecture.md",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    checkout = Checkout(arguments.folder)
    print(drawing(checkout) if arguments.graph else "\n".join(report(checkout)))
    return 0


@dataclass
class Module:
    """``imports``: kind -> names as written (``a.b`` and, of ``from a import b``, both ``a.b`` and
    ``a``).
    """

    name: str
    path: Path
    lines: int
    tree: ast.Module
    imports: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)


class Checkout:
    """The modules of a checkout's packages: top-level folders with an ``__init__.py``, no tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        tops = sorted(
            p.parent for p in self.folder.glob("*/__init__.py") if p.parent.name != "tests"
        )
        self.tops = [top.name for top in tops]
        self._links = {
            p.resolve(): p for top in tops for p in top.glob("*") if p.is_symlink() and p.is_dir()
        }
        self.modules = {
            m.name: m
            for top in tops
            for path in sorted(top.rglob("*.py"))
            for m in [self._read(path)]
        }

    def _read(self, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        top = self.folder / path.relative_to(self.folder).parts[0]
        imported = self._links.get(top, top) / path.relative_to(
            top
        )  # a folder that is linked into a package is imported there
        name = ".".join(imported.relative_to(self.folder).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        tree = ast.parse(text)
        module = Module(name, path.relative_to(self.folder), len(text.splitlines()), tree)
        for kind, names in _imports(tree):
            module.imports.setdefault(kind, []).append(names)
        return module

    def graph(self, *kinds: str) -> dict[str, set[str]]:
        """Module -> modules of this checkout that it imports in these ways."""
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, module in self.modules.items():
            for kind in kinds:
                for names in module.imports.get(kind, []):
                    found[name] |= set([n for n in names if n in self.modules and n != name][:1])
        return found

    def package(self, module: str) -> str:
        """The room of a module: ``rayloop.core``, and the top-level folder for all others."""
        parts = module.split(".")
        return ".".join(parts[:2]) if parts[0] == "rayloop" and len(parts) > 1 else parts[0]

    @cached_property
    def packages(self) -> dict[str, set[str]]:
        """Package -> packages that it imports in any way."""
        found: dict[str, set[str]] = {
            self.package(name): set() for name in self.modules if name not in ROOTS
        }
        for name, imported in self.graph(*KINDS).items():
            if name not in ROOTS:
                found[self.package(name)] |= {
                    self.package(other) for other in imported - set(ROOTS)
                } - {self.package(name)}
        return found


def _imports(node: ast.AST, kind: str = "top level") -> Iterator[tuple[str, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from ((kind, (alias.name,)) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((kind, (f"{module}.{alias.name}", module)) for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if kind == "top level":
                yield from _imports(child, "lazy")
            case ast.If(test=test) if "TYPE_CHECKING" in ast.dump(test):
                yield from _imports(child, "type only")
            case _:
                yield from _imports(child, kind)


def cycles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that reach each other, each sorted: Tarjan's strongly connected components of
    more than one.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def siblings(checkout: Checkout) -> list[list[str]]:
    """Cycles between the parts of each package, in every way of importing, as import-linter's
    contract sees them.
    """
    graph, found = checkout.graph(*KINDS), []
    for parent in sorted({name.rpartition(".")[0] for name in checkout.modules if "." in name}):
        depth = parent.count(".") + 2
        parts: dict[str, set[str]] = defaultdict(set)
        for name, imported in graph.items():
            if name.startswith(f"{parent}."):
                part = ".".join(name.split(".")[:depth])
                others = {
                    ".".join(o.split(".")[:depth]) for o in imported if o.startswith(f"{parent}.")
                } - {part}
                parts[part] |= others
                parts.update({other: parts[other] for other in others})
        found += cycles(parts)
    return found


def public(checkout: Checkout) -> Iterator[tuple[str, bool]]:
    """Public classes, functions and methods that are not within a function, and whether each has a
    docstring.
    """

    def names(node: ast.AST, prefix: str) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and child.name[0] != "_"
            ):
                yield f"{prefix}.{child.name}", ast.get_docstring(child) is not None
                if isinstance(child, ast.ClassDef):
                    yield from names(child, f"{prefix}.{child.name}")

    for name, module in checkout.modules.items():
        yield from names(module.tree, name)


def report(checkout: Checkout) -> Iterator[str]:
    """The tables as lines of markdown."""
    yield from ("| folder | files | lines |", "|---|---:|---:|")
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for module in checkout.modules.values():
        parts = module.path.parent.parts
        for folder in {"/".join(parts[:depth]) for depth in (1, 2) if depth <= len(parts)}:
            folders[folder] += Counter(files=1, lines=module.lines)
    tests = [
        len(path.read_text(encoding="utf-8").splitlines())
        for path in checkout.folder.glob("tests/**/*.py")
    ]
    for folder, counts in sorted(folders.items()):
        yield f"| {folder}/ | {counts['files']} | {counts['lines']:,} |"
    modules = checkout.modules.values()
    yield f"| **all but tests** | {len(modules)} | {sum(m.lines for m in modules):,} |"
    yield f"| tests/ | {len(tests)} | {sum(tests):,} |"
    yield from ("", "| what | count | |", "|---|---:|---|", *_counts(checkout))


def _counts(checkout: Checkout) -> Iterator[str]:
    for number in range(1, len(KINDS) + 1):
        found = cycles(checkout.graph(*KINDS[:number]))
        yield (
            f"| import cycles of modules, {', '.join(KINDS[:number])} | {len(found)} |"
            f" {_listed(found)} |"
        )
    found = siblings(checkout)
    yield (
        f"| import cycles between the parts of a package, any import | {len(found)} |"
        f" {_listed(found)} |"
    )
    config = checkout.folder / "docs" / "config.md"
    keys = re.search(r"(\d+) keys", config.read_text(encoding="utf-8")) if config.exists() else None
    yield f"| keys of a run (docs/config.md) | {keys[1] if keys else '?'} | |"
    names = list(public(checkout))
    silent = sum(not documented for _, documented in names)
    yield f"| public names without docstring | {silent} | of {len(names)} |"
    graph = checkout.graph(*KINDS)
    fan_in = Counter(other for imported in graph.values() for other in imported)
    for title, fan in (("out", Counter({n: len(o) for n, o in graph.items()})), ("in", fan_in)):
        (_, most), *_ = largest = fan.most_common(4)
        yield (
            f"| largest fan-{title} | {most} |"
            f" {', '.join(f'{name} {count}' for name, count in largest)} |"
        )
    crowded = Counter(
        str(m.path.parent) for m in checkout.modules.values() if m.path.name != "__init__.py"
    )
    folder, files = crowded.most_common(1)[0]
    yield f"| modules in the fullest folder | {files} | {folder}/ |"
    long = [f"{m.path} {m.lines}" for m in checkout.modules.values() if m.lines >= FILE_LINES]
    yield f"| files of {FILE_LINES} lines or more | {len(long)} | {', '.join(long)} |"
    slow = [f"{m.path}:{f.name}" for m in checkout.modules.values() for f in _functions(m.tree)]
    yield f"| functions of {FUNCTION_LINES} lines or more | {len(slow)} | {', '.join(slow)} |"


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 >= FUNCTION_LINES:
                yield node


def _listed(found: list[list[str]]) -> str:
    return "; ".join(" + ".join(cycle) for cycle in found)


def reachable(graph: Graph, start: str) -> set[str]:
    """All that ``start`` imports, directly or not."""
    seen, waiting = set[str](), [start]
    while waiting:
        for other in graph[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def drawing(checkout: Checkout) -> str:
    """The packages as a mermaid graph: an arrow from each to those that it imports and does not
    reach through another.
    """
    graph = checkout.packages
    lines = ["```mermaid", "graph TD"]
    for package in sorted(graph):
        through = set[str]().union(*(reachable(graph, other) for other in graph[package]))
        lines += [
            f"    {_shown(package)} --> {_shown(other)}"
            for other in sorted(graph[package] - through)
        ]
    return "\n".join([*lines, "```"])


def _shown(package: str) -> str:
    return package.removeprefix("rayloop.")
