"""Snippets of the documentation, written to the files that they name, to be run as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_snippets(page: str, folder: Path) -> Path:
    """Every snippet of ``docs/page`` into ``folder``, which is returned.

    One without a file would be run by nothing.
    """
    for language, name, text in SNIPPET.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        assert name, f"docs/{page}: a snippet of {language} has no file, so nothing would run it"
        (folder / name).write_text(text, encoding="utf-8")
    return folder
