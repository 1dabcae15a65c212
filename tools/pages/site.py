"""``python -m tools.pages.site OUT``: the pages as a site with search, and ``llms.txt``, a
list of them for language models.

mkdocs with its theme material (the extra ``site``) builds it strictly: a link that leads nowhere
ends the build. Pages keep their places, so that their links among each other and to files of the
repository hold; these files go along. Nothing is fetched from elsewhere when the site is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "deploy/**/*.md", "recipes/**/*.md", "benchmarks/gpu/*.md")
LINK = re.compile(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)|src=\"([^\":]+)\"")
ENTRY = re.compile(r"\[[^\]]*\]\((?P<path>[^)#]+\.md)\)")
TITLE = re.compile(r"^(```\w* )title=(\S+)", re.MULTILINE)
"""The name of a program on a page, which the theme wants in quotation marks."""
THEME = {
    "name": "material",
    "font": False,
    "features": [
        "navigation.tabs",
        "navigation.top",
        "search.suggest",
        "search.highlight",
        "content.code.copy",
    ],
    "palette": [
        {
            "media": "(prefers-color-scheme: light)",
            "scheme": "default",
            "toggle": {"icon": "material/weather-night", "name": "dark"},
        },
        {
            "media": "(prefers-color-scheme: dark)",
            "scheme": "slate",
            "toggle": {"icon": "material/weather-sunny", "name": "light"},
        },
    ],
}


def pages() -> list[Path]:
    """The pages, relative to the root."""
    return sorted({path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern)})


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository, relative to its root, to which a page links."""
    for match in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page.parent / (match[1] or match[2])).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target.relative_to(ROOT)


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The headings of docs/README.md, and of each the lines below it as (paths joined by spaces,
    what they answer).
    """
    for part in (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, lines = part.partition("\n")
        entries = []
        for line in lines.splitlines():
            paths = [
                str((ROOT / "docs" / match["path"]).resolve().relative_to(ROOT))
                for match in ENTRY.finditer(line)
            ]
            if paths:
                entries.append((" ".join(paths), line.rpartition(": ")[2]))
        yield heading, entries


def navigation() -> list[dict[str, Any]]:
    """The order of docs/README.md; pages that it reaches through another page come after it."""
    named = {path for _, entries in sections() for paths, _ in entries for path in paths.split()}
    rest = [str(page) for page in pages() if str(page) not in named]
    tabs: list[dict[str, Any]] = [{"Start": ["README.md"]}]
    for heading, entries in sections():
        paths = [path for paths, _ in entries for path in paths.split() if path != "README.md"]
        tabs.append(
            {
                heading: [
                    page
                    for path in paths
                    for page in (path, *(other for other in rest if _below(other, path)))
                ]
            }
        )
    placed = {page for tab in tabs for listed in tab.values() for page in listed}
    tabs.append({"More": [page for page in rest if page not in placed]})
    return tabs


def _below(page: str, index: str) -> bool:
    return (
        index.endswith("/README.md")
        and index != "docs/README.md"
        and Path(page).parent == Path(index).parent
    )


def title(page: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else page


def llms() -> str:
    """The list of pages as https://llmstxt.org describes it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.sub(r"[*\n]+", " ", readme.split("\n\n")[1]).strip()
    lines = ["# rayloop", "", f"> {first}"]
    for heading, entries in sections():
        lines += ["", f"## {heading}", ""]
        lines += [
            f"- [{title(path)}]({path}): {answer}"
            for paths, answer in entries
            for path in paths.split()
        ]
    return "\n".join(lines) + "\n"


def build(out: Path) -> None:
    """Build into ``out``. Raises CalledProcessError when mkdocs finds something wrong."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pages"
        for path in {*pages(), *(target for page in pages() for target in linked(page))}:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, source / path)
            if path.suffix == ".md":
                (source / path).write_text(
                    TITLE.sub(r'\1title="\2"', (ROOT / path).read_text(encoding="utf-8")),
                    encoding="utf-8",
                )
        (source / "llms.txt").write_text(llms(), encoding="utf-8")
        configuration = {
            "site_name": "rayloop",
            "docs_dir": "pages",
            "site_dir": str(out.resolve()),
            "strict": True,
            "theme": THEME,
            "nav": navigation(),
            "plugins": ["search"],
            "use_directory_urls": False,
            "markdown_extensions": [
                "tables",
                "admonition",
                "pymdownx.superfences",
                {"toc": {"permalink": True}},
            ],
            "validation": {
                "links": {"anchors": "warn", "unrecognized_links": "warn"},
                "omitted_files": "info",
            },
        }
        (Path(folder) / "mkdocs.yml").write_text(
            yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8"
        )
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            f"{folder}/mkdocs.yml",
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
