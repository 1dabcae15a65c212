"""Counts constructions that a native engineer would not write, per 1,000 lines of text.

    python -m tools.english            # the rates, and exit code 1 when one is above its limit
    python -m tools.english --show     # every place too

The texts are docstrings, comments, messages (f-strings of several words), comments of YAML files
and pages that people write. A wording that is right in one place may be wrong in the next, so the
check limits a rate instead of refusing a phrase.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_PER_1000_LINES = 4.0
"""The rate that each kind of text may have."""
PRODUCT = ("rayloop", "actors", "cluster", "serve_apps", "judge", "recipes")
PAGES = ("docs", "deploy", "benchmarks")
"""Other folders with pages."""
GENERATED = re.compile(r"<!-- generated|^Made by `python -m", re.MULTILINE)
"""What a page says that a program writes."""
MESSAGE_WORDS = 5
"""An f-string of fewer words is a name or a number rather than a sentence."""
FAMILIES: dict[str, str] = {
    "is no X (is not an X; there is no X)": (
        r"(?<![Tt]here )\b(?:is|are|was|were) no"
        r" (?!longer\b|more\b|other\b|less\b|such\b|need\b|reason\b)[a-z]+"
    ),
    "of one's own (custom, separate)": r"\bof (?:one's|your|its|their|his) own\b",
    "begins with Of (no subject)": r"^Of ",
    "gone, there, away (dead, exists, unreachable)": (
        r"\b(?:is|are|was|were|has|have) (?:gone|there|away)\b(?! (?:is|are|was)\b)"
    ),
    "those that (the X that)": r"\b[Tt]hose (?:that|of|which|who|with|not|in)\b",
    "anew, aside, beside, beforehand": (
        r"\b(?:anew|aside|beforehand|in vain|alike|whereupon|beside|at fault|for want of)\b"
    ),
    "lies in, stands in (is in)": (
        r"\b(?:stands?|lies?) (?:in|on|at|below|above|under|behind|there|here)\b"
    ),
    "is none, are none (does not exist; has no X)": r"\b(?:is|are) none\b",
    "goes on, goes well (continues, succeeds)": r"\b(?:go|goes|went|gone) (?:on|well)\b",
    "from X on (starting at X, after X)": (
        r"\bfrom (?:now|then|here|there|this|which|\d+|`+[^` ]+`+) on\b"
    ),
    "begins with Who (no noun)": r"(?:^|[.;] )[Ww]ho(?:ever)? [a-z]+(?![^.;]*\?)",
    "does without (does not need)": r"\b(?:do|does) without\b",
    "so many (this number of)": r"\b(?:at most|after|of|for|every) so many\b",
    "among them (they include)": r"\bamong them\b",
}


class Text(NamedTuple):
    """A text of the project, its place, and how many lines it takes."""

    kind: str
    place: str
    words: str
    lines: int


def main(arguments: list[str] | None = None) -> int:
    """Print the rate of each kind of text. Returns 1 when one is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m tools.english")
    parser.add_argument("--show", action="store_true", help="every place too")
    show = parser.parse_args(arguments).show
    lines: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for text in texts(ROOT):
        lines[text.kind] += text.lines
        for family in families(text.words):
            hits[text.kind] += 1
            if show:
                print(f"{text.place}: {family}: {text.words[:160]}")
    failed = False
    for kind, count in sorted(lines.items()):
        rate = 1000 * hits[kind] / count
        failed |= rate > LIMIT_PER_1000_LINES
        print(f"{kind}: {hits[kind]} in {count} lines, {rate:.1f} per 1,000 lines")
    if failed:
        advice = "python -m tools.english --show names the places"
        print(f"english: more than {LIMIT_PER_1000_LINES:g}: {advice}", file=sys.stderr)
    return int(failed)


def families(words: str) -> Iterator[str]:
    """The family of each construction in the text, once for each time that it occurs."""
    for family, pattern in FAMILIES.items():
        for _ in re.finditer(pattern, words):
            yield family


def texts(root: Path) -> Iterator[Text]:
    """All texts of the product and of the pages below ``root``."""
    for path in files(root):
        name = str(path.relative_to(root))
        top = name.split("/")[0]
        if path.suffix == ".py" and top in PRODUCT:
            yield from of_source(name, path.read_text(encoding="utf-8"))
        elif path.suffix in (".yaml", ".yml") and top in PRODUCT:
            yield from of_yaml(name, path.read_text(encoding="utf-8"))
        elif path.suffix == ".md":
            yield from of_page(name, path.read_text(encoding="utf-8"))


def files(root: Path) -> Iterator[Path]:
    """Files that may have texts; a checkout may be without git, so folders are walked."""
    yield from sorted(root.glob("*.md"))
    for folder in (*PRODUCT, *PAGES):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path


def of_source(name: str, source: str) -> Iterator[Text]:
    """Docstrings, messages and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                yield Text("docstrings", f"{name}:{node.lineno}", " ".join(value.split()), length)
        elif isinstance(node, ast.JoinedStr):
            message = "".join(_shown(part) for part in node.values)
            if len(message.split()) >= MESSAGE_WORDS:
                yield Text("messages", f"{name}:{node.lineno}", message, 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comments", f"{name}:{token.start[0]}", token.string.lstrip("# "), 1)


def of_yaml(name: str, source: str) -> Iterator[Text]:
    """Comments of a YAML file."""
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|\s)# (.*)", line)
        if comment is not None:
            yield Text("comments", f"{name}:{number}", comment[1], 1)


def of_page(name: str, source: str) -> Iterator[Text]:
    """Lines of a page, without its programs; nothing of a generated page."""
    if GENERATED.search(source):
        return
    in_program = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            in_program = not in_program
        elif not in_program and line.strip() and not line.startswith("    "):
            yield Text("pages", f"{name}:{number}", line, 1)


def _shown(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"


if __name__ == "__main__":
    sys.exit(main())
