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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from rayloop.run.config import RunConfig
from tests.support.runs import ROOT
from tools.pages.config import leaf_keys

KEYS = 200
"""Paths that a user can set to a value; a class that is used at two places has its keys twice."""
TOKENS = 497_500
"""Names, operators, numbers and strings of the product: a budget that nobody meets by writing
denser lines.
"""
MODULES = 15
WORDS = 28_550
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
    "parity",
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
        pytest.skip("this is not a checkout of git")
    return [Path(line) for line in found.stdout.splitlines() if (ROOT / line).is_file()]


def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def product() -> list[Path]:
    return tracked(*(f"{folder}/**.py" for folder in PRODUCT))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of docstrings, and of the texts below constants and fields."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Names, operators, numbers and strings, without comments and docstrings."""
    docstrings = docstring_lines(ast.parse(source))
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    stream = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in stream if token.type in counted and token.start[0] not in docstrings]


def tokens(source: str) -> int:
    """Tokens of the code, whatever its layout.

    A comma before a closing bracket and a string that goes on on the next line are layout.
    """
    counted = code_tokens(source)
    layout = 0
    for token, following in pairwise(counted):
        trailing_comma = token.string == "," and following.string in ")]}"
        continued_string = token.type == following.type == tokenize.STRING
        layout += trailing_comma or continued_string
    return len(counted) - layout


def words(path: Path) -> int:
    """What has a letter.

    A figure is not a word: sentences must not be short of room because a table has its intervals.
    """
    return len(re.findall(r"[^\s|]*[^\W\d_][^\s|]*", text(path)))


def test_the_keys_of_a_run() -> None:
    assert len(leaf_keys(RunConfig)) <= KEYS


def test_the_tokens_of_the_product() -> None:
    assert sum(tokens(text(path)) for path in product()) <= TOKENS


def test_comments_docstrings_and_layout_cost_no_tokens() -> None:
    assert tokens('"""What it is."""\nfirst = 1  # why\n') == 3
    assert tokens('call(\n    first,\n    "a"\n    "b",\n)\n') == tokens('call(first, "ab")\n') == 6


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


# How the code reads: rates that squeezing makes worse -------------------------------------------


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_TOKENS_PER_CODE_LINE = 8.5
MOST_PER_1000_CODE_LINES = {
    "nested comprehensions": 2.0,
    "walrus": 2.0,
    "pairs assigned at once": 4.0,
}
CODE_LINES_PER_COMMENT = 40
CONDITIONAL_COLUMNS = 80
VAGUE_NAME = re.compile(
    "found|asked|made|kept|shown|begun|gone|lost|given|left|chosen|played|sent|saved|known|written"
    "|named|told|read|seen|taken|held|stored|owed|dropped|changed|moved|capped|paid|doubted|wanted"
    "|got|judged|scored|rendered|done|spent|due|late|there|ours|theirs|others?|own|whole|plain"
    "|together|alone|again|anew|aside|beside|before|after|above|below|within|around|one|two"
)
"""Participles and adverbs: as a variable's name they say what happened, and not what it is."""
MOST_VAGUE_NAMES = 0.015
UNITS = {
    "seconds": "S",
    "milliseconds": "MS",
    "bytes": "BYTES",
    "mib": "MIB",
    "gib": "GIB",
    "characters": "CHARACTERS",
    "pixels": "PIXELS",
    "tokens": "TOKENS",
    "steps": "STEPS",
}
"""First word of a constant's text -> the last word of the constant's name."""
DURATIONS = {"TIMEOUT", "INTERVAL", "PERIOD", "PATIENCE", "PAUSE", "PAUSES", "WAIT", "EVERY"}
"""Words of a constant's name that say that it is a time."""
ENDS_OF_DURATIONS = {"S", "MS", "SHARE"}
QUANTITIES = {"MIB", "GIB"}
"""Numbers that are units themselves, so that one word names them."""
NUMBERS_OF_THE_KERNEL = ("rayloop/sandbox/kernel.py", "rayloop/sandbox/seccomp.py")
"""Files whose numbers have the names that Linux gives them, in one word too."""


class Reading(NamedTuple):
    """What the rates of the product are made of."""

    code_lines: int
    tokens: int
    comments: int
    names: int
    vague_names: int
    places: dict[str, list[str]]
    """Kind of construction -> ``file:line`` of each."""


@pytest.fixture(scope="module")
def reading() -> Reading:
    code_lines = comments = all_tokens = names = vague = 0
    places = defaultdict[str, list[str]](list)
    for path in product():
        source = text(path)
        tree = ast.parse(source)
        code = code_tokens(source)
        all_tokens += len(code)
        code_lines += len({line for t in code for line in range(t.start[0], t.end[0] + 1)})
        comments += sum(line.lstrip().startswith("#") for line in source.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names += 1
                vague += VAGUE_NAME.fullmatch(node.id) is not None
            kind = construction(node)
            if kind is not None:
                places[kind].append(f"{path}:{getattr(node, 'lineno', 0)}")
    return Reading(code_lines, all_tokens, comments, names, vague, dict(places))


def construction(node: ast.AST) -> str | None:
    """The kind of a construction that puts several ideas on a line."""
    if isinstance(node, COMPREHENSIONS):
        inner = any(isinstance(part, COMPREHENSIONS) for part in ast.walk(node) if part is not node)
        return "nested comprehensions" if inner or len(node.generators) > 1 else None
    if isinstance(node, ast.NamedExpr):
        return "walrus"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        return "pairs assigned at once" if isinstance(node.targets[0], ast.Tuple) else None
    if isinstance(node, ast.IfExp):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        wide = node.end_col_offset - node.col_offset > CONDITIONAL_COLUMNS
        return "wide conditional expressions" if wide or node.end_lineno > node.lineno else None
    return None


def test_a_line_of_code_holds_few_tokens(reading: Reading) -> None:
    assert reading.tokens / reading.code_lines <= MOST_TOKENS_PER_CODE_LINE


@pytest.mark.parametrize("kind", MOST_PER_1000_CODE_LINES)
def test_few_lines_hold_several_ideas(reading: Reading, kind: str) -> None:
    places = reading.places.get(kind, [])
    rate = 1000 * len(places) / reading.code_lines
    assert rate <= MOST_PER_1000_CODE_LINES[kind], "\n".join(places)


def test_a_conditional_expression_is_short(reading: Reading) -> None:
    assert reading.places.get("wide conditional expressions", []) == []


def test_comments_say_why(reading: Reading) -> None:
    assert reading.comments * CODE_LINES_PER_COMMENT >= reading.code_lines


def test_variables_are_named_by_what_they_are(reading: Reading) -> None:
    assert reading.vague_names <= MOST_VAGUE_NAMES * reading.names


def is_number(value: ast.expr, numbers: set[str]) -> bool:
    """Whether it is a number, computed from numbers, or a tuple of them; ``numbers``: constants."""
    match value:
        case ast.Constant():
            return type(value.value) in (int, float)
        case ast.Name():
            return value.id in numbers
        case ast.UnaryOp():
            return is_number(value.operand, numbers)
        case ast.BinOp():
            return is_number(value.left, numbers) and is_number(value.right, numbers)
        case ast.Tuple():
            return bool(value.elts) and all(is_number(part, numbers) for part in value.elts)
    return False


def number_constants(source: str) -> dict[str, str]:
    """Each constant of a module or class that is a number -> the text below it, else ""."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        name: text_below
        for body in (tree.body, *(node.body for node in classes if not is_enumeration(node)))
        for name, text_below in number_constants_of(body).items()
    }


def is_enumeration(node: ast.ClassDef) -> bool:
    """Whether its numbers are values of an enumeration, which name what they are together."""
    return any("Enum" in ast.unparse(base) for base in node.bases)


def number_constants_of(body: list[ast.stmt]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for node, following in pairwise([*body, ast.Pass()]):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or not target.id.isupper():
            continue
        if not is_number(node.value, set(texts)):
            continue
        has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        texts[target.id] = str(following.value.value) if has_text else ""
    return texts


def naming_fault(name: str, text: str) -> str | None:
    """What the name of a number leaves open: its object or its unit; None when it says both."""
    parts = name.strip("_").split("_")
    if len(parts) == 1 and name not in QUANTITIES:
        return "one word cannot say object and unit"
    first_words = re.sub("^((the|maximum|minimum|most|last|at least|at most) )+", "", text.lower())
    unit = UNITS.get(first_words.split(maxsplit=1)[0]) if text else None
    if unit is not None and parts[-1] != unit:
        return f"its unit is {unit}"
    if DURATIONS.intersection(parts) and parts[-1] not in ENDS_OF_DURATIONS:
        return "it is a time without a unit"
    return None


def test_a_number_says_its_object_and_its_unit_in_its_name() -> None:
    constants = {
        (str(path), name): text_below
        for path in (*product(), *tracked("benchmarks/**.py", "tools/**.py"))
        if str(path) not in NUMBERS_OF_THE_KERNEL
        for name, text_below in number_constants(text(path)).items()
    }
    faults = {
        place: fault
        for place, text_below in constants.items()
        if (fault := naming_fault(place[1], text_below)) is not None
    }
    assert len(constants) > 300, "the pattern finds nothing any more"
    assert faults == {}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("POLL = 1.0", "one word cannot say object and unit"),
        ("_LONGEST = 4 * 1024", "one word cannot say object and unit"),
        ('HEAD_SILENCE = 60.0\n"""Seconds without an answer."""', "its unit is S"),
        ('LOG_LIMIT = 2**20\n"""The most bytes of a log."""', "its unit is BYTES"),
        ("START_TIMEOUT: float = 5.0", "it is a time without a unit"),
        ('STALL_REPORT_AFTER_S = 5.0\n"""Seconds until a stall is reported."""', None),
        ("STEP_TIMEOUT_SHARE = 1 / 6", None),
        ("MIB = 1 << 20", None),
        ("class Reports:\n    KEPT = 1000", "one word cannot say object and unit"),
    ],
)
def test_a_name_without_object_or_unit_is_refused(source: str, fault: str | None) -> None:
    [(name, text_below)] = number_constants(source).items()
    assert naming_fault(name, text_below) == fault


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("x = [a for b in c for a in b]", "nested comprehensions"),
        ("x = {a: [b for b in a] for a in c}", "nested comprehensions"),
        ("x = (y := 1)", "walrus"),
        ("a, b = 1, 2", "pairs assigned at once"),
        ("x = 1 if y else (\n    2\n)", "wide conditional expressions"),
        ("x = [a for a in b]", None),
        ("a, b = c", None),
        ("x = 1 if y else 2", None),
    ],
)
def test_a_construction_is_seen(source: str, kind: str | None) -> None:
    kinds = {construction(node) for node in ast.walk(ast.parse(source))} - {None}
    assert kinds == ({kind} if kind else set())
