"""The documentation: what it names exists, and every page can be found."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rayloop.cli import COMMANDS, parsed
from rayloop.config.explain import keys, walk
from rayloop.run.config import RunConfig
from rayloop.run.records.metrics import METRICS, validate
from rayloop.sft.stage import SftConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOPS = (
    "rayloop",
    "judge",
    "recipes",
    "actors",
    "cluster",
    "serve_apps",
    "benchmarks",
    "tools",
    "tests",
    "docs",
    "deploy",
)
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "recipes").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
TEXTS = sorted([*PAGES, *(path for top in TOPS[:7] for path in (ROOT / top).rglob("*.py"))])
"""Pages, and the modules whose docstrings and comments also name files."""
FILE = re.compile(rf"(?<![\w./-])(?<!@[0-9a-f]{{40}}:)(?:{'|'.join(TOPS)})/[\w./*-]*[\w*]")
"""A file here: one behind a commit (``owner/name@...:docs/page.md``) is in another repository."""
LINK = re.compile(r"\]\(([^)\s:#]*)(?:#([^)\s]*))?\)")
MODULE = re.compile(r"python3? -m ([\w.]+)")
DOTTED = re.compile(
    rf"`(rayloop(?:\.\w+)+|(?:{'|'.join(TOPS[1:7])})(?:\.\w+)+(?=:))(?::(\w+))?[`(]"
)
OWNED = re.compile(r"`(\w+)[^`]*`\s(?:from|of|in)\s`([\w.]+|[\w/]+\.py)`")
OF_A_FILE = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w/]+\.py)`(?:: | \(|, )([^\n|;]*)")
"""A file, and the rest of its clause, which names what is in it."""
COMMAND = re.compile(r"(?:`|^ {2,4})python3? -m rayloop ([a-z]+)\b", re.MULTILINE)
WHOLE = re.compile(
    r"`(?:\S*python3? -m rayloop) ([^`]+ [^`]+)`"
    r"|^ {4,}(?:[^\n#`]* do |watch )?(?:\S*python3? -m rayloop) ((?:[^\n]*\\\n)*[^\n]*)",
    re.MULTILINE,
)
"""A command with its arguments: between backticks, or a line of a block that may be continued, or
is in a loop.
"""
TARGET = re.compile(r"(?:`|^    )make (?:[A-Z_]+=\S+ )*([a-z][\w-]*)(?![\w/-])", re.MULTILINE)


def found(pattern: re.Pattern[str], pages: list[Path]) -> Iterator[tuple[Path, str, re.Match[str]]]:
    """Each place of the pages that matches, as (page, "page:line", match)."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield page, f"{page.relative_to(ROOT)}:{line}", match


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_is_named_exists() -> None:
    places = list(found(FILE, TEXTS))
    missing = [
        f"{place}: {match[0]}" for page, place, match in places if not exists(page, match[0])
    ]
    assert len(places) > 100, "the pattern finds nothing any more"
    assert not missing, "\n".join(missing)


def exists(page: Path, name: str) -> bool:
    """From the root, or from the page's own folder; ``name`` may have asterisks."""
    return any(
        (place / name).exists() or ("*" in name and any(place.glob(name)))
        for place in (ROOT, page.parent)
    )


def test_every_link_leads_somewhere() -> None:
    places = list(found(LINK, PAGES))
    broken = [
        f"{place}: {match[0]}"
        for page, place, match in places
        if not (target := page.parent / match[1] if match[1] else page).exists()
        or (match[2] and match[2] not in anchors(target))
    ]
    assert len(places) > 50, "the pattern finds nothing any more"
    assert not broken, "\n".join(broken)


def test_every_command_that_is_quoted_exists() -> None:
    modules = list(found(MODULE, TEXTS))
    ours = [(place, match[1]) for _, place, match in modules if match[1].split(".")[0] in TOPS]
    targets = set(
        re.findall(
            r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    wrong = [f"{place}: no module {name}" for place, name in ours if find_spec(name) is None]
    wrong += [
        f"{place}: no command {match[1]}"
        for _, place, match in found(COMMAND, TEXTS)
        if match[1] not in COMMANDS
    ]
    wrong += [
        f"{place}: no target {match[1]}"
        for _, place, match in found(TARGET, PAGES)
        if match[1] not in targets
    ]
    assert len(ours) > 30, "the pattern finds nothing any more"
    assert not wrong, "\n".join(wrong)


def test_every_command_that_is_quoted_in_full_is_understood(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong, understood = [], 0
    for _, place, match in found(WHOLE, PAGES):
        words = shlex.split(
            re.split(r"\s#| {3,}|;", re.sub(r"\\\n *", "", match[1] or match[2]))[0]
        )
        if any(
            word[0] in "[." or "|" in word or word in ("ACTION", "RECIPE", "NAME") for word in words
        ):
            continue  # a form, not a command
        understood += 1
        try:
            parsed(words)
        except SystemExit as end:
            if end.code:
                wrong.append(f"{place}: {capsys.readouterr().err.splitlines()[-1]}")
    assert understood > 30, "the pattern finds nothing any more"
    assert not wrong, "\n".join(wrong)


def test_every_key_of_a_configuration_that_is_quoted_exists() -> None:
    known = {
        tuple(part for part in [*path, key] if part != "*")
        for root in (RunConfig, SftConfig)
        for path, model in walk(root)
        for key in keys(model)
    }
    sections = sorted({str(part) for path in known for part in path[:-1]})
    quoted = re.compile(rf"`((?:{'|'.join(sections)})(?:\.[a-z_]+)+)(?:[:=][^`]*)?`")
    places = [(place, match[1]) for _, place, match in found(quoted, TEXTS)]
    ends = {path[-length:] for path in known for length in range(1, len(path) + 1)}
    others = {"logprobs.content"}  # of OpenAI's answers
    absent = [
        f"{place}: {key}"
        for place, key in places
        if tuple(re.sub(r"\.(with|resources|extra)\..*", r".\1", key).split(".")) not in ends
        and not key.endswith((".py", ".html", ".png", ".json", ".key", ".safetensors"))
        and key not in others
    ]
    assert len(places) > 100, "the pattern finds nothing any more"
    assert not absent, "\n".join(absent)


def test_every_module_and_name_that_is_quoted_exists() -> None:
    places = [(place, match[1], match[2]) for _, place, match in found(DOTTED, PAGES)]
    places += [
        (place, match[2].removesuffix(".py").replace("/", "."), match[1])
        for _, place, match in found(OWNED, PAGES)
        if match[2].startswith(TOPS) and match[2] != match[1]
    ]
    absent = [
        f"{place}: {module}:{name}" for place, module, name in places if not defined(module, name)
    ]
    assert len(places) > 20, "the pattern finds nothing any more"
    assert not absent, "\n".join(absent)


def test_every_name_that_follows_a_file_is_in_it() -> None:
    named = []
    for _, place, match in found(OF_A_FILE, PAGES):
        before_the_next_file = re.split(r"`[\w/]+\.\w+`", match[2])[0]
        names = re.findall(r"`(\w+)`", before_the_next_file)
        named += [(place, match[1], name) for name in names]
    absent = [
        each
        for each in named
        if not defined(each[1].removesuffix(".py").replace("/", "."), each[2])
    ]
    assert len(named) > 5, "the pattern finds nothing any more"
    assert not absent


def test_every_class_that_a_docstring_or_a_message_names_by_its_module_exists() -> None:
    dotted = re.compile(r"\b(rayloop(?:\.[a-z_]\w*)+)\.([A-Z]\w+)")
    modules = [path for path in TEXTS if path.suffix == ".py"]
    places = [(place, match[1], match[2]) for _, place, match in found(dotted, modules)]
    absent = [
        f"{place}: {module}.{name}" for place, module, name in places if not defined(module, name)
    ]
    assert len(places) > 5, "the pattern finds nothing any more"
    assert not absent, "\n".join(absent)


def defined(dotted: str, name: str | None) -> bool:
    """Whether a module (of it a name), or a name of a module, stands at ``dotted``; nothing is
    imported.
    """
    path = ROOT.joinpath(*dotted.split("."))
    if name is None and not (path.is_dir() or path.with_suffix(".py").exists()):
        path, name = path.parent, path.name
    sources = [path.with_suffix(".py"), path / "__init__.py"]
    return any(
        file.is_file()
        and (name is None or re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")))
        for file in sources
    )


def test_the_index_names_every_page() -> None:
    named = {(DOCS / match[1]).resolve() for _, _, match in found(LINK, [DOCS / "README.md"])}
    folders = {path.parent for path in named if path.name == "README.md"} - {DOCS}
    lost = [
        str(page.relative_to(ROOT))
        for page in DOCS.rglob("*.md")
        if page != DOCS / "README.md" and page not in named and page.parent not in folders
    ]
    assert not lost, f"docs/README.md does not say what these answer: {lost}"


def test_each_word_of_the_glossary_is_in_the_file_that_it_names() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$",
        (DOCS / "glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    words = [word for names, _ in rows for word in names.split(", ")]
    absent = [
        f"{word}: {file}"
        for names, file in rows
        for word in names.split(", ")
        if not (ROOT / file).is_file()
        or not re.search(pattern(word), (ROOT / file).read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert len(words) > 10, "the rows are not found any more"
    assert len(set(words)) == len(words), "a word stands twice"
    assert not absent, "\n".join(absent)


def pattern(word: str) -> str:
    """The word as text, as a name, or as a class."""
    return r"[\s_-]*".join(map(re.escape, re.split(r"[ -]", word)))


def test_every_page_of_what_one_brings_is_short_and_run_by_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    for page in (DOCS / "bring_your_own").glob("[a-z]*.md"):
        assert page.stem in re.findall(r"(?:bring_your_own/|and )(\w+)\.md", tests), (
            f"no test runs what {page.name} shows"
        )
        for program in re.findall(
            r"```python.*?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        ):
            assert len(program.splitlines()) < 50, (
                f"{page.name}: a program of a page is read in a minute"
            )


def test_the_readme_begins_with_what_a_reader_decides_by() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    order = (
        "**Status:",
        "Nothing has run on a GPU yet",
        "    make quickstart ",
        "    make test ",
        "<img src=",
        "| what goes wrong elsewhere |",
        "**Models**",
        "**Not here**",
    )
    places = [first.find(text) for text in order]
    assert places == sorted(places)
    assert places[0] > 0
    commands = [line for line in first.splitlines() if line.startswith("    ")]
    assert len(commands) == 2, "a first screen with two commands"
    rows = [line for line in first.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    assert all(re.search(r"\d.*\]\(", row.split("|")[3]) for row in rows), (
        "each row has a figure and its page"
    )


def test_no_page_is_a_work_log() -> None:
    places = found(
        re.compile(
            r"(?i)\b(?:part|issue|stop|audit) \d+\b|\bbeing built\b|^\| [DLH]\d+ \|", re.MULTILINE
        ),
        PAGES,
    )
    assert [place for _, place, _ in places] == []


def test_what_was_never_exercised_is_in_one_table() -> None:
    table = (
        (DOCS / "engines.md")
        .read_text(encoding="utf-8")
        .partition("## Never exercised")[2]
        .partition("\n## ")[0]
    )
    named = [name for name in re.findall(r"`([\w/.]+)`", table) if (ROOT / name).exists()]
    marked = [
        path
        for path in TEXTS
        if path.suffix == ".py"
        and re.search("never exercised", path.read_text("utf-8"), re.IGNORECASE)
    ]
    assert len(marked) >= 4
    in_settings = {"rayloop/engines/settings.py": "SGLang"}
    places = [str(path.relative_to(ROOT)) for path in marked]
    assert [
        p
        for p in places
        if in_settings.get(p, "?") not in table and not any(p.startswith(name) for name in named)
    ] == []


def test_each_symptom_names_a_metric_that_exists() -> None:
    column, named = None, dict[str, list[str]]()
    for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "metric" in cells:
            column = cells.index("metric")
        elif line.startswith("| ") and column is not None:
            named[line] = [name for name in re.findall(r"`([^`]+)`", cells[column]) if "/" in name]
    assert len(named) > 20, "the rows are not found any more"
    assert [line for line, names in named.items() if not names] == []
    forms = {metric.name for metric in METRICS}
    assert [
        name for names in named.values() for name in names if name not in forms and validate([name])
    ] == []
