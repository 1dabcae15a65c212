"""``python -m tools.pages.readme`` writes the part of README.md that is made from the code."""

from __future__ import annotations

from pathlib import Path

from tools.pages.compatible import languages

PAGE = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- made: begin -->", "<!-- made: end -->"


def page(text: str) -> str:
    """README.md with its table of action languages.

    ``text``: as it was. Raises ValueError without the two marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}, between which its table is written")
    return "\n".join([before + begin, "", *languages.overview(), "", end + after])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
