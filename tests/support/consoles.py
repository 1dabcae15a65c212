"""The line that a console prints when its output is no terminal."""

from __future__ import annotations

import re
from pathlib import Path


def opened(line: str) -> str:
    """The address with the token from the file that the line names; the address alone when it names
    none.
    """
    url, _, file = line.removeprefix("console: ").strip().partition(" ")
    found = re.fullmatch(r"\(its \?token= is in (.+)\)", file)
    return f"{url}?token={Path(found[1]).read_text(encoding='utf-8')}" if found else url
